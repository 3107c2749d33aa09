"""A patch changes no format that a GEMM or an attention kernel reads, forward or backward, and a changed regime is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphalign
from graphalign.errors import BadInputError, PatchError, PatchNotLiveError
from graphalign.patch.make import make_spec
from graphalign.rewrite import edit
from graphalign.rewrite.analyse import tensor_operands
from graphalign.rewrite.formats import formats_of, moved
from tests.breadth import models
from tests.breadth.captured import report
from tests.rewrite import tiny

CHECKPOINTING = ({"use_reentrant": True}, {"use_reentrant": False})
RECORDED = [n for n, r in models.recipes().items() if r["autocast"] is None]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(model: Any) -> torch.Tensor:
    return (torch.arange(34).reshape(2, 17) * 37 + 11) % model.config.get_text_config().vocab_size


def gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=tokens(model), use_cache=False).logits
    logits.float().square().mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def different(a: tuple[torch.Tensor, dict[str, torch.Tensor]], b: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> list[str]:
    grads = [n for n in {*a[1], *b[1]} if n not in a[1] or n not in b[1] or not torch.equal(a[1][n], b[1][n])]
    return grads if torch.equal(a[0], b[0]) else ["logits", *grads]


def without_dropout(model: nn.Module) -> None:
    """As a module or as a number that a forward hands to the function (OPT)."""
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
        for name, value in list(vars(m).items()):
            if "drop" in name and isinstance(value, float):
                setattr(m, name, 0.0)


REFUSED = {
    **dict.fromkeys(("bloom", "cohere2", "ernie45_moe", "gemma2", "minicpm3", "olmoe", "vaultgemma"), "compute different functions"),
    "nanochat": "NanoChatRMSNorm would run without its patch",
}
"""Recorded models that get no patch, and why; every other one must."""


def apply_or_skip(model: Any, name: str) -> graphalign.Patched:
    try:
        patched = graphalign.apply(model, make_spec(report(name)), allow_stale=True)
    except (BadInputError, PatchError) as e:
        if name not in REFUSED or REFUSED[name] not in e.what:
            raise
        pytest.skip(f"refused: {e.what}"[:120])
    assert name not in REFUSED
    return patched


@pytest.mark.timeout(1200)  # state-space mixers: a thousand ops a layer, compiled three times
@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_architecture(name: str) -> None:
    """Formats in forward and backward as in the stock model; gradients with both kinds of checkpointing bitwise those without."""
    model = models.build(name).train()
    without_dropout(model)
    with formats_of(model) as stock:
        gradients(model)
    assert stock
    with apply_or_skip(model, name):
        with formats_of(model) as patched:
            plain = gradients(model)
        assert moved(stock, patched) == ""
        assert not any("float32" in formats for op, formats, _ in patched if (op, formats) not in {c[:2] for c in stock})
        if not model.supports_gradient_checkpointing:
            return
        for kind in CHECKPOINTING:
            model.gradient_checkpointing_enable(kind)
            assert different(plain, gradients(model)) == [], kind
            model.gradient_checkpointing_disable()


def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that once was: `x` of `y.type_as(x)` taken for an operand, and GEMMs for ops that may be widened."""
    monkeypatch.setattr(edit, "carried_operands", lambda n: tensor_operands(n) or n.all_input_nodes)
    monkeypatch.setattr(edit, "is_anchor", lambda info: False)


def test_a_patch_that_widens_a_gemm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, model = make_spec(report("gemma3")), models.build("gemma3")
    kind = type(model.model.layers[0])
    widened(monkeypatch)
    with pytest.raises(PatchError, match="would read other formats than in the stock model") as failure:
        graphalign.apply(model, spec, allow_stale=True)
    assert "aten.mm(float32, float32)" in failure.value.where
    assert "aten.mm(bfloat16, bfloat16) of layers.0.self_attn.q_proj.weight" in failure.value.where
    assert type(model.model.layers[0]) is kind  # nothing was changed


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attention": (lambda m: m.set_attn_implementation("eager"), "its attention implementation is eager now, and was sdpa"),
    "config": (lambda m: setattr(m.config, "_attn_implementation", "eager"), "its attention implementation is eager now"),
    "float": (lambda m: m.float(), "is float32 now, and was bfloat16"),
    "one parameter": (lambda m: m.model.layers[1].mlp.to(torch.float16), "mlp.gate_proj.weight is float16 now"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("copied", [False, True])
def test_a_changed_regime_raises_at_the_next_forward(change: str, copied: bool) -> None:
    model = tiny.build()
    ids = torch.tensor([[1, 2, 3]])
    with graphalign.apply(model, tiny.spec_for(3)):
        model(input_ids=ids)
        changed = copy.deepcopy(model) if copied else model
        act, words = CHANGES[change]
        act(changed)
        with pytest.raises(PatchNotLiveError, match=words):
            changed(input_ids=ids)
        if copied:
            model(input_ids=ids)
