"""The machine's `dot` draws where it works, else the wheel's program; with either one, every label fits its box."""

from __future__ import annotations

import functools
import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
from matplotlib.ft2font import FT2Font
from typer.testing import CliRunner

import graphalign.cli.render
import graphalign.render.files
from graphalign.cli.app import app
from graphalign.ir.files import write_json
from graphalign.render import dot, wheel
from graphalign.render.diagram import FONT, sketch
from graphalign.render.labels import caption, subtitle
from graphalign.render.page_diagrams import draw
from graphalign.render.sheets import sheets
from tests.render import needs
from tests.render.reports import report
from tests.render.test_broken_dot import BROKEN, install

MODELS = ("qwen3", "h100", "gpt_neox", "mixtral", "gemma3")
DEJAVU = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
Width = Callable[[str, float, bool], float]


@functools.cache
def _font(path: str) -> FT2Font:
    return FT2Font(path)


def measured(plain: str, bold: str) -> Width:
    """The width of a text in a font file's glyphs, in points."""

    def width(text: str, size: float, heavy: bool) -> float:
        font = _font(bold if heavy else plain)
        font.set_size(1000, 72)  # at small sizes hinting rounds every glyph to whole pixels
        font.set_text(text)
        return float(font.get_width_height()[0]) / 64 * size / 1000

    return width


def machine_font(bold: str) -> str:
    """The file that stands for Helvetica on this machine, which is what `dot` measures with."""
    return subprocess.run(["fc-match", "-f", "%{file}", f"Helvetica{bold}"], capture_output=True, text=True, check=True).stdout


def too_wide(svg: ET.Element, width: Width) -> list[str]:
    """Texts of nodes and frames that leave their shape."""
    out = []
    for g in svg.iter(f"{{{dot.SVG}}}g"):
        if not {"node", "cluster"} & set(g.get("class", "").split()):
            continue
        shapes = [s.get("points") or s.get("d") or "" for s in g if s.tag in (f"{{{dot.SVG}}}polygon", f"{{{dot.SVG}}}path")]
        numbers = [float(n) for s in shapes for n in re.findall(r"-?\d+(?:\.\d+)?", s)]
        if not numbers:
            continue
        (left, right), (top, bottom) = ((min(numbers[n::2]), max(numbers[n::2])) for n in (0, 1))
        for t in g.findall(f"{{{dot.SVG}}}text"):
            x, y, size = (float(t.get(k, "0")) for k in ("x", "y", "font-size"))
            wide = width(t.text or "", size, t.get("font-weight") == "bold")
            start = x - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[t.get("text-anchor", "start")]
            if start < left or start + wide > right or y - 0.7 * size < top or y > bottom:
                out.append(f"{t.text!r}: {start:.1f} to {start + wide:.1f} in {left:.1f} to {right:.1f}")
    return out


def drawn(name: str) -> list[ET.Element]:
    drawing = report(name).drawing
    assert drawing is not None
    return [draw(s, title=caption(p), note=subtitle(s), legend=True) for p in drawing.panels for s in sheets(p)]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without `dot`."""
    monkeypatch.setenv("PATH", str(tmp_path))


@needs.wheels
@pytest.mark.parametrize("name", MODELS)
def test_labels_fit_in_the_widest_font_without_dot(name: str, bare: None) -> None:
    assert dot.programs() == (wheel.program(),)
    pictures = drawn(name)
    assert pictures
    width = measured(str(DEJAVU / "DejaVuSans.ttf"), str(DEJAVU / "DejaVuSans-Bold.ttf"))
    assert [x for svg in pictures for x in too_wide(svg, width)] == []
    fonts = {t.get("font-family") for svg in pictures for t in svg.iter(f"{{{dot.SVG}}}text")}
    assert fonts == {FONT}


@needs.dot
@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("name", MODELS)
def test_labels_fit_in_the_machines_font_with_dot(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "program", lambda: None)
    width = measured(machine_font(""), machine_font(":bold"))
    assert [x for svg in drawn(name) for x in too_wide(svg, width)] == []


@needs.wheels
def test_the_measure_can_fail(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wide font's name the wheel takes Times, and labels leave their boxes."""
    monkeypatch.setattr(wheel, "prepare", lambda source: source)
    width = measured(str(DEJAVU / "DejaVuSans.ttf"), str(DEJAVU / "DejaVuSans-Bold.ttf"))
    assert [x for svg in drawn("qwen3") for x in too_wide(svg, width)]


@needs.wheels
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_dot_is_passed_over(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, BROKEN[kind][0], monkeypatch)
    assert len(dot.programs()) == 2
    assert graphalign.render.files.write_report(report("qwen3"), tmp_path / "report.html") == ""
    assert (tmp_path / "report.html").read_text().count("<svg tabindex") > 5


@needs.wheels
def test_a_dot_that_hangs_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = install(tmp_path, "exec sleep 60", monkeypatch)
    monkeypatch.setattr(dot, "_HUNG", {str(program)})
    assert dot.can_draw()
    assert drawn("qwen3")


@needs.wheels
def test_render_without_dot(tmp_path: Path, bare: None) -> None:
    write_json(tmp_path / "sites.json", report("qwen3"))
    result = CliRunner().invoke(app, ["render", str(tmp_path / "sites.json"), "-o", str(tmp_path / "x.svg"), "--group", "rope"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "x.svg").read_text().startswith("<svg ")


@needs.wheels
@needs.dot
def test_both_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = report("qwen3").drawing
    assert drawing is not None
    source = sketch(sheets(drawing.panels[0])[0])
    found = []
    for path in dot.programs():
        monkeypatch.setattr(dot, "programs", lambda path=path: (path,))
        svg = dot.draw_svg(source)
        found.append(sorted((g.get("id", ""), g.get("class", "")) for g in svg.iter(f"{{{dot.SVG}}}g")))
    assert found[0] == found[1]
    assert any("vertex" in c for _, c in found[0])


def test_a_label_that_names_the_font_stays() -> None:
    source = f'digraph {{ node [fontname="{FONT}"] a [tooltip="fontname=\\"{FONT}\\""] }}'
    assert wheel.prepare(source).count(FONT) == 1
