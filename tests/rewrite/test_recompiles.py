"""New lengths cost no compilation once a combination of modes is warm."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import graphalign
import graphalign.rewrite.live as live
from tests.rewrite.tiny import build, patch, spec_for, tokens

LENGTHS = [7, *range(11, 30)]


class Count:
    """Calls of the rewriter: one per compiled graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n, real = 0, live.rewrite

        def rewrite(*args: Any) -> Any:
            self.n += 1
            return real(*args)

        monkeypatch.setattr(live, "rewrite", rewrite)


def run(model: Any, grad: bool, train: bool, mask: bool, packed: bool, batch: int, length: int) -> None:
    x = tokens(batch, length)
    extra: dict[str, Any] = {}
    if mask:
        extra["attention_mask"] = torch.ones(batch, length, dtype=torch.long)
        extra["attention_mask"][-1, :2] = 0
    if packed:
        extra["position_ids"] = torch.cat([torch.arange(length // 2), torch.arange(length - length // 2)]).expand(batch, length)
    with torch.set_grad_enabled(grad):
        model.train(train)(x, use_cache=False, **extra)


@pytest.mark.parametrize("batch", [1, 3])
def test_new_lengths_in_every_mode(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    model = build(1)
    spec = spec_for(2, ["rope"]).model_copy(update={"groups": one_layer()})
    graphalign.apply(model, spec, allow_stale=True, trial=False)
    modes = list(itertools.product((False, True), repeat=4))
    for mode in modes:
        run(model, *mode, batch, 9)
    count = Count(monkeypatch)
    for mode, length in itertools.product(modes, LENGTHS):
        run(model, *mode, batch, length)
    assert count.n == 0


def one_layer() -> tuple[Any, ...]:
    """The rope group, for a model of one layer."""
    (group,) = spec_for(2, ["rope"]).groups
    edits = tuple(e.model_copy(update={"layers": "0", "producer_layers": "0"}) for e in group.edits)
    return (group.model_copy(update={"edits": edits}),)


def test_new_lengths_with_an_unrounded_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(3)
    patch(model)
    count = Count(monkeypatch)
    run(model, True, True, True, False, 2, 9)
    assert count.n == 3  # the first layer, all others, the final norm
    for length in LENGTHS:
        run(model, True, True, True, False, 2, length)
    assert count.n == 3


def test_new_lengths_with_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(2)
    patch(model, ["rope"])
    with torch.no_grad():
        model(tokens(2, 9), use_cache=True)
        count = Count(monkeypatch)
        for length in LENGTHS:
            model(tokens(2, length), use_cache=True)
    assert count.n == 0
