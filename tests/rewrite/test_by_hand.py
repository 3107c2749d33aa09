"""`apply` gives, bit for bit, what the same patch written by hand gives: logits and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from tests.rewrite.tiny import build, by_hand, patch, tokens


def padded(batch: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    for i in range(batch):
        mask[i, : 2 * i + 1] = 0
    return {"attention_mask": mask}


def packed(batch: int, length: int) -> dict[str, torch.Tensor]:
    cut = length // 3
    positions = torch.cat([torch.arange(cut), torch.arange(length - cut)])
    return {"position_ids": positions.expand(batch, length).contiguous()}


def pair(attention: str = "sdpa") -> tuple[nn.Module, nn.Module]:
    """A model with the patch, and an equal one patched by hand."""
    model = build(2, attention)
    hand = by_hand(copy.deepcopy(model))
    patch(model)
    return model, hand


def gradients(model: nn.Module, **inputs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return {"logits": out.logits.detach()} | {n: p.grad for n, p in model.named_parameters()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [n for n in a if a[n] is None or not torch.equal(a[n], b[n])] == []


@pytest.mark.parametrize(
    ("attention", "batch", "extra"),
    [("sdpa", 1, None), ("sdpa", 3, padded), ("sdpa", 1, packed), ("sdpa", 3, packed), ("eager", 1, None), ("eager", 3, padded)],
)
def test_logits_and_gradients(attention: str, batch: int, extra: Any) -> None:
    model, hand = pair(attention)
    for length in (11, 18):
        x = tokens(batch, length)
        inputs = {"input_ids": x, "labels": x, "use_cache": False} | (extra(batch, length) if extra else {})
        assert_equal(gradients(model.train(), **inputs), gradients(hand.train(), **inputs))
        if attention == "sdpa" and batch == 1:
            with torch.no_grad():
                assert torch.equal(model.eval()(**inputs).logits, hand.eval()(**inputs).logits)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_and_modes_agree(reentrant: bool) -> None:
    model, hand = pair()
    x = tokens(2, 15)
    with torch.no_grad():
        quiet = model(x, use_cache=False).logits.log_softmax(-1)
    plain = gradients(model.train(), input_ids=x, labels=x, use_cache=False)
    for m in (model, hand):
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            m.enable_input_require_grads()
    checkpointed = gradients(model, input_ids=x, labels=x)
    assert_equal(checkpointed, gradients(hand.train(), input_ids=x, labels=x))
    assert_equal(checkpointed, plain)
    assert torch.equal(quiet, plain["logits"].log_softmax(-1))


def test_cache_prefill_and_decode() -> None:
    model, hand = pair()
    x = tokens(2, 9)
    caches = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        for step in (x, tokens(2, 1, seed=2), tokens(2, 1, seed=3), tokens(2, 3, seed=4)):
            a, b = (m(step, past_key_values=c, use_cache=True).logits for m, c in zip((model, hand), caches, strict=True))
            assert torch.equal(a, b)
    assert all(
        torch.equal(u.keys, v.keys) and u.keys.dtype == torch.bfloat16 for u, v in zip(caches[0].layers, caches[1].layers, strict=True)
    )


def test_generate() -> None:
    model, hand = pair()
    a, b = (m.generate(tokens(1, 6), max_new_tokens=5, do_sample=False) for m in (model, hand))
    assert torch.equal(a, b)


def test_layers_pass_the_unrounded_stream() -> None:
    seen: list[list[torch.Tensor]] = []
    for m in pair():
        seen.append([])
        for layer in m.model.layers:
            layer.register_forward_hook(lambda module, args, out, into=seen[-1]: into.append(out))
        with torch.no_grad():
            m(tokens(1, 7), use_cache=False)
    assert len(seen[0]) == 2
    assert all(torch.equal(u, v) and u.dtype == v.dtype == torch.float32 for u, v in zip(*seen, strict=True))


def test_differs_from_stock() -> None:
    model = build(2)
    stock = copy.deepcopy(model)
    patch(model)
    with torch.no_grad():
        same = (model(tokens()).logits == stock(tokens()).logits).float().mean()
    assert same < 0.5


@pytest.mark.parametrize("layers", [3, 4])
def test_equal_layers_share_a_class(layers: int) -> None:
    model = build(layers)
    patch(model)
    assert len({type(x) for x in model.model.layers[1:]}) == 1
    assert type(model.model.layers[0]) is not type(model.model.layers[1])  # nothing unrounded enters the first
