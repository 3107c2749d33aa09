"""Trainers that are not eager stock models: compiled ones are refused, adapters are taken off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from graphalign.capture.inference import capture_inference
from graphalign.capture.training import capture_training
from graphalign.engines.trainer import build_trainer
from graphalign.errors import BadInputError

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}  # fmt: skip


def llama() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES), dtype=torch.bfloat16).eval()
    return model


def whole(model: Any) -> Any:
    return torch.compile(model)


def in_place(model: Any) -> Any:
    model.compile()
    return model


def one_layer(model: Any) -> Any:
    model.model.layers[1] = torch.compile(model.model.layers[1])
    return model


def one_forward(model: Any) -> Any:
    model.model.norm.forward = torch.compile(model.model.norm.forward)
    return model


@pytest.mark.parametrize("compiled", [whole, in_place, one_layer, one_forward])
def test_a_compiled_trainer_is_refused(compiled: Any) -> None:
    with pytest.raises(BadInputError, match="is compiled") as e:
        capture_training(compiled(llama()))
    assert "capture it eagerly" in e.value.hint


@pytest.mark.slow
def test_a_compiled_function_is_refused_where_it_runs() -> None:
    model: Any = llama()
    act = model.model.layers[1].mlp.act_fn
    fused = torch.compile(lambda x: act(x) * 1.0)

    class Fused(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fused(x)  # type: ignore[no-any-return]

    model.model.layers[1].mlp.act_fn = Fused()
    with pytest.raises(BadInputError, match="calls code that torch"):
        capture_training(model)
    capture_training(llama())  # and nothing of the refusal stays


@pytest.mark.parametrize(
    "options",
    [{"target_modules": ["q_proj", "v_proj"]}, {"target_modules": "all-linear", "use_dora": True},
     {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens", "down_proj"]}],
    ids=["lora", "dora", "modules_to_save", "embedding"],
)  # fmt: skip
def test_adapter_layers_are_taken_off_and_put_back(options: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    stock = capture_training(llama())
    model = get_peft_model(llama(), LoraConfig(r=4, init_lora_weights=False, **options)).eval()
    before = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    names = [n for n, _ in model.named_modules()]
    trained = [p.requires_grad for p in model.parameters()]
    captured = capture_training(model)
    assert trained == [p.requires_grad for p in model.parameters()]
    assert captured.header.notes[0].startswith("PEFT: recorded without its adapter layers")
    assert captured.nodes == stock.nodes
    assert [i.name for i in captured.inputs] == [i.name for i in stock.inputs]
    assert captured.header.regime == stock.header.regime
    assert names == [n for n, _ in model.named_modules()]
    assert torch.equal(before, model(input_ids=torch.tensor([[1, 2, 3]])).logits)


def test_prompt_learning_is_refused() -> None:
    from peft import PromptTuningConfig, get_peft_model

    with pytest.raises(BadInputError, match="prompt learning"):
        capture_training(get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)))  # type: ignore[arg-type]


QUANTISED = [
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8"),
    ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "mxfp4"),
    ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes, load_in_4bit"),
]


@pytest.mark.parametrize(("extra", "method"), QUANTISED)
def test_a_quantised_checkpoint_is_refused_before_the_engine_starts(tmp_path: Path, extra: dict[str, Any], method: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **extra}))
    with pytest.raises(BadInputError, match=rf"quantised \({method}\)"):
        capture_inference(tmp_path, tmp_path / "inf.json", python="/no/python/is/started")
    with pytest.raises(BadInputError, match=rf"quantised \({method}\)"):
        build_trainer(tmp_path)


def test_modelopt_names_its_quantisation_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(BadInputError, match=r"quantised \(modelopt, NVFP4\)"):
        capture_inference(tmp_path, tmp_path / "inf.json", python="/no/python/is/started")


@pytest.mark.parametrize(
    "arguments",
    [{"quantization": "fp8"}, {"load_format": "bitsandbytes"}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"},
     {"hf_overrides": {"quantization_config": {"quant_method": "fp8"}}}],
)  # fmt: skip
def test_an_engine_that_quantises_is_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    with pytest.raises(BadInputError, match="is quantised"):
        capture_inference(tmp_path, tmp_path / "inf.json", engine_args=arguments, python="/no/python/is/started")


def test_what_is_not_quantised_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, "quantization_config": None}))
    with pytest.raises(BadInputError, match="not a Python interpreter"):
        capture_inference(tmp_path, tmp_path / "inf.json", engine_args={"kv_cache_dtype": "auto"}, python="/no/python/is/started")
