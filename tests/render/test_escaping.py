"""Names from a capture never become markup or script."""

from __future__ import annotations

import functools
import html.parser
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import graphviz
import pytest

from graphalign.render.diagram import sketch
from graphalign.render.dot import draw_svg, to_text
from graphalign.render.excerpt import Sources
from graphalign.render.labels import caption, subtitle
from graphalign.render.page import render_page
from graphalign.render.page_diagrams import site_evidence
from graphalign.render.sheets import sheets
from graphalign.render.textdiff import render_text
from graphalign.sites.report import Report
from tests.fixtures.recorded import report
from tests.render import needs
from tests.render.browser import Browser
from tests.render.hostile import CONTROL, PAYLOAD, poison


@functools.cache
def hostile() -> Report:
    return poison(report("qwen3"))


class Elements(html.parser.HTMLParser):
    """Counts elements and keeps attribute names."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.other: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {a for a, _ in attrs}

    def handle_comment(self, data: str) -> None:
        self.other.append(data)

    def unknown_decl(self, data: str) -> None:
        self.other.append(data)


def test_the_page_has_the_elements_that_it_has_without_the_payload() -> None:
    bad, good = Elements(), Elements()
    bad.feed(render_page(hostile()))
    good.feed(render_page(report("qwen3")))
    assert bad.tags["script"] == bad.tags["style"] == bad.tags["title"] - bad.tags["g"] * 0 - (bad.tags["title"] - 1) == 1
    assert set(bad.tags) <= set(good.tags) | {"table", "strong"}
    assert "img" not in bad.tags
    assert not [a for a in bad.attributes if a.startswith("on") or a == "style"]
    assert bad.attributes <= good.attributes
    assert bad.other == good.other == []


def test_control_characters_do_not_reach_the_page_or_the_terminal() -> None:
    for text in (render_page(hostile()), render_text(hostile())):
        assert not set(CONTROL) - set("[31m") & set(text)
        assert "\ufffd" in text


def test_nothing_runs_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_page(hostile()))
    browser.problems.clear()
    browser.look()
    browser.open(path)
    browser.js("document.querySelectorAll('details').forEach(d => d.open = true)")
    browser.js("document.querySelectorAll('*').forEach(e => e.dispatchEvent(new MouseEvent('mouseover', {bubbles: true})))")
    assert browser.js("window.hit") is None
    assert browser.js("document.querySelector('#sites tbody a').textContent").startswith("norm_weight</title>")
    assert browser.problems == []


def test_the_search_still_works_on_hostile_names(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_page(hostile()))
    browser.open(path)
    browser.js("document.getElementById('search').focus()")
    browser.type("<img src=x")
    assert browser.js("document.getElementById('count').textContent") == "22 of 22 sites"


@needs.dot  # called by name below
def test_diagrams_hold_the_payload_as_text() -> None:
    r = hostile()
    assert r.drawing is not None
    for sheet in (s for p in r.drawing.panels for s in sheets(p)):
        drawn = sketch(sheet, title=caption(sheet.panel), note=subtitle(sheet), evidence=site_evidence(r))
        plain = graphviz.pipe("dot", "svg", drawn.source.encode(), quiet=True).decode()
        for text in (plain, to_text(draw_svg(drawn))):
            root = ET.fromstring(text)
            assert not [e for e in root.iter() if e.tag.rpartition("}")[2] in ("script", "style", "img", "image", "foreignObject")]
            assert not [k for e in root.iter() for k in e.attrib if k.lower().startswith("on")]
        assert "window.hit" in plain


@pytest.mark.parametrize("name", ["/etc/passwd", "../../etc/passwd", "transformers/../../../../etc/passwd", "os;x/y.py", "", PAYLOAD])
def test_a_capture_cannot_name_a_file_to_be_shown(name: str) -> None:
    end = report("qwen3").groups[0].sites[0].producer.model_copy(update={"file": name})
    sources = Sources({name: "0" * 64})
    assert not sources.installed(end)
    assert all(line.text in end.text for line in sources.around(end))
