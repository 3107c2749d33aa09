"""Regimes, attention and checkpointing of real trainers, each against the patch by hand on logits and all gradients."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3 as q

import graphalign
from graphalign.errors import PatchError, PatchNotLiveError
from graphalign.patch.make import make_spec
from graphalign.patch.spec import PatchSpec
from tests.breadth.captured import report
from tests.rewrite import kernels, tiny
from tests.rewrite.test_by_hand import packed, padded

ATTENTION: dict[str, tuple[str, Any, int]] = {
    "sdpa, padded": ("sdpa", padded, 2),
    "FlashAttention 2, packed": ("flash_attention_2", packed, 1),
    "flex attention, packed": ("flex_attention", packed, 1),
}
"""Name, extra inputs, batch size."""
CHECKPOINTING: dict[str, bool | None] = {"none": None, "reentrant": True, "not reentrant": False}
SAME = "bitwise"
Cells = dict[tuple[str, str], str]
"""By attention and checkpointing: `SAME`, or what was refused or differs."""


def bf16(attention: str, patcher: pytest.MonkeyPatch) -> tuple[nn.Module, nn.Module]:
    model = kernels.use(tiny.build(2), attention, patcher)
    hand = tiny.by_hand(copy.deepcopy(model))
    tiny.patch(model)
    return model, hand


def lora(attention: str, patcher: pytest.MonkeyPatch) -> tuple[nn.Module, nn.Module]:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights=False)
    out = []
    for m in bf16(attention, patcher):
        torch.manual_seed(1)
        out.append(peft.get_peft_model(m, config))
    return out[0], out[1]


@functools.cache
def autocast_spec() -> PatchSpec:
    """Of a recorded Qwen3 of six layers whose trainer has FP32 weights under BF16 autocast, cut to two."""
    spec = make_spec(report("qwen3_autocast"))
    groups = tuple(
        g.model_copy(
            update={
                "edits": tuple(
                    e.model_copy(update={k: "0-1" for k in ("layers", "producer_layers") if getattr(e, k) == "0-5"}) for e in g.edits
                )
            }
        )
        for g in spec.groups
    )
    return spec.model_copy(update={"groups": groups, "model": {}})


def autocast(attention: str, patcher: pytest.MonkeyPatch) -> tuple[nn.Module, nn.Module]:
    model = kernels.use(tiny.build(2, dtype=torch.float32), attention, patcher)
    hand = cast_by_hand(copy.deepcopy(model))
    graphalign.apply(model, autocast_spec(), allow_stale=True, trial=False)
    return model, hand


def cast_by_hand(model: nn.Module) -> nn.Module:
    """Patch a model of FP32 weights by hand, in place."""
    for name, m in model.named_modules():
        if type(m) in CAST:
            m.__class__ = CAST[type(m)]
            m.head = name.endswith(("q_norm", "k_norm"))
            m.first = name.endswith("layers.0") or ".layers.0.input" in name
    return model


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(torch.float32)


class CastNorm(q.Qwen3RMSNorm):
    """Of FP32 weights under autocast: reads the weight rounded, the embedding too; the norm of a head stays FP32 into the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = (rounded(x) if self.first else x).pow(2).mean(-1, keepdim=True)
        x = (rounded(x) if self.first else x) * torch.rsqrt(variance + self.variance_epsilon)
        return rounded(self.weight) * (x if self.head else x.to(dtype))


class CastMLP(q.Qwen3MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).float()) * self.up_proj(x))


class CastAttention(q.Qwen3Attention):
    def forward(self, hidden_states, position_embeddings, *args, **kwargs):  # type: ignore[no-untyped-def]
        return super().forward(hidden_states, tuple(map(rounded, position_embeddings)), *args, **kwargs)


class CastLayer(q.Qwen3DecoderLayer):
    def forward(self, hidden_states, **kwargs):  # type: ignore[no-untyped-def]
        out, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = (rounded(hidden_states) if self.first else hidden_states) + out
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


CAST = {q.Qwen3RMSNorm: CastNorm, q.Qwen3MLP: CastMLP, q.Qwen3Attention: CastAttention, q.Qwen3DecoderLayer: CastLayer}
REGIMES: dict[str, tuple[Callable[[str, pytest.MonkeyPatch], tuple[nn.Module, nn.Module]], bool]] = {
    "BF16 weights": (bf16, False),
    "LoRA on BF16 weights": (lora, False),
    "FP32 weights, autocast": (autocast, True),
}
"""What makes the patched model and the one patched by hand; whether autocast is on. FP32 masters under FSDP2 are in `sharded_ranks`."""
MASTERS = "FP32 masters, FSDP2"


@contextlib.contextmanager
def maybe_autocast(on: bool) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16) if on else contextlib.nullcontext():
        yield


def run(model: Any, inputs: dict[str, Any], cast: bool = False) -> list[torch.Tensor | None]:
    """Logits and the gradients of all parameters, whole ones where they are sharded."""
    model.train().zero_grad()
    with maybe_autocast(cast):
        out = model(**inputs)
    out.loss.backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return [out.logits.detach(), *grads]


def same(a: list[Any], b: list[Any]) -> bool:
    """Bitwise equal, and there are gradients."""
    graded = any(g is not None for g in b[1:])
    return graded and len(a) == len(b) and all((u is None and v is None) or torch.equal(u, v) for u, v in zip(a, b, strict=True))


def inputs_for(attention: str, seed: int = 1) -> dict[str, Any]:
    _, extra, batch = ATTENTION[attention]
    x = tiny.tokens(batch, 11, seed)
    return {"input_ids": x, "labels": x, "use_cache": False} | extra(batch, 11)


def cells(attention: str, model: Any, hand: Any, cast: bool, seed: int = 1) -> Cells:
    """One pair of models, without checkpointing and with both kinds."""
    inputs, out = inputs_for(attention, seed), {}
    for name, reentrant in CHECKPOINTING.items():
        if reentrant is not None:
            for m in (model, hand):
                m.gradient_checkpointing_enable({"use_reentrant": reentrant})
                m.enable_input_require_grads()
        try:
            got, want = run(model, inputs, cast), run(hand, inputs, cast)
        except (PatchError, PatchNotLiveError) as e:
            out[attention, name] = f"refused: {e.what}"
        else:
            differ = sum(not (u is None and v is None) and not torch.equal(u, v) for u, v in zip(got, want, strict=True))
            out[attention, name] = SAME if same(got, want) else f"{differ} of {len(want)} tensors differ"
    return out
