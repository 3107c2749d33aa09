"""The page in headless Chromium: renders, filters, hovers, works by keyboard and offline, and is quick."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from graphalign.render.page import render_page
from graphalign.render.sheets import sheets
from tests.fixtures.recorded import report
from tests.render import needs
from tests.render.browser import Browser

SHOWN = "[...document.querySelectorAll('#sites tbody tr')].filter(r => !r.hidden).map(r => r.querySelector('a').textContent)"


pytestmark = needs.drawing


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.problems.clear()
    browser.look()
    browser.open(page)
    return browser


def test_it_renders_without_a_word_in_the_console(opened: Browser) -> None:
    for section in ("summary", "table", "diagrams", "source", "others", "assumptions", "text"):
        assert opened.js(f"document.querySelector('#{section}').getBoundingClientRect().height > 30"), section
    sites = [s.id for g in report("qwen3").groups for s in g.sites]
    assert opened.js(SHOWN) == sites
    assert opened.js("[...document.querySelectorAll('article')].map(a => a.querySelector('h3').textContent)") == sites
    drawing = report("qwen3").drawing
    assert drawing is not None
    assert opened.js("document.querySelectorAll('figure svg').length") == sum(len(sheets(p)) for p in drawing.panels)
    assert opened.problems == []


def test_search_and_filters(opened: Browser) -> None:
    opened.key("/")
    opened.type("rope sin")
    assert opened.js(SHOWN) == ["rope.2", "rope.3", "rope.4", "rope.6", "rope.7", "rope.8"]
    assert opened.js("document.getElementById('count').textContent") == "6 of 22 sites"
    opened.js("document.getElementById('reset').click()")
    opened.js("(() => { const s = document.getElementById('layer'); s.value = 'outside'; s.dispatchEvent(new Event('input')); })()")
    assert opened.js(SHOWN) == ["norm_weight.5", "residual_rmsnorm.5", "residual_rmsnorm.6"]
    opened.js("(() => { const s = document.getElementById('group'); s.value = 'swiglu'; s.dispatchEvent(new Event('input')); })()")
    assert opened.js(SHOWN) == []
    assert opened.problems == []


def test_hover_shows_evidence_and_both_sides(opened: Browser) -> None:
    mark = "[...document.querySelectorAll('figure')].find(f => f.textContent.includes('rope: layer')).id = 'rope'"
    opened.js(mark)
    opened.move_to("#rope .pill.own.site-rope-1")
    assert opened.js("[...document.querySelectorAll('#rope .hot')].map(g => g.querySelector('text').textContent)") == ["rope.1, .5"] * 2
    info = opened.js("document.querySelector('#rope .info').textContent")
    assert "modeling_qwen3.py:160" in info
    assert "modeling_qwen3.py:161" in info, "k, which is drawn on q"
    assert "in registers" in info
    opened.move_to("#rope .vertex.attention")
    assert opened.js("document.querySelectorAll('#rope .hot').length") == 2
    assert opened.problems == []


def test_by_keyboard(opened: Browser) -> None:
    opened.js("document.querySelector('figure svg').focus()")
    opened.key("ArrowRight")
    assert opened.js("document.querySelectorAll('figure .hot').length") >= 1
    first = opened.js("document.querySelector('figure .info').textContent")
    opened.key("ArrowRight")
    assert opened.js("document.querySelector('figure .info').textContent") != first
    opened.key("Escape")
    assert opened.js("document.querySelectorAll('figure .hot').length") == 0
    unnamed = (
        "[...document.querySelectorAll('input,select,button,svg[tabindex],section,nav')]"
        ".filter(e => !(e.ariaLabel || e.labels?.length || e.textContent.trim() || e.getAttribute('aria-labelledby'))).length"
    )
    assert opened.js(unnamed) == 0
    assert opened.js(
        "[...document.querySelectorAll('[aria-labelledby]')].every(e => document.getElementById(e.getAttribute('aria-labelledby')))"
    )
    assert opened.js("new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size === document.querySelectorAll('[id]').length")
    assert opened.js("document.documentElement.lang") == "en"


def test_a_link_opens_the_source_of_a_site(opened: Browser) -> None:
    opened.js("document.querySelector('#sites a[href=\"#site-rope.1\"]').click()")
    opened.js("new Promise(r => setTimeout(r, 100))")
    assert opened.js("document.getElementById('site-rope.1').closest('details').open")
    marks = opened.js("[...document.getElementById('site-rope.1').querySelectorAll('mark')].map(m => m.textContent)")
    assert marks == ["self.weight * hidden_states.to(input_dtype)", "q * cos"]
    assert "op6.mul" in opened.js("document.getElementById('site-rope.1').querySelector('.sides > div + div pre').textContent")


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_in_light_and_dark(browser: Browser, page: Path, dark: bool) -> None:
    browser.look(dark=dark)
    browser.open(page)
    contrast = """(() => {
      const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
      const lum = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => linear(v / 255)); return .2126 * r + .7152 * g + .0722 * b; };
      const ratio = (a, b) => { const [x, y] = [lum(a), lum(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
      const worst = [];
      for (const e of document.querySelectorAll('figure svg .vertex, figure svg .pill')) {
        const shape = e.querySelector('polygon,path'), text = e.querySelector('text');
        if (shape && text) worst.push(ratio(getComputedStyle(shape).fill, getComputedStyle(text).fill));
      }
      const bg = getComputedStyle(document.body).backgroundColor;
      for (const e of document.querySelectorAll('p,td,h2,summary,.soft')) worst.push(ratio(bg, getComputedStyle(e).color));
      return Math.min(...worst);
    })()"""
    assert browser.js(contrast) >= 4.5


def test_a_narrow_window_needs_no_sideways_scrolling(browser: Browser, page: Path) -> None:
    browser.look(width=380, height=800)
    browser.open(page)
    assert browser.js("document.documentElement.scrollWidth <= 380")


def test_the_page_does_not_grow_with_the_number_of_layers(browser: Browser, tmp_path: Path) -> None:
    """Diagrams are of kinds of layers. How long a page of 36 layers takes to open is measured by `tests/bench/report.py`."""
    counts = {}
    for name in ("llama", "smollm2"):  # one architecture with 6 layers and with 30
        path = tmp_path / f"{name}.html"
        path.write_text(render_page(report(name)))
        assert path.stat().st_size < 1_500_000
        browser.look()
        browser.open(path)
        counts[name] = browser.js("document.querySelectorAll('figure').length")
        assert browser.js("Math.max(...[...document.querySelectorAll('figure svg')].map(s => s.querySelectorAll('.vertex').length))") <= 30
    assert counts["smollm2"] <= counts["llama"] + 5, counts


def test_one_file_that_needs_nothing_else(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r'(?:src|href|action)="(?!#)', text)
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src &#x27;none&#x27;" in text
