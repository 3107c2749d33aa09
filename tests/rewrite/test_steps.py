"""Patches that name a step of a fused op: the steps are put in the op's place, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphalign
from graphalign.capture.training import record_forward
from graphalign.errors import PatchError
from graphalign.patch.make import make_spec
from graphalign.patch.spec import Key, dump, parse
from graphalign.rewrite.describe import describe
from graphalign.rewrite.live import patched_class
from graphalign.rewrite.units import UnitEdit
from graphalign.sites.find import diff
from tests.breadth import models
from tests.breadth.captured import captures, counts, entries, report

WIDTH = 32
EXPRESSION = "self.norm(x + y)"


class Block(nn.Module):
    """A sum and its norm."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=affine, dtype=torch.bfloat16)
        for p in self.parameters():
            nn.init.normal_(p, mean=0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.norm(x + y)  # type: ignore[no-any-return]

    def by_hand(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean of the unrounded sum; all else from the rounded one."""
        total = x.float() + y.float()
        stored, mean = total.bfloat16().float(), total.mean(-1, keepdim=True)
        rsqrt = ((stored - mean) ** 2).mean(-1, keepdim=True).add(self.norm.eps).rsqrt()
        out = (stored - mean) * rsqrt
        return (out * self.norm.weight + self.norm.bias if self.norm.elementwise_affine else out).bfloat16()


def key(op: str, module: str = "", text: str = EXPRESSION) -> Key:
    return Key(module=module, function="Block.forward", op=op, ordinal=0, text=text, file="test_steps.py")


def edit(step: str = "native_layer_norm:mean", operand: int = 0, module: str = "norm") -> UnitEdit:
    return UnitEdit(0, "residual_layernorm", "keep", "bfloat16", key(step, module), operand, key("add"))


def run(block: Any, forward: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x, y = (torch.randn(2, 5, WIDTH, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    block.zero_grad()
    out = forward(x, y)
    out.backward(torch.randn_like(out))
    return {"out": out.detach(), "x": x.grad, "y": y.grad} | {n: p.grad.clone() for n, p in block.named_parameters()}


@pytest.mark.parametrize("affine", [True, False])
def test_values_and_gradients_are_those_of_the_steps_written_by_hand(affine: bool) -> None:
    block = Block(affine)
    hand, stock = run(block, block.by_hand), run(block, block.forward)
    block.__class__ = patched_class(Block, [edit()], torch.bfloat16, None)
    patched = run(block, block)
    assert [n for n in hand if not torch.equal(hand[n], patched[n])] == []
    assert not torch.equal(stock["out"], patched["out"])


def test_a_step_that_the_op_does_not_have_is_not_found() -> None:
    block = Block(affine=False)
    block.__class__ = patched_class(Block, [edit("native_layer_norm:weighted", 1)], torch.bfloat16, None)
    with pytest.raises(graphalign.errors.PatchNotLiveError, match="0 of the 1 edits"):
        run(block, block)


def test_an_op_that_cannot_be_taken_apart_is_refused() -> None:
    block = Block()
    block.__class__ = patched_class(Block, [edit("add:mean", module="")], torch.bfloat16, None)
    with pytest.raises(PatchError, match=r"add in Block\.forward cannot be taken apart here"):
        run(block, block)


@pytest.mark.parametrize("name", ["gpt_neox", "nemotron", "falcon"])
def test_a_patched_model_captured_again_has_no_sites(name: str) -> None:
    """Its norm is recorded step by step, and the diff knows nothing of the patch. Nemotron's norms add one to their weights."""
    spec = parse(dump(make_spec(report(name))))
    assert spec.skipped == ()
    edits = [e for g in spec.groups for e in g.edits if ":" in e.consumer.op]
    assert "native_layer_norm:mean" in {e.consumer.op for e in edits}
    assert any(": mean  operand 0 reads unrounded" in line for line in describe(spec))
    model = models.build(name)
    with graphalign.apply(model, spec, allow_stale=True):
        again = record_forward(model)
    found = diff(captures(name)[0], again)
    assert counts(found) == {}
    assert entries(found) == {}
    assert found.stats["check"]["equal_stock"] == 1.0
