"""What is kept for drawing: one layer per kind, each site on both sides, small."""

from __future__ import annotations

import pytest

from graphalign.ir.drawing import Drawing, Panel
from graphalign.sites.report import Report
from tests.fixtures.recorded import EXAMPLES, report

MODELS = (*EXAMPLES, "smollm2")
ALL = {"qwen3": tuple(range(6)), "smollm2": tuple(range(30))}


def drawing(name: str) -> Drawing:
    found = report(name).drawing
    assert found is not None
    return found


def first(name: str, group: str) -> Panel:
    return next(p for p in drawing(name).panels if p.group == group)


def marked(panel: Panel, side: str) -> set[str]:
    return {s for a in panel.arrows if a.tail[0] == side for s in a.sites}


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_drawn_or_named_for_every_group(name: str) -> None:
    d, r = drawing(name), report(name)
    for group in [*(g.name for g in r.groups), ""]:
        shown = [n for p in d.panels if p.group == group for n in p.layers] + [n for o in d.omitted if o.group == group for n in o.layers]
        wanted = {n for g in r.groups if group in ("", g.name) for n in g.layers}
        assert sorted(shown) == sorted(wanted), group


@pytest.mark.parametrize("name", MODELS)
def test_every_site_is_on_both_sides_of_a_panel_of_its_group(name: str) -> None:
    for g in report(name).groups:
        panels = [p for p in drawing(name).panels if p.group == g.name]
        for s in g.sites:
            assert any(s.id in marked(p, "t") and s.id in marked(p, "i") for p in panels), s.id


@pytest.mark.parametrize("name", MODELS)
def test_roundings_of_a_site_are_those_that_the_table_says(name: str) -> None:
    sites = {s.id: s for g in report(name).groups for s in g.sites}
    for panel in drawing(name).panels:
        for a in panel.arrows:
            for s in a.sites:
                assert a.roundings == (sites[s].training if a.tail[0] == "t" else sites[s].inference)


@pytest.mark.parametrize("name", MODELS)
def test_a_group_is_no_hairball(name: str) -> None:
    for p in drawing(name).panels:
        most = 60 if p.group else 100
        assert len(p.vertices) <= most, (p.group, p.layer)
        assert len({v.id for v in p.vertices}) == len(p.vertices)
        assert {x for a in p.arrows for x in (a.tail, a.head)} <= {v.id for v in p.vertices}


def test_layers_of_equal_structure_are_drawn_once() -> None:
    for name, every in ALL.items():
        for group in ("rope", "swiglu"):
            assert [p.layers for p in drawing(name).panels if p.group == group] == [every], (name, group)
    stream = [p for p in drawing("smollm2").panels if p.group == "residual_stream"]
    assert [p.layers for p in stream[:2]] == [tuple(range(1, 28, 2)), tuple(range(2, 29, 2))], "its kernels repeat every two layers"
    assert stream[2].differs == "without residual_stream.2"


def test_what_holds_the_same_value_is_linked() -> None:
    panel = first("qwen3", "rope")
    by_label = {(v.id[0], v.label): v for v in panel.vertices}
    left, right = by_label["t", "q * cos"], by_label["i", "q * cos"]
    assert (left.partners, right.partners) == ((right.id,), (left.id,))
    assert right.count == 2, "one for each half of the rotation"
    assert right.kernel.startswith("cpp_fused")
    anchors = {v.label: v for v in panel.vertices if v.kind == "gemm"}
    assert len(anchors["self_attn.qkv_proj"].partners) == 2, "q and k of the merged projection; v is not in this group"


def test_kernel_lines_of_a_site() -> None:
    lines = {e.site: e for e in drawing("qwen3").excerpts}
    assert set(lines) == {s.id for g in report("qwen3").groups for s in g.sites}
    assert lines["rope.3"].lines[-1].split(" = ")[1].startswith("sub(")
    assert any("rotary_embedding" in s for s in lines["rope.3"].source)


def test_it_is_small_and_optional() -> None:
    r = report("smollm2")
    assert len(r.model_dump_json(indent=1)) * 36 / 30 < 3_000_000
    assert Report.model_validate_json(r.model_copy(update={"drawing": None}).model_dump_json()).drawing is None
    assert Report.model_validate_json(r.model_dump_json()).drawing == r.drawing
