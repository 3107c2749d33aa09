"""A panel as sheets: nothing that it is about is lost, what looks alike is drawn once, what rounds differently never is."""

from __future__ import annotations

from collections import defaultdict

import pytest

from graphalign.ir.drawing import Arrow, Panel, Vertex
from graphalign.render.copies import fold_copies
from graphalign.render.labels import lines, sites_label, subtitle, wrap
from graphalign.render.sheets import STEPS, Sheet, own, sheets, titles
from tests.render.reports import report

MODELS = ("qwen3", "smollm2", "h100", "gemma3", "granite", "gpt_neox", "gpt_oss", "qwen3_next", "bloom")


def panels(name: str) -> tuple[Panel, ...]:
    d = report(name).drawing
    assert d is not None
    return d.panels


def only(name: str, group: str) -> Sheet:
    (sheet,) = sheets(next(p for p in panels(name) if p.group == group))
    return sheet


def states(arrows: tuple[Arrow, ...]) -> dict[tuple[str, str], set[tuple[str, ...]]]:
    """Side and site to how it is rounded there."""
    out = defaultdict(set)
    for a in arrows:
        for s in a.sites:
            out[a.tail[0], s].add(a.roundings)
    return out


@pytest.mark.parametrize("name", MODELS)
def test_every_site_of_a_panel_is_on_a_sheet_as_it_is_rounded(name: str) -> None:
    for panel in panels(name):
        drawn = states(tuple(a for s in sheets(panel) for a in s.panel.arrows))
        for key, roundings in states(tuple(a for a in panel.arrows if own(panel, a))).items():
            assert drawn[key] == roundings, (panel.group, panel.layer, key)


@pytest.mark.parametrize("name", MODELS)
def test_a_sheet_stands_for_no_edge_that_rounds_otherwise(name: str) -> None:
    """Each edge of the panel at a step of a sheet has one like it there; what only joins anchors and sums can be another sheet's."""
    for panel in panels(name):
        for sheet in sheets(panel):
            at = {x.id: v.id for v in sheet.panel.vertices for x in sheet.all(v)}
            steps = {i for i, v in at.items() if next(x for x in sheet.panel.vertices if x.id == v).kind in STEPS}
            drawn = {(a.tail, a.head, a.roundings, a.verdict) for a in sheet.panel.arrows}
            for a in panel.arrows:
                if a.tail in at and a.head in at and at[a.tail] != at[a.head] and {a.tail, a.head} & steps:
                    assert (at[a.tail], at[a.head], a.roundings, a.verdict) in drawn, (panel.group, panel.layer, a)


@pytest.mark.parametrize("name", MODELS)
def test_ids_and_ends_fit(name: str) -> None:
    for sheet in (s for p in panels(name) for s in sheets(p)):
        known = [v.id for v in sheet.panel.vertices]
        assert len(set(known)) == len(known)
        assert {x for a in sheet.panel.arrows for x in (a.tail, a.head)} <= set(known)
        assert {p for v in sheet.panel.vertices for p in v.partners} <= set(known)
        assert len(known) <= 30


def test_k_is_drawn_on_q() -> None:
    sheet = only("qwen3", "rope")
    assert titles(sheet) == ("q_norm, self_attn", "k_norm, self_attn")
    assert subtitle(sheet).startswith("q_norm + self_attn and k_norm + self_attn: alike, drawn once")
    by = {v.label: v for v in sheet.panel.vertices if v.id[0] == "t"}
    assert [v.label for v in sheet.also[by["q * cos"].id]] == ["k * cos"], "not rotate_half(k) * sin, which has the same place"
    assert lines(sheet, by["q * cos"])[0] == ["q * cos", "or k * cos"]
    assert {a.sites for a in sheet.panel.arrows if a.sites and a.tail == by["q * cos"].id} == {("rope.3", "rope.7")}
    gemm = next(v for v in sheet.panel.vertices if v.kind == "gemm" and v.id[0] == "t")
    assert lines(sheet, gemm)[0] == ["GEMM self_attn.q_proj, k_proj"]


def test_regions_that_have_nothing_to_do_with_each_other_are_on_sheets_of_their_own() -> None:
    norms, heads = sheets(next(p for p in panels("qwen3") if p.group == "norm_weight"))
    assert set(titles(norms)) == {"input_layernorm", "post_attention_layernorm"}
    assert set(titles(heads)) == {"q_norm, self_attn", "k_norm, self_attn"}


def test_copies_of_a_sum_are_counted() -> None:
    panel = next(p for p in panels("qwen3") if p.group == "residual_stream" and 2 in p.layers)
    copies = [v for v in panel.vertices if v.id[0] == "i" and v.kind == "sum" and v.kernel]
    (sheet,) = sheets(panel)
    drawn = [v for v in sheet.panel.vertices if v.id[0] == "i" and v.kind == "sum" and v.kernel]
    assert len(copies) > len(drawn) == 2
    assert sum(v.count for v in copies) == sum(v.count for v in drawn)


def engine(n: int, launch: int) -> Vertex:
    return Vertex(id=f"i{n}", kind="op", label="x * y", op="mul", box=0, kernel=f"k{launch}", launch=launch, partners=("t1",))


@pytest.mark.parametrize(("second", "left"), [((), 1), (("bfloat16",), 2)])
def test_copies_that_round_differently_stay_apart(second: tuple[str, ...], left: int) -> None:
    gemm = Vertex(id="i1", kind="gemm", label="up")
    t = Vertex(id="t1", kind="op", label="x * y", op="mul", box=0, partners=("i2", "i3"))
    arrows = (Arrow(tail="i1", head="i2"), Arrow(tail="i1", head="i3", roundings=second))
    panel = Panel(group="g", layer=0, layers=(0,), boxes=("mlp",), vertices=(t, gemm, engine(2, 1), engine(3, 2)), arrows=arrows)
    folded, also = fold_copies(panel)
    kept = [v for v in folded.vertices if v.op == "mul" and v.id[0] == "i"]
    assert len(kept) == left
    assert [v.count for v in kept] == ([2] if left == 1 else [1, 1])
    assert [len(x) for x in also.values()] == ([1] if left == 1 else [])


def test_labels_are_short_and_broken_where_one_reads_on() -> None:
    assert wrap("(q * cos) + (rotate_half(q) * sin)", 29) == ["(q * cos) +", "(rotate_half(q) * sin)"]
    assert wrap("self.weight * hidden_states.to(input_dtype)", 29) == ["self.weight *", "hidden_states.to(input_dtype)"]
    assert wrap("a_rather_long_module.with_another.inside", 29) == ["a_rather_long_module.", "with_another.inside"]
    assert wrap("x" * 70, 29)[0] == "x" * 29
    assert wrap("", 29) == [""]
    assert sites_label(("rope.1", "rope.5")) == "rope.1, .5"
    assert sites_label(("a.1", "b.1")) == "a.1, b.1"
    assert sites_label(tuple(f"a.{n}" for n in range(9))) == "a.0, .1, .2, .3 +5"
