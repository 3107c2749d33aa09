"""TRL's own trainers, patched by `attach`, against the patch by hand: the weights after some steps are bitwise equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import graphalign
from graphalign.engines import flash
from graphalign.errors import PatchError
from graphalign.integrations.trl import attach
from graphalign.patch.spec import PatchSpec
from tests.rewrite.matrix import autocast_spec, cast_by_hand
from tests.rewrite.test_integration import assert_same
from tests.rewrite.tiny import VOCAB, build, by_hand, spec_for, tokens

LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"])
COMMON: dict[str, Any] = {
    "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 0, "max_steps": 2, "learning_rate": 1e-2,
    "logging_steps": 1,
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t1"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", unk_token="t1", eos_token="t2")


def sentence(seed: int, length: int) -> str:
    return " ".join(f"t{(7 * seed + 13 * j) % 500 + 3}" for j in range(length))


def odd(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(t % 2 for t in ids) / len(ids) for ids in completion_ids]


def grpo(model: nn.Module, out: Path, **options: Any) -> GRPOTrainer:
    adapter = options.pop("peft_config", None)
    args = GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=4, num_generations=4, max_completion_length=6, temperature=1.0,
        **COMMON | options,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": [sentence(i, 5 + i % 3) for i in range(8)]})
    return GRPOTrainer(
        model=model, reward_funcs=odd, args=args, train_dataset=data, processing_class=tokenizer(), peft_config=adapter
    )  # fmt: skip


def sft(model: nn.Module, out: Path, **options: Any) -> SFTTrainer:
    adapter = options.pop("peft_config", None)
    args = SFTConfig(output_dir=str(out), per_device_train_batch_size=2, max_length=16, **COMMON | options)
    data = Dataset.from_dict({"text": [sentence(i, 4 + i % 5) for i in range(16)]})
    return SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer(), peft_config=adapter)


Make = Callable[..., Any]
CASES: dict[str, tuple[Make, str, dict[str, Any]]] = {
    "GRPO, BF16 weights, checkpointing": (grpo, "bf16", {"bf16": False, "gradient_checkpointing": True}),
    "GRPO, FP32 weights, bf16=True": (grpo, "autocast", {"bf16": True, "gradient_checkpointing": True}),
    "GRPO, LoRA, reentrant checkpointing": (
        grpo, "bf16",
        {"bf16": False, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}, "peft_config": LORA},
    ),
    "SFT, FP32 weights, bf16=True": (sft, "autocast", {"bf16": True, "gradient_checkpointing": False}),
    "SFT, LoRA, packing on FlashAttention": (
        sft, "flash", {"bf16": False, "packing": True, "gradient_checkpointing": True, "peft_config": LORA}
    ),
}  # fmt: skip


def models(kind: str) -> tuple[nn.Module, nn.Module, PatchSpec]:
    """A stock model, the same patched by hand, and the patch."""
    if kind == "autocast":
        model = build(2, dtype=torch.float32)
        return model, cast_by_hand(copy.deepcopy(model)), autocast_spec()
    model = build(2)
    if kind == "flash":
        flash.stand_in(model)
        model.config._attn_implementation = "flash_attention_2"
    return model, by_hand(copy.deepcopy(model)), spec_for(2)


@pytest.mark.parametrize("case", CASES)
def test_trains_as_by_hand(case: str, tmp_path: Path) -> None:
    make, kind, options = CASES[case]
    model, hand, spec = models(kind)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        x = {"input_ids": tokens(1, 9), "attention_mask": torch.ones(1, 9, dtype=torch.long)}
        assert not torch.equal(model(**x).logits, hand(**x).logits)
    trainers: list[Any] = []
    for m in (model, hand):
        torch.manual_seed(0)
        trainers.append(make(m, tmp_path / str(len(trainers)), **options))
    attach(trainers[0], spec, allow_stale=True)
    for trainer in trainers:
        torch.manual_seed(0)
        trainer.train()
    assert_same(trainers[0].model, trainers[1].model)
    assert trainers[0].state.log_history[0]["loss"] == trainers[1].state.log_history[0]["loss"]


def test_the_reference_model_is_patched_too(tmp_path: Path) -> None:
    build(2).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    trainer = grpo(model, tmp_path / "out", bf16=False, beta=0.1, model_init_kwargs=None)
    reference = trainer.ref_model
    trainer.ref_model = reference.to(torch.bfloat16)  # TRL makes it FP32 by default
    attach(trainer, spec_for(2), allow_stale=True)
    assert len(trainer.graphalign_patches) == 2
    assert graphalign.undo(trainer.ref_model) > 0
    assert graphalign.undo(trainer.model) > 0


def test_nothing_is_patched_where_the_reference_does_not_fit(tmp_path: Path) -> None:
    class Two:
        model, ref_model = build(2), build(2, dtype=torch.float32)

    trainer = Two()
    with pytest.raises(PatchError, match="float32 parameters; the patch is for bfloat16"):
        attach(trainer, spec_for(2), allow_stale=True)
    assert graphalign.undo(trainer.model) == 0
    with pytest.raises(PatchError, match="has no model to patch"):
        attach(object(), spec_for(2))
