"""The README's pictures are what the tool makes. `GRAPHALIGN_WRITE_NOTEBOOKS=1` writes them anew, as it does the notebooks."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from pathlib import Path

from graphalign.render.dot import SVG
from graphalign.render.page_diagrams import pictures
from tests.fixtures.recorded import report
from tests.render import needs
from tests.render.browser import Browser

IMAGES = Path(__file__).parents[2] / "notebooks" / "images"
WRITE = bool(os.environ.get("GRAPHALIGN_WRITE_NOTEBOOKS"))


def words(svg: str) -> list[str]:
    """What is written in it and what it says when it is pointed at; coordinates vary with fonts and Graphviz."""
    return [e.text for e in ET.fromstring(svg).iter() if e.tag in (f"{{{SVG}}}text", f"{{{SVG}}}title") and e.text]


@needs.drawing
def test_the_diagram() -> None:
    drawing = report("qwen3").drawing
    assert drawing is not None
    (svg,) = pictures(report("qwen3"), next(p for p in drawing.panels if p.group == "rope"))
    if WRITE:
        (IMAGES / "rope.svg").write_text(svg)
    assert words((IMAGES / "rope.svg").read_text()) == words(svg)


@needs.drawing
def test_the_screenshot(browser: Browser, page: Path) -> None:
    browser.look(width=1280, height=1240)
    browser.open(page)
    browser.js("[...document.querySelectorAll('figure')].find(f => f.textContent.includes('rope: layer')).id = 'rope'")
    browser.move_to("#rope .pill.own.site-rope-1")
    shown = browser.js("document.querySelector('#rope .info').textContent")
    assert shown.startswith("rope.1: trainer rounds to BF16, engine keeps FP32")
    if WRITE:
        browser.screenshot(IMAGES / "report.png")
    assert (IMAGES / "report.png").read_bytes().startswith(b"\x89PNG")
