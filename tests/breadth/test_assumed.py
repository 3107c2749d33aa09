"""Composite anchors are joined by owner: what was not compared is said to be assumed, wherever a result is read."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from graphalign.render.page import render_page
from graphalign.render.sites_table import render_table
from graphalign.render.textdiff import render_text
from graphalign.sites.why import explain
from tests.breadth.captured import report

COMPOSITES = {"deepseek_v2": 7, "lfm2": 2, "qwen3_moe_h100": 3}


@pytest.mark.parametrize("name", COMPOSITES)
def test_assumed_everywhere(name: str) -> None:
    found = report(name)
    n = sum(e.count for e in found.assumed)
    assert n == COMPOSITES[name]
    out = StringIO()
    render_table(found, Console(file=out, width=200))
    words = f"{n} composite anchors assumed"
    assert words in out.getvalue()
    assert f"assumed: {n}" in out.getvalue()
    assert words in render_page(found)
    assert "assumed" in render_text(found, group="assumed")
    node = found.assumed[0].names[0]
    said = explain(found, node)
    assert "same value on the other side" not in said
    assert "its inside was not compared" in said
    partner = next(x for x in found.nodes if x.name == node and x.side == "training").partners[0]
    assert "its inside was not compared" in explain(found, partner)


def test_a_dense_model_assumes_nothing() -> None:
    found = report("helium")
    assert not found.assumed
    assert not found.assumptions
    assert "assumed" not in render_text(found)
