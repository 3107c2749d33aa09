"""A checkpointed module inside a checkpointed layer: one checkpoint, the same gradients; without the outer one, an error that names it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import graphalign
from graphalign.errors import PatchNotLiveError
from tests.rewrite import tiny


class Inner(GradientCheckpointingLayer, Qwen3MLP):
    """Qwen3's MLP as a layer that Transformers checkpoints, as the Mamba layer inside Zamba 2's hybrid one is."""


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def nested() -> Any:
    model: Any = tiny.build()
    for layer in model.model.layers:
        layer.mlp.__class__ = Inner
    return model.train()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(input_ids=torch.arange(22).reshape(2, 11) + 5, use_cache=False).logits.float().square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [{"use_reentrant": True}, {"use_reentrant": False}], ids=["reentrant", "not"])
def test_same_gradients(kind: dict[str, bool]) -> None:
    model = nested()
    with graphalign.apply(model, tiny.spec_for(3)):
        plain = gradients(model)
        model.gradient_checkpointing_enable(kind)
        again = gradients(model)
        assert all(layer.mlp.gradient_checkpointing for layer in model.model.layers)  # as the user left it
    assert plain.keys() == again.keys()
    assert [n for n in plain if not torch.equal(plain[n], again[n])] == []


def test_only_the_inner_one_is_named() -> None:
    model = nested()
    with graphalign.apply(model, tiny.spec_for(3)):
        model.gradient_checkpointing_enable({"use_reentrant": True})
        for layer in model.model.layers:
            layer.gradient_checkpointing = False
        with pytest.raises(PatchNotLiveError) as e:
            gradients(model)
    assert "gradient checkpointing of modules inside it" in str(e.value.where)
    assert "mlp" in str(e.value.where)
