"""What a patch leaves alone, and what `undo` brings back."""

from __future__ import annotations

import copy
import inspect
import logging
from pathlib import Path

import pytest
import torch

from graphalign.errors import PatchError
from tests.rewrite.tiny import build, by_hand, patch, tokens


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens(), use_cache=False).logits


def test_empty_patch_is_stock_bitwise() -> None:
    model = build(2)
    before, classes = logits(model), [type(m) for m in model.modules()]
    patched = patch(model, ())
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(logits(model), before)
    patched.undo()


def test_undo_is_stock_bitwise_and_nothing_else_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build(2)
    model.model.layers[0].register_forward_hook(lambda *a: None)
    before, classes = logits(model), [type(m) for m in model.modules()]
    state = {n: (id(p), p.clone()) for n, p in model.state_dict(keep_vars=True).items()}
    modules = [(n, id(m), m._forward_hooks.copy(), sorted(vars(m))) for n, m in model.named_modules()]
    model.save_pretrained(tmp_path / "stock")
    with caplog.at_level(logging.INFO, "graphalign"), patch(model) as patched:
        assert patched.model is model
        assert not torch.equal(logits(model), before)
        assert [(n, id(m), m._forward_hooks.copy(), sorted(vars(m))) for n, m in model.named_modules()] == modules
        now = model.state_dict(keep_vars=True)
        assert {n: id(p) for n, p in now.items()} == {n: i for n, (i, _) in state.items()}
        assert all(torch.equal(now[n], p) for n, (_, p) in state.items())
        assert [type(m).__name__ for m in model.modules()] == [c.__name__ for c in classes]
        assert list(inspect.signature(model.model.layers[0].forward).parameters)[:2] == ["hidden_states", "attention_mask"]
        model.save_pretrained(tmp_path / "patched")
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(logits(model), before)
    names = sorted(p.name for p in (tmp_path / "stock").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "patched").iterdir())
    assert all((tmp_path / "stock" / n).read_bytes() == (tmp_path / "patched" / n).read_bytes() for n in names)
    assert [r.message for r in caplog.records] == [
        "graphalign: norm_weight: 9 edges patched",
        "graphalign: residual_rmsnorm: 8 edges patched",
        "graphalign: residual_stream: 3 edges patched",
        "graphalign: rope: 16 edges patched",
        "graphalign: swiglu: 2 edges patched",
    ]
    patched.undo()  # a second time does nothing


def test_undo_then_apply_again() -> None:
    model = build(2)
    hand = by_hand(copy.deepcopy(model))
    patch(model).undo()
    patch(model)
    assert torch.equal(logits(model), logits(hand))


def test_undo_refuses_a_class_that_somebody_changed() -> None:
    model = build(2)
    patched = patch(model, ["rope"])
    layer = model.model.layers[1]
    mine = type("Mine", (type(layer),), {})
    layer.__class__ = mine
    with pytest.raises(PatchError, match="no longer the class that the patch put there"):
        patched.undo()
    assert type(layer) is mine


def test_patched_twice_is_refused() -> None:
    model = build(2)
    patch(model, ["rope"])
    with pytest.raises(PatchError, match=r"model\.layers\.0 is patched already") as e:
        patch(model, ["swiglu"])
    assert "make one patch with all groups" in str(e.value)


def test_deepcopy_is_patched_with_its_own_weights() -> None:
    model = build(2)
    hand = by_hand(copy.deepcopy(model))
    patched = patch(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for m in (twin, hand):
            m.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert torch.equal(logits(twin), logits(hand))
    assert not torch.equal(logits(twin), logits(model))
    patched.undo()
    assert torch.equal(logits(twin), logits(hand))


def test_bare_backbone() -> None:
    model = build(2)
    hand = by_hand(copy.deepcopy(model))
    patch(model.model)
    assert torch.equal(logits(model), logits(hand))
