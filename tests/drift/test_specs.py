"""Drift between specs: what is asked for, by planted moves, and whether the old patch still holds."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from graphalign.drift.compare import drift
from graphalign.drift.snapshot import of_report, of_spec
from graphalign.errors import BadInputError
from graphalign.patch.make import make_spec
from graphalign.patch.spec import Edit, LeftOut, PatchSpec, Skipped, dump, parse
from tests.drift.data import report


@functools.cache
def spec() -> PatchSpec:
    return make_spec(report("qwen3"))


def changed(change: Callable[[str, Edit], Edit | None]) -> PatchSpec:
    """The spec with every edit passed through a function of its group's name and itself; None drops it."""
    groups = [g.model_copy(update={"edits": tuple(e for x in g.edits if (e := change(g.name, x)))}) for g in spec().groups]
    return spec().model_copy(update={"groups": tuple(g for g in groups if g.edits)})


def verdict(old: PatchSpec, new: PatchSpec) -> str:
    return drift(of_spec(old), of_spec(new)).verdict


def test_the_same_spec_has_not_moved() -> None:
    d = drift(of_spec(spec()), of_spec(parse(dump(spec()))))
    assert (d.moved, d.items, d.verdict, d.reasons) == (False, (), "right", ())


def test_the_spec_agrees_with_the_sites_it_was_made_from() -> None:
    d = drift(of_spec(spec()), of_report(report("qwen3")))
    assert (d.items, d.verdict) == ((), "right")


def test_order_lines_and_digests_are_no_drift() -> None:
    groups = tuple(g.model_copy(update={"edits": g.edits[::-1]}) for g in reversed(spec().groups))
    other = spec().model_copy(update={"groups": groups, "captures": {"inference": "0" * 64}})
    assert drift(of_spec(spec()), of_spec(other)).items == ()


def test_a_missing_edit_leaves_the_old_patch_safe_and_a_superfluous_one_makes_it_wrong() -> None:
    without = changed(lambda group, e: None if group == "swiglu" else e)
    assert verdict(without, spec()) == "safe"
    assert verdict(spec(), without) == "wrong"
    d = drift(of_spec(without), of_spec(spec()))
    (item,) = [i for i in d.items if i.moved]
    assert (item.topic, item.change, item.layers) == ("site", "appeared", "0-5")
    assert item.what.startswith("swiglu: `nn.functional.silu(input)` →")
    assert d.reasons == (f"keep unrounded {item.what} is missing (layers 0-5)",)


@pytest.mark.parametrize(
    ("chosen", "left_out"),
    [
        ({"only": ["rope"]}, {"norm_weight", "residual_rmsnorm", "residual_stream", "swiglu"}),
        ({"without": ["rope"]}, {"rope"}),
        ({"layers": "0-3"}, {"norm_weight", "residual_rmsnorm", "residual_stream", "rope", "swiglu"}),
    ],
)
def test_a_subset_is_not_contradicted_and_contradicts_nothing(chosen: dict[str, Any], left_out: set[str]) -> None:
    """Written and read again: what was left out by choice is neither moved nor judged."""
    subset = parse(dump(make_spec(report("qwen3"), **chosen)))
    d = drift(of_spec(subset), of_report(report("qwen3")))
    assert (d.moved, d.verdict) == (False, "safe")
    assert {r.split(" leaves ")[1].split(" out ")[0] for r in d.reasons} == left_out
    d = drift(of_spec(spec()), of_spec(subset))
    assert (d.moved, d.verdict) == (False, "unknown")
    (note,) = d.items
    assert note.what.startswith("the new spec leaves out by choice: ")
    assert verdict(subset, subset) == "right"


def test_a_subset_is_contradicted_where_it_has_edits() -> None:
    subset = make_spec(report("qwen3"), only=["rope"])
    assert drift(of_spec(subset), of_report(report("qwen3.casts"))).verdict == "wrong"
    moved = [i for i in drift(of_spec(subset), of_report(report("qwen3.casts"))).items if i.topic == "site"]
    assert all(i.what.startswith("rope: ") for i in moved)


