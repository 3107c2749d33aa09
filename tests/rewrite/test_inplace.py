"""Ops that write into their operand are written out of place where an edit concerns them, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import graphalign
from graphalign.errors import PatchError
from graphalign.rewrite.inplace import out_of_place, writes
from tests.breadth import models
from tests.source.generated import again, spec

X = torch.arange(-4.0, 4.0)


def method(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.clamp_(-3, 3)
    return y.view(2, 4) + 1


def function(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.neg_(y)
    return y + x


def augmented(x: torch.Tensor) -> torch.Tensor:
    y = z = x * 2
    y += x
    return z * y


def view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y[2:]
    y.clamp_(-3, 3)
    return z + 1


def through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.view(2, 4)
    z.clamp_(-3, 3)
    return y + 1


def input_(x: torch.Tensor) -> torch.Tensor:
    x.clamp_(-3, 3)
    return x + 1


def captured(f: Callable[..., Any]) -> tuple[fx.GraphModule, fx.Node]:
    """The Dynamo graph of a function, and its op that writes."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(f, backend=keep)(X.clone())
    (node,) = [n for n in graphs[0].graph.nodes if writes(n)]
    return graphs[0], node


@pytest.mark.parametrize("f", [method, function, augmented])
def test_whoever_reads_it_behind_reads_the_new_tensor(f: Callable[..., Any]) -> None:
    gm, node = captured(f)
    out_of_place(gm, node, "")
    gm.recompile()
    assert not [n for n in gm.graph.nodes if writes(n)]
    assert torch.equal(gm(X.clone())[0], f(X.clone()))


@pytest.mark.parametrize(
    ("f", "words"), [(view, "read by another name"), (through_a_view, "read by another name"), (input_, "from outside the module")]
)
def test_what_others_see_is_refused(f: Callable[..., Any], words: str) -> None:
    gm, node = captured(f)
    before = gm.code
    with pytest.raises(PatchError, match=words):
        out_of_place(gm, node, "the line")
    gm.recompile()
    assert gm.code == before


def test_a_clamp_in_place_before_rope() -> None:
    """OLMo 1 with `clip_qkv`: its queries are clamped in place, and RoPE reads them unrounded."""
    model = models.build("olmo")
    with graphalign.apply(model, spec("olmo"), allow_stale=True):
        assert again("olmo", model).groups == ()
