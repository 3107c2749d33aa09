"""Gradients of a patched model agree with a float64 evaluation of the same function, and none is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphalign.proof.gradients import compare_gradients
from tests.rewrite.tiny import build, patch, tokens


def loss(model: Any) -> torch.Tensor:
    x = tokens(2, 15)
    return model(x, labels=x, use_cache=False).loss


@pytest.mark.parametrize("groups", [None, ["rope"]])
def test_patched_gradients(groups: list[str] | None) -> None:
    model = build(2).train()
    patch(model, groups)
    rows = compare_gradients(model, loss)
    assert len(rows) == 2 * 11 + (groups is None)
    assert [r.name for r in rows if r.lost] == []
    assert min(r.cosine for r in rows) > 0.99
    assert all(0.97 < r.norm < 1.03 for r in rows)
    assert all(p.grad is None for p in model.parameters())


def test_a_wrong_gradient_is_seen() -> None:
    model = build(2).train()
    patch(model, ["rope"])
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda g: torch.zeros_like(g))
    other = model.model.layers[1].mlp.up_proj.weight
    other.register_hook(lambda g: g + g.abs().mean() * torch.randn_like(g))
    rows = {r.name: r for r in compare_gradients(model, loss)}
    assert rows["model.layers.0.mlp.up_proj.weight"].lost
    assert rows["model.layers.1.mlp.up_proj.weight"].cosine < 0.9
