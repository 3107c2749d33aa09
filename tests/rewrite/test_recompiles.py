"""New lengths cost no compilation once a combination of modes is warm."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import graphalign
import graphalign.rewrite.live as live
from graphalign.rewrite.caching import index_of
from tests.rewrite.tiny import build, by_hand, patch, spec_for, tokens

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


def test_equal_layers_share_their_graphs_with_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache is a list of layers, but one graph serves all that are equal: prefill and decode compile no more in a deep model."""
    counted, count = [], Count(monkeypatch)
    for layers in (3, 9):
        torch._dynamo.reset()
        model: Any = build(layers)
        hand = by_hand(copy.deepcopy(model))
        patch(model)
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        before = count.n
        with torch.no_grad():
            for step in (tokens(2, 9), tokens(2, 1, seed=2), tokens(2, 1, seed=3)):
                a, b = (m(step, past_key_values=c, use_cache=True).logits for m, c in zip((model, hand), caches, strict=True))
                assert torch.equal(a, b)
        counted.append(count.n - before)
        assert [c.get_seq_length(layers - 1) for c in caches] == [11, 11]
    assert counted[0] == counted[1] > 0, counted


def test_a_cache_that_is_asked_more_is_traced_as_it_is() -> None:
    model: Any = build(2)
    stock = type(model.model.layers[0].self_attn)

    class Asking(stock):  # type: ignore[valid-type,misc]
        def forward(self, hidden_states: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
            assert past_key_values is None or past_key_values.get_seq_length(self.layer_idx) >= 0
            return super().forward(hidden_states, *args, past_key_values=past_key_values, **kwargs)

    assert index_of(model.model.layers[1]) == 1
    for layer in model.model.layers:
        layer.self_attn.__class__ = Asking
    assert index_of(model.model.layers[1]) is None
    hand = by_hand(build(2))
    patch(model)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for step in (tokens(2, 9), tokens(2, 1, seed=2)):
            a, b = (m(step, past_key_values=c, use_cache=True).logits for m, c in zip((model, hand), caches, strict=True))
            assert torch.equal(a, b)