def test_layers_that_are_none_are_refused() -> None:
    skipped = (Skipped.by_choice(LeftOut(layers="5-1")),)
    with pytest.raises(BadInputError, match="leaves out what are no layers"):
        of_spec(spec().model_copy(update={"skipped": skipped}))


def test_timings_are_no_drift() -> None:
    later = report("qwen3").model_copy(update={"stats": {**report("qwen3").stats, "seconds": {"align": 99.0}}, "notes": ("another",)})
    assert drift(of_report(report("qwen3")), of_report(later)).items == ()


def test_another_kind_of_edit_is_named() -> None:
    other = changed(lambda group, e: e.model_copy(update={"kind": "round"}) if group == "swiglu" else e)
    d = drift(of_spec(spec()), of_spec(other))
    (item,) = [i for i in d.items if i.moved]
    assert (item.change, item.old, item.new, item.layers) == ("changed", "keep (bfloat16 in training)", "round to bfloat16", "0-5")
    assert d.verdict == "wrong"
    assert "now it must round to bfloat16 (layers 0-5)" in d.reasons[0]


def test_other_layers_are_named() -> None:
    def fewer(group: str, e: Edit) -> Edit:
        return e.model_copy(update={"layers": "1-5", "producer_layers": "1-5"}) if group == "swiglu" else e

    d = drift(of_spec(changed(fewer)), of_spec(spec()))
    (item,) = [i for i in d.items if i.moved]
    assert (item.change, item.old, item.new) == ("changed", "1-5", "0-5")
    assert d.verdict == "safe"


def test_a_renamed_group_is_said_but_no_drift() -> None:
    groups = tuple(g.model_copy(update={"name": f"my_{g.name}"}) for g in spec().groups)
    d = drift(of_spec(spec()), of_spec(spec().model_copy(update={"groups": groups})))
    assert not d.moved
    assert len(d.items) == len(groups)


def test_a_setting_that_one_version_does_not_know_is_drift_only_if_it_is_on() -> None:
    off = spec().model_copy(update={"compile": {**spec().compile, "brand_new": False}})
    on = spec().model_copy(update={"compile": {**spec().compile, "brand_new": True}})
    assert not drift(of_spec(spec()), of_spec(off)).moved
    assert [i.what for i in drift(of_spec(spec()), of_spec(on)).items if i.moved] == ["brand_new"]


def test_a_reformatted_source_keeps_its_identity() -> None:
    def rewritten(group: str, e: Edit) -> Edit:
        return e.model_copy(update={"producer": e.producer.model_copy(update={"text": "F.silu(x)"})}) if group == "swiglu" else e

    d = drift(of_spec(spec()), of_spec(changed(rewritten)))
    assert d.verdict == "right"
    assert [(i.old, i.new) for i in d.items if i.moved] == [("`nn.functional.silu(input)`", "`F.silu(x)`")]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", {"architecture": "LlamaForCausalLM"}, "different models: architecture is Qwen3ForCausalLM in one and LlamaForCausalLM"),
        ("model", {"layers": 12}, "different models: layers is 6 in one and 12 in the other"),
        ("target", {"device": "cuda"}, "different targets: device is cpu in one and cuda in the other"),
        ("target", {"isa": "AVX2"}, "different targets: isa is AVX512 in one and AVX2 in the other"),
        ("regime", {"autocast": "bfloat16"}, "different regimes: autocast is None in one and bfloat16 in the other"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(field: str, value: dict[str, object], message: str) -> None:
    other = spec().model_copy(update={field: {**getattr(spec(), field), **value}})
    with pytest.raises(BadInputError, match=re.escape(message)):
        drift(of_spec(spec()), of_spec(other))
