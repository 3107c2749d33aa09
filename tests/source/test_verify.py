"""Generated files are bitwise `apply`, leave no site, and have no change too many; a wrong one is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphalign.errors import PatchError
from graphalign.rewrite.apply import apply
from graphalign.source.generate import generate
from graphalign.source.plan import parts
from graphalign.source.verify import Reference, Run, differing, execute, in_place, runs, verify
from tests.breadth import models
from tests.source.generated import again, spec, verified

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["qwen3_tail", "gpt_neox", "glm4_moe"])
def test_generated_files_are_the_patch(name: str) -> None:
    """These, and all others that are recorded: `python -m tests.source.generated`."""
    assert verified(name).changed_lines <= 16


def test_casts_where_values_are_made_under_nested_checkpointing() -> None:
    """Zamba 2: a checkpointed layer inside another; what both round is added up in two backward passes under reentrant checkpointing."""
    model, patch = models.build("zamba2"), spec("zamba2")
    run = Run((1, 9, 0), checkpointing=True)
    with apply(model, patch, allow_stale=True):
        want = execute(model, run)
    found = {}
    for early in (False, True):
        with in_place(model, generate(model, patch, early=early)):
            found[early] = differing(want, execute(model, run))
    assert found[False]
    assert not found[True]


def test_a_wrong_file_is_not_written() -> None:
    model, patch = models.build("llama_odd"), spec("llama_odd")
    reference = Reference(model, patch, allow_stale=True)
    right = generate(model, patch)
    span, change = next((s, c) for s, c in right.changes.items() if c.down)
    wrong = right.without(span, parts(change)[0])
    with pytest.raises(PatchError, match="is not the patch, and was not written"):
        verify(reference, wrong, None)
    with in_place(model, right):
        assert again("llama_odd", model).groups == ()
    before = execute(model, runs(model)[0])
    assert before["logits"] is not None
    assert all((before[n] is None) == (v is None) for n, v in reference.stock.items())


def test_a_site_that_remains_is_noticed() -> None:
    """The recapture is compared with the engine, not with the patch."""
    model, patch = models.build("llama_odd"), spec("llama_odd")
    less = patch.model_copy(update={"groups": patch.groups[:1]})
    reference = Reference(model, less, allow_stale=True)
    made = replace(generate(model, less), spec=patch)
    with pytest.raises(PatchError, match="leaves sites"):
        verify(reference, made, lambda m: again("llama_odd", m))


def test_what_can_be_left_out_unnoticed_is_left_out() -> None:
    """Exaone 4's q and k are rounded behind RoPE and where they enter the attention; one of them is enough."""
    found = verified("exaone4").body
    assert "q_embed = (q * cos) + (rotate_half(q) * sin)\n" in found
    assert "k_embed = (k * cos) + (rotate_half(k) * sin)\n" in found
