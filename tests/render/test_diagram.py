"""Graphviz source and SVG: roundings by colour and by line, sites numbered, nothing but shapes and text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from graphalign.render.diagram import ROUNDED, UNROUNDED, caption, sketch
from graphalign.render.dot import SVG, draw_svg
from graphalign.render.page import site_evidence
from graphalign.sites.drawing import Panel
from tests.fixtures.recorded import EXAMPLES, report
from tests.render import needs

A4 = (297 - 20) / 25.4 * 72, (210 - 20) / 25.4 * 72
"""Points of a landscape page inside its margins."""


def panels(name: str) -> tuple[Panel, ...]:
    d = report(name).drawing
    assert d is not None
    return d.panels


def rope() -> Panel:
    return next(p for p in panels("qwen3") if p.group == "rope")


def svg(panel: Panel) -> ET.Element:
    return draw_svg(sketch(panel, title=caption(panel), evidence=site_evidence(report("qwen3"))))


def lightness(color: str) -> float:
    r, g, b = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_every_edge_says_its_rounding_by_colour_and_by_line() -> None:
    lines = [x for x in sketch(rope()).source.splitlines() if re.search(r"\w+ -> \w+ \[", x) and "style=invis" not in x]
    assert len(lines) > 40
    for line in lines:
        solid, dashed = f'color="{ROUNDED}"' in line and "style=solid" in line, f'color="{UNROUNDED}"' in line and "style=dashed" in line
        assert solid != dashed, line


def test_a_site_is_filled_where_it_is_rounded() -> None:
    drawn = sketch(rope())
    for s in ("rope.1", "rope.8"):
        nodes = [x for x in drawn.source.splitlines() if f"<B>{s}</B>" in x]
        assert sorted("dashed" in n for n in nodes) == [False, True]
        assert sorted("BF16" in n for n in nodes) == [False, True]


@needs.dot
def test_sites_and_partners_are_at_the_same_height() -> None:
    drawn = svg(rope())
    heights: dict[str, set[str]] = {}
    for g in drawn.iter(f"{{{SVG}}}g"):
        if "pill" in g.get("class", ""):
            words = "".join(t.text or "" for t in g.iter(f"{{{SVG}}}text"))
            site = re.search(r"rope\.\d", words)
            if site:
                heights.setdefault(site[0], set()).add(next(g.iter(f"{{{SVG}}}text")).get("y", ""))
    assert len(heights) == 8
    assert all(len(ys) == 1 for ys in heights.values()), heights


@needs.dot
def test_training_is_left() -> None:
    x: dict[str, list[float]] = {"t": [], "i": []}
    for g in svg(rope()).iter(f"{{{SVG}}}g"):
        ident = g.get("id", "")
        if "vertex" in g.get("class", ""):
            x[ident[2]] += [float(t.get("x", "0")) for t in g.iter(f"{{{SVG}}}text")]
    assert max(x["t"]) < min(x["i"])


@needs.dot
def test_hover_says_source_line_and_evidence() -> None:
    titles = [t.text or "" for t in svg(rope()).iter(f"{{{SVG}}}title")]
    assert any("rope.1: trainer rounds to BF16" in t and "modeling_qwen3.py:160" in t and "in registers" in t for t in titles)
    assert any("rotary_embedding/common.py" in t and "kernel cpp_fused" in t for t in titles)


@needs.dot
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_group_is_readable_on_a4(name: str) -> None:
    for panel in panels(name):
        if not panel.group:
            continue
        width, height = (float(svg(panel).get(k, "0").removesuffix("pt")) for k in ("width", "height"))
        scale = min(max(A4) / max(width, height), min(A4) / min(width, height), 1)
        assert scale * 10.5 >= 4.8, f"{panel.group}, layer {panel.layer}: {scale * 10.5:.1f} points"


def test_colours_differ_from_the_page_and_in_grey_by_line() -> None:
    for color in (ROUNDED, UNROUNDED):
        contrast = 1.05 / (lightness(color) ** 2.2 + 0.05)
        assert contrast > 3, f"{color} on white"


@needs.dot
def test_only_shapes_and_text() -> None:
    tags = {e.tag.rpartition("}")[2] for e in svg(rope()).iter()}
    assert tags <= {"svg", "g", "path", "polygon", "polyline", "ellipse", "text", "title"}
