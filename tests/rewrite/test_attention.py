"""Attention that Dynamo cannot trace is live under a patch, bit for bit the patch by hand. Kernels of this machine stand in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.integrations import flash_attention, sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import graphalign
from graphalign.errors import PatchNotLiveError
from tests.rewrite import kernels
from tests.rewrite.test_by_hand import assert_equal, gradients, packed, padded
from tests.rewrite.tiny import build, by_hand, patch, spec_for, tokens


def pair(attention: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    model = kernels.use(build(2), attention, monkeypatch)
    hand = by_hand(copy.deepcopy(model))
    patch(model)
    return model.train(), hand.train()


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_the_kernels_see_padding(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed sequences and checkpointing are in `test_trainers.py`."""
    models = pair(attention, monkeypatch)
    x = tokens(2, 13)
    inputs = {"input_ids": x, "labels": x, "use_cache": False}
    found = [gradients(m, **inputs, **padded(2, 13)) for m in models]
    assert_equal(*found)
    assert not torch.equal(gradients(models[1], **inputs)["logits"], found[1]["logits"])


def test_apply_tries_it_and_a_cache_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model, hand = kernels.use(build(2), "flash_attention_2", monkeypatch), by_hand(kernels.use(build(2), "flash_attention_2", monkeypatch))
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    graphalign.apply(model, spec_for(2), allow_stale=True)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for step in (tokens(2, 9), tokens(2, 1, seed=2)):
            a, b = (m(step, past_key_values=c, use_cache=True).logits for m, c in zip((model, hand), caches, strict=True))
            assert torch.equal(a, b)
    assert dict(ALL_ATTENTION_FUNCTIONS.items()) == before


def test_what_a_trainer_puts_in_place_of_transformers_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's and SkyRL's Ulysses replace `_flash_attention_forward` in the module of `flash_attention_forward`, also after the patch."""
    models = pair("flash_attention_2", monkeypatch)
    x = tokens(1, 9)
    inputs: dict[str, Any] = {"input_ids": x, "labels": x, "use_cache": False} | packed(1, 9)
    stock = [gradients(m, **inputs) for m in models]
    forward, calls = flash_attention._flash_attention_forward, []

    def ulysses(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(int(query.abs().sum() > 0))  # decides by numbers, as its exchange of heads does by ranks
        return forward(query.flip(2), *args, **kwargs).flip(2)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", ulysses)
    found = [gradients(m, **inputs) for m in models]
    assert calls == [1] * 4
    assert_equal(*found)
    assert not torch.equal(found[0]["logits"], stock[0]["logits"])


def own(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """A user's attention: looks at numbers, at a setting of its module, and at what the trainer hands down."""
    if float(query.detach().abs().max()) < 0:
        raise AssertionError
    kwargs["scaling"] = module.scaling * kwargs.pop("sharpness", 1.0)
    return sdpa_attention.sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping))
    AttentionInterface.register("mine", own)
    return "mine"


def test_registered_by_the_user(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pair(mine, monkeypatch)
    x = tokens(2, 11)
    for sharpness in (1.0, 2.0):
        assert_equal(*(gradients(m, input_ids=x, labels=x, use_cache=False, sharpness=sharpness) for m in models))
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", own)  # in the place of one that exists
    models = pair("sdpa", monkeypatch)
    assert_equal(*(gradients(m, input_ids=x, labels=x, use_cache=False) for m in models))


def test_another_dtype_than_the_query_is_refused(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    AttentionInterface.register(mine, lambda *a, **k: (own(*a, **k)[0].float(), None))
    model, _ = pair(mine, monkeypatch)
    with pytest.raises(PatchNotLiveError, match=r"the attention function .* returned .* in torch.float32, not .* in torch.bfloat16"):
        model(tokens(), use_cache=False)
    assert AttentionInterface._global_mapping[mine] is ALL_ATTENTION_FUNCTIONS[mine]


def test_a_stock_model_that_runs_meanwhile_keeps_its_function(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = kernels.use(build(2), mine, monkeypatch)
    with torch.no_grad():
        alone = stock(tokens(), use_cache=False).logits
    found: list[torch.Tensor] = []
    inside: list[bool] = []

    def look(*args: Any, **kwargs: Any) -> Any:
        if not inside:
            inside.append(True)
            found.append(stock(tokens(), use_cache=False).logits)
            inside.clear()
        return own(*args, **kwargs)

    AttentionInterface.register(mine, look)
    model, hand = pair(mine, monkeypatch)
    with torch.no_grad():
        assert torch.equal(model(tokens(), use_cache=False).logits, hand(tokens(), use_cache=False).logits)
    assert len(found) > 0
    assert all(torch.equal(x, alone) for x in found)


def test_where_the_graph_breaks_is_said() -> None:
    model: Any = build(2)
    patch(model)
    stock = type(model.model.layers[0].mlp)

    class Own(stock):  # type: ignore[valid-type,misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.abs().max() < 0:
                raise AssertionError
            return super().forward(x)  # type: ignore[no-any-return]

    model.model.layers[1].mlp.__class__ = Own
    with pytest.raises(PatchNotLiveError) as e:
        model(tokens(), use_cache=False)
    assert "Dynamo cannot trace what the module runs now: Data-dependent branching (test_attention.py:" in str(e.value)
    assert "if x.abs().max() < 0" in str(e.value)
    assert "registered with Transformers" in str(e.value.hint)
