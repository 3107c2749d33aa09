"""Graphviz source and SVG: roundings by colour and by line, sites numbered, nothing but shapes and text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from graphalign.render.diagram import ROUNDED, UNROUNDED, sketch
from graphalign.render.dot import SVG, draw_svg
from graphalign.render.labels import caption
from graphalign.render.page_diagrams import site_evidence
from graphalign.render.sheets import Sheet, sheets
from tests.fixtures.recorded import report
from tests.render import needs


def rope() -> Sheet:
    d = report("qwen3").drawing
    assert d is not None
    (sheet,) = sheets(next(p for p in d.panels if p.group == "rope"))
    return sheet


def svg(sheet: Sheet) -> ET.Element:
    return draw_svg(sketch(sheet, title=caption(sheet.panel), evidence=site_evidence(report("qwen3"))))


def lightness(color: str) -> float:
    r, g, b = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_every_edge_says_its_rounding_by_colour_and_by_line() -> None:
    lines = [x for x in sketch(rope()).source.splitlines() if re.search(r"\w+ -> \w+ \[", x) and "style=invis" not in x]
    assert len(lines) == 30
    for line in lines:
        solid, dashed = f'color="{ROUNDED}"' in line and "style=solid" in line, f'color="{UNROUNDED}"' in line and "style=dashed" in line
        assert solid != dashed, line


def test_a_site_is_filled_where_it_is_rounded() -> None:
    drawn = sketch(rope())
    for s in ("rope.1, .5", "rope.4, .8"):
        nodes = [x for x in drawn.source.splitlines() if f"<B>{s}</B>" in x]
        assert sorted("dashed" in n for n in nodes) == [False, True]
        assert sorted("BF16" in n for n in nodes) == [False, True]


@needs.drawing
def test_sites_and_partners_are_at_the_same_height() -> None:
    drawn = svg(rope())
    heights: dict[str, set[str]] = {}
    for g in drawn.iter(f"{{{SVG}}}g"):
        if "pill" in g.get("class", ""):
            words = "".join(t.text or "" for t in g.iter(f"{{{SVG}}}text"))
            site = re.search(r"rope\.\d, \.\d", words)
            if site:
                heights.setdefault(site[0], set()).add(next(g.iter(f"{{{SVG}}}text")).get("y", ""))
    assert len(heights) == 4
    assert all(len(ys) == 1 for ys in heights.values()), heights


@needs.drawing
def test_training_is_left() -> None:
    x: dict[str, list[float]] = {"t": [], "i": []}
    for g in svg(rope()).iter(f"{{{SVG}}}g"):
        ident = g.get("id", "")
        if "vertex" in g.get("class", ""):
            x[ident.rpartition("_")[2][0]] += [float(t.get("x", "0")) for t in g.iter(f"{{{SVG}}}text")]
    assert max(x["t"]) < min(x["i"])


@needs.drawing
def test_hover_says_source_line_and_evidence() -> None:
    titles = [t.text or "" for t in svg(rope()).iter(f"{{{SVG}}}title")]
    assert any("rope.1: trainer rounds to BF16" in t and "modeling_qwen3.py:160" in t and "in registers" in t for t in titles)
    assert any("rotary_embedding/common.py" in t and "kernel cpp_fused" in t for t in titles)


def test_colours_differ_from_the_page_and_in_grey_by_line() -> None:
    for color in (ROUNDED, UNROUNDED):
        contrast = 1.05 / (lightness(color) ** 2.2 + 0.05)
        assert contrast > 3, f"{color} on white"


@needs.drawing
def test_only_shapes_and_text() -> None:
    tags = {e.tag.rpartition("}")[2] for e in svg(rope()).iter()}
    assert tags <= {"svg", "g", "path", "polygon", "polyline", "ellipse", "text", "title"}
