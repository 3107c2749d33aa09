"""What `check` says of right, partial and wrong patches: edges one by one, and the replay's scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from graphalign.patch.make import make_spec
from graphalign.patch.spec import Edit, Group, PatchSpec
from graphalign.proof.replay import Score
from graphalign.proof.verdict import NEGATED, OTHERS, PATCHED, STOCK, WHOLE, Proof, operands_by_group, without
from graphalign.render.proof_table import render_proof, words
from graphalign.sites.report import Entry, Report
from tests.fixtures import recorded

STOCK_REPORT = recorded.report("qwen3")
SPEC = make_spec(STOCK_REPORT)
CLEAN = STOCK_REPORT.model_copy(update={"groups": ()})
BAD, GOOD = 0.5, 1.0


def keep(*groups: str) -> Report:
    """The report of a model in which the sites of some groups are left."""
    return STOCK_REPORT.model_copy(update={"groups": tuple(g for g in STOCK_REPORT.groups if g.name in groups)})


def scores(equal: Callable[[str], float]) -> list[Score]:
    operands = {at for found in operands_by_group(STOCK_REPORT).values() for at in found}
    return [Score(at.rpartition("[")[0], int(at[-2]), equal(at), 0, 100, 0.0) for at in sorted(operands)]


def proof(found: Report = CLEAN, spec: PatchSpec = SPEC, **shares: float) -> Proof:
    """A proof of which every operand of a variant has the same share of equal elements."""
    replayed = {STOCK: BAD, PATCHED: GOOD, NEGATED: 0.4} | {k.replace("_", " "): v for k, v in shares.items()}
    return Proof(STOCK_REPORT, found, spec, scores={name: scores(lambda _, share=share: share) for name, share in replayed.items()})  # type: ignore[misc]


def only(*groups: str) -> PatchSpec:
    return make_spec(STOCK_REPORT, only=groups)


def edited(change: Callable[[Edit], Edit | None]) -> PatchSpec:
    """The spec with the first edit of `rope` changed by hand."""
    groups = []
    for g in SPEC.groups:
        first = change(g.edits[0]) if g.name == "rope" else g.edits[0]
        groups.append(Group(name=g.name, edits=((first,) if first else ()) + g.edits[1:]))
    return SPEC.model_copy(update={"groups": tuple(groups)})


def text(shown: Proof, width: int = 80) -> str:
    console = Console(width=width, record=True, file=None)
    with console.capture() as captured:
        render_proof(shown, console)
    return captured.get()


def test_a_whole_patch_is_proven() -> None:
    shown = proof()
    assert shown.verdict == "proven"
    assert "proven: the patched model rounds where the engine rounds" in text(shown)


def test_a_partial_patch_is_proven_for_its_edges_only() -> None:
    """It was not judged: what its regions lack was put down to what it leaves out, whatever it was."""
    spec = only("rope")
    shown = proof(keep("norm_weight", "residual_rmsnorm", "residual_stream", "swiglu"), spec, patched=0.6, all_sites=1.0, all_but_these=0.8)
    assert shown.verdict == "partial"
    assert words(shown).startswith("PARTIAL: proven for the patch's 48 edges only; the patched model as a whole still differs")
    assert "66 left out (left out: norm_weight 25, residual_rmsnorm 24, residual_stream 11, swiglu 6)" in words(shown)


def test_a_partial_patch_whose_regions_the_other_sites_do_not_complete_is_not_proven() -> None:
    left = keep("norm_weight", "residual_rmsnorm", "residual_stream", "swiglu")
    shown = proof(left, only("rope"), patched=0.6, all_sites=0.9, all_but_these=0.8)
    assert shown.verdict == "not proven"
    assert "rope: only 90.0000% of a region's elements are bitwise the engine's" in shown.problems[0]
    needless = proof(left, only("rope"), patched=0.6, all_sites=1.0, all_but_these=1.0)
    assert needless.problems == [
        "rope: the other sites' edits do without this patch as well there (1.00000): the replay does not show that these edits are right"
    ]


def test_a_group_without_a_replayed_region_is_not_proven() -> None:
    shown = proof()
    down = {"swiglu": "mlp.down_proj"}
    shown.scores = {name: [s for s in found if down["swiglu"] not in s.module] for name, found in shown.scores.items()}
    assert shown.problems == [
        "swiglu: not one region behind its edits was replayed on the engine's values: nothing shows that they are right"
    ]


@pytest.mark.parametrize(("variant", "who"), [(STOCK, "the stock model does"), (NEGATED, "the negated map does")])
def test_stock_and_negated_must_fail(variant: str, who: str) -> None:
    shown = proof(**{variant: 1.0})
    assert len(shown.problems) == 5
    assert all(who in p for p in shown.problems)
    assert shown.verdict == "not proven"


def test_nothing_replayed_is_consistency_and_no_proof() -> None:
    shown = Proof(STOCK_REPORT, CLEAN, SPEC, skipped="the target is simulated")
    assert shown.problems == [
        "nothing was replayed on the engine's values (the target is simulated): the patch is consistent with the captured graph, no more"
    ]
    assert "NOT PROVEN" in text(shown)


@pytest.mark.parametrize("kind", ["undetermined", "unpatchable", "conflicting", "assumed"])
def test_an_incomplete_map_is_partial(kind: str) -> None:
    entry = STOCK_REPORT.interior[0].model_copy(update={"count": 3})
    stock, clean = (r.model_copy(update={kind: (entry,)}) for r in (STOCK_REPORT, CLEAN))
    shown = proof(clean)
    shown.stock = stock
    assert shown.verdict == "partial"
    assert f"3 {kind}" in words(shown)


def test_a_semantic_divergence_is_not_proven() -> None:
    shown = proof()
    shown.stock = shown.patched = CLEAN.model_copy(update={"semantic": STOCK_REPORT.interior[:1], "groups": STOCK_REPORT.groups})
    assert "the two sides compute different functions" in shown.problems[0]


def test_an_edit_of_the_other_kind_is_named() -> None:
    shown = proof(spec=edited(lambda e: e.model_copy(update={"kind": "round"})))
    assert shown.problems[0].startswith("6 edges are changed otherwise than the engine asks for (keep in bfloat16): rope: ")


def test_an_edit_of_another_format_is_named() -> None:
    shown = proof(spec=edited(lambda e: e.model_copy(update={"format": "float16"})))
    assert shown.problems[0].startswith("6 edges are changed otherwise")


def test_an_edge_that_is_no_site_cannot_make_up_for_one_that_is_missing() -> None:
    """They were counted: one edge too many and one too few was none."""
    spec = edited(lambda e: e.model_copy(update={"operand": e.operand + 7}))
    assert spec.edges == SPEC.edges
    shown = proof(spec=spec)
    assert shown.problems[0].startswith("6 edges of the patch are no sites between this engine and this trainer: rope: ")
    assert shown.left_out == {"rope": 6}


def test_a_site_that_a_partial_patch_makes_elsewhere_is_no_site_that_it_left_out() -> None:
    group = STOCK_REPORT.groups[0]
    site = group.sites[0]
    moved = site.model_copy(update={"consumer": site.consumer.model_copy(update={"ordinal": 9})})
    left = keep("residual_rmsnorm").model_copy(update={"groups": (group.model_copy(update={"sites": (moved, *group.sites[1:])}),)})
    spec = make_spec(STOCK_REPORT, without=(group.name,))
    assert proof(left, spec).remaining == {group.name: site.count}


def test_an_edge_twice_is_named() -> None:
    twice = SPEC.model_copy(update={"groups": (*SPEC.groups, Group(name="again", edits=SPEC.groups[0].edits[:1]))})
    assert any("edges are in the patch twice" in p for p in proof(spec=twice).problems)


def test_a_spec_without_edits_proves_nothing() -> None:
    empty = SPEC.model_copy(update={"groups": ()})
    assert proof(STOCK_REPORT, empty).problems[0] == "the patch has no edits: there is nothing to prove"


def test_a_spec_without_some_of_its_edges() -> None:
    from graphalign.drift.snapshot import of_spec

    mine = of_spec(make_spec(STOCK_REPORT, layers="0-2")).edges.keys()
    rest = of_spec(without(SPEC, mine)).edges.keys()
    assert rest | mine == of_spec(SPEC).edges.keys()
    assert not rest & mine


@pytest.mark.parametrize("width", [80, 120])
def test_all_columns_are_readable_at(width: int) -> None:
    left = keep("norm_weight", "residual_rmsnorm", "residual_stream", "swiglu")
    shown = proof(left, only("rope"), patched=0.6, all_sites=1.0, all_but_these=0.8, all_in_FP32=1.0)
    shown.edges = dict.fromkeys((STOCK, PATCHED, WHOLE, OTHERS, NEGATED, "all in FP32"), 114)
    found = text(shown, width)
    assert "…" not in found
    for word in ("residual_rmsnorm", "0.50000", "0.60000", "0.40000", "0.80000", "1.00000", "negated", "all but these", "114 edges"):
        assert word in found
    assert max(map(len, found.splitlines())) <= width


def test_what_never_fired_is_said_beside_the_verdict() -> None:
    entry = Entry(side="training", what="clamp in experts", where="modeling.py:7", reason="it took one side only", layers=(0, 1), count=2)
    stock = STOCK_REPORT.model_copy(update={"unexercised": (entry,)})
    shown = " ".join(text(replace(proof(), stock=stock)).split())
    assert "not exercised: 2, whose other side was compared nowhere clamp in experts: it took one side only at modeling.py:7" in shown
    assert "not exercised" not in text(proof())
