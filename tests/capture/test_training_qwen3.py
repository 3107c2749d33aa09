"""What is recorded of a small Qwen3: ops, dtypes, modules, exact sources, and the attention anchor."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.qwen3 import modeling_qwen3

import graphalign
from graphalign.capture.attention import composite_attention, one_sequence
from graphalign.capture.recorder import record
from graphalign.capture.training import capture_training, record_forward
from graphalign.ir.files import read_json, write_json
from graphalign.ir.training import Node, TrainingGraph

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
NORM = "model.layers.1.post_attention_layernorm"
IDS = {"input_ids": torch.tensor([[3, 90, 17, 45]]), "position_ids": torch.tensor([[0, 1, 2, 3]])}


def build(kind: str = "qwen3", *, dtype: torch.dtype = torch.bfloat16, attention: str = "sdpa", **config: Any) -> Any:
    torch.manual_seed(0)
    options = transformers.AutoConfig.for_model(kind, **{**SMALL, **config})
    return transformers.AutoModelForCausalLM.from_config(options, dtype=dtype, attn_implementation=attention).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


@pytest.fixture(scope="module")
def graph(model: Any) -> TrainingGraph:
    return record_forward(model, name="small")


def within(graph: TrainingGraph, module: str) -> Iterator[Node]:
    return (n for n in graph.nodes if n.module == module)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["plain", "autocast"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_recording_changes_no_bit(grad: bool, autocast: torch.dtype | None, attention: str) -> None:
    model = build(dtype=torch.float32 if autocast else torch.bfloat16, attention=attention)

    def run() -> torch.Tensor:
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            out: torch.Tensor = model(**IDS, use_cache=False).logits
        return out

    before = run()
    with composite_attention(), record(model, IDS):
        during = run()
    assert torch.equal(before, during)
    assert torch.equal(before, run())
    if grad:
        plain = torch.autograd.grad(before.float().pow(2).sum(), list(model.parameters()))
        recorded = torch.autograd.grad(during.float().pow(2).sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


def test_rms_norm_ops_and_dtypes(graph: TrainingGraph) -> None:
    assert [(n.op, n.outputs[0] and n.outputs[0].dtype) for n in within(graph, NORM)] == [
        ("aten._to_copy.default", "float32"),
        ("aten.pow.Tensor_Scalar", "float32"),
        ("aten.mean.dim", "float32"),
        ("aten.add.Tensor", "float32"),
        ("aten.rsqrt.default", "float32"),
        ("aten.mul.Tensor", "float32"),
        ("aten._to_copy.default", "bfloat16"),
        ("aten.mul.Tensor", "bfloat16"),
    ]


def test_rms_norm_sources_are_the_expressions(graph: TrainingGraph) -> None:
    sources = [graph.sources[n.source] for n in within(graph, NORM) if n.source is not None]
    assert [s.text for s in sources] == [
        "hidden_states.to(torch.float32)",
        "hidden_states.pow(2)",
        "hidden_states.pow(2).mean(-1, keepdim=True)",
        "variance + self.variance_epsilon",
        "torch.rsqrt(variance + self.variance_epsilon)",
        "hidden_states * torch.rsqrt(variance + self.variance_epsilon)",
        "hidden_states.to(input_dtype)",
        "self.weight * hidden_states.to(input_dtype)",
    ]
    assert {s.function for s in sources} == {"Qwen3RMSNorm.forward"}


def test_every_source_is_the_text_in_its_file(graph: TrainingGraph) -> None:
    root = Path(transformers.__file__).parent.parent
    for s in graph.sources:
        assert not Path(s.file).is_absolute()
        own = Path(graphalign.__file__).parent.parent if s.file.startswith("graphalign/") else root
        lines = (own / s.file).read_text().split("\n")[s.line - 1 : s.end_line]
        lines[-1] = lines[-1].encode()[: s.end_column].decode()
        lines[0] = lines[0].encode()[s.column :].decode()
        assert "\n".join(lines) == s.text
    unnamed = [n.op for n in graph.nodes if n.source is None]  # what hands the logits to the log-probability function
    assert unnamed == ["aten.select.int", "aten.select.int", "graphalign.logprobs"]
    assert len(set(graph.sources)) == len(graph.sources)


def test_attention_is_one_node(graph: TrainingGraph) -> None:
    attention = [n for n in graph.nodes if n.op == "graphalign.attention"]
    assert [n.module for n in attention] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    first = attention[0]
    assert first.kwargs == {
        "implementation": "sdpa", "attention_mask": False, "scaling": 0.25, "is_causal": True, "enable_gqa": True,
        "visible": {"tokens": 64, "below": None, "above": 0},
    }  # fmt: skip
    shapes = {v.id: v.shape for n in graph.nodes for v in n.outputs if v}
    assert [shapes[a["v"]] for a in first.args] == [(1, 4, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16)]
    assert [v and v.shape for v in first.outputs] == [(1, 8, 4, 16), None]
    assert first.source is not None
    source = graph.sources[first.source]
    assert source.text.startswith("attention_interface(")
    assert source.end_line > source.line
    assert source.text in inspect.getsource(modeling_qwen3)
    assert not any("scaled_dot_product" in n.op for n in graph.nodes)


def test_inputs(graph: TrainingGraph) -> None:
    inputs = {i.name: i for i in graph.inputs}
    assert inputs["input_ids"].kind == inputs["position_ids"].kind == "input"
    assert inputs["model.rotary_emb.inv_freq"].kind == "buffer"
    assert inputs["model.rotary_emb.inv_freq"].data
    parameters = [i.name for i in graph.inputs if i.kind == "parameter"]
    assert "model.embed_tokens.weight" in parameters
    assert "lm_head.weight" not in parameters, "tied: one input under its first name"
    assert all(i.data is None for i in graph.inputs if i.kind == "parameter")
    assert len(parameters) == len(set(parameters)) == 1 + 2 * 11 + 1


def test_header(graph: TrainingGraph) -> None:
    h = graph.header
    assert h.model["architecture"] == "Qwen3ForCausalLM"
    assert (h.model["layers"], h.model["max_position_embeddings"], h.model["vocab"], h.tokens) == (2, 512, 128, 8)
    assert h.model["sources"]["transformers/models/qwen3/modeling_qwen3.py"]
    assert (h.regime["param_dtype"], h.regime["autocast"], h.regime["attention"], h.regime["mode"]) == ("bfloat16", None, "sdpa", "eval")
    assert {"torch", "transformers", "python"} <= set(h.versions)
    assert h.notes == ()


def test_config_digest_is_of_the_model_not_of_the_run(graph: TrainingGraph) -> None:
    assert record_forward(build(dtype=torch.float32)).header.model["config_digest"] == graph.header.model["config_digest"]
    assert record_forward(build(rms_norm_eps=1e-5)).header.model["config_digest"] != graph.header.model["config_digest"]


def test_file_round_trip(graph: TrainingGraph, tmp_path: Path) -> None:
    for name in ("t.json", "t.json.gz"):
        write_json(tmp_path / name, graph)
        assert read_json(tmp_path / name, TrainingGraph, kind="training capture") == graph


def test_two_recordings_are_equal(model: Any, graph: TrainingGraph) -> None:
    assert record_forward(model, name="small") == graph


def test_autocast_casts_are_visible() -> None:
    plain = record_forward(build(dtype=torch.float32))
    cast = record_forward(build(dtype=torch.float32), autocast="bfloat16")
    assert not any("bfloat16" in str(n.kwargs) for n in plain.nodes)
    weights = {i.value.id: i.name for i in cast.inputs if i.kind == "parameter"}
    casts = [
        weights.get(n.args[0]["v"]) for n in cast.nodes if n.op == "aten._to_copy.default" and n.kwargs["dtype"] == {"dtype": "bfloat16"}
    ]
    assert "model.layers.0.mlp.gate_proj.weight" in casts
    assert cast.header.regime["autocast"] == "bfloat16"
    assert cast.header.regime["param_dtype"] == "float32"
    residual = [n for n in within(cast, "model.layers.0") if n.op == "aten.add.Tensor"]
    assert [n.outputs[0] and n.outputs[0].dtype for n in residual] == ["float32", "float32"]


def test_spread_positions_are_not_taken_for_packed_sequences(model: Any) -> None:
    spread = {"input_ids": IDS["input_ids"], "position_ids": torch.tensor([[0, 5, 80, 511]])}
    with composite_attention(), record(model, spread) as recorder:
        packed = recorder.finish([model(**spread, use_cache=False).logits])
    with one_sequence(), composite_attention(), record(model, spread) as recorder:
        whole = recorder.finish([model(**spread, use_cache=False).logits])
    for recording, masked in ((packed, True), (whole, False)):
        assert {n.kwargs["attention_mask"] for n in recording.nodes if n.op == "graphalign.attention"} == {masked}


def test_attention_lookup_is_restored_after_an_error(model: Any) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    before = AttentionInterface.get_interface
    with pytest.raises(RuntimeError, match="inside"), composite_attention(), record(model, IDS):
        raise RuntimeError("inside")
    assert AttentionInterface.get_interface is before
    assert "__getitem__" not in AttentionInterface.__dict__
    assert ALL_ATTENTION_FUNCTIONS["sdpa"].__name__ == "sdpa_attention_forward"
    assert not torch.nn.modules.module._global_forward_hooks


def test_attention_outside_of_a_recorder_is_untouched(model: Any) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with composite_attention():
        assert not hasattr(ALL_ATTENTION_FUNCTIONS["sdpa"], "_graphalign_original")
        expected = model(**IDS, use_cache=False).logits
    assert torch.equal(expected, model(**IDS, use_cache=False).logits)


def test_sinks_window_and_softcap() -> None:
    moe = {"num_local_experts": 2, "num_experts_per_tok": 1}
    oss = record_forward(build("gpt_oss", attention="eager", sliding_window=64, tie_word_embeddings=False, **moe))
    names = {i.value.id: i.name for i in oss.inputs}
    first, second = (n for n in oss.nodes if n.op == "graphalign.attention")
    assert names[first.kwargs["sinks"]["v"]] == "model.layers.0.self_attn.sinks"
    assert (first.kwargs.get("sliding_window"), second.kwargs.get("sliding_window")) == (64, None)
    assert oss.header.regime["experts"]

    gemma = record_forward(build("gemma2", attention="eager"))
    assert {n.kwargs["softcap"] for n in gemma.nodes if n.op == "graphalign.attention"} == {50.0}
    dropped = record_forward(build("gemma2", attention="sdpa"))
    for n in dropped.nodes:
        if n.op == "graphalign.attention":
            assert "softcap" not in n.kwargs
            assert n.kwargs["ignored"] == ["softcap"]
    assert any("ignores softcap" in x for x in dropped.header.notes)


def test_module_folder_with_dummy_weights(tmp_path: Path) -> None:
    build().config.save_pretrained(tmp_path)
    graph = capture_training(tmp_path, layers=1)
    assert graph.header.model["layers"] == 1
    assert graph.header.model["name"] == tmp_path.name
    assert sum(n.op == "graphalign.attention" for n in graph.nodes) == 1
    assert str(tmp_path) not in graph.model_dump_json()
