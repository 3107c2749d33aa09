"""Drawing never decides a result: a `dot` that is broken, half installed or hangs costs, without the wheel, the diagrams and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import graphalign.cli.render
import graphalign.render.files
from graphalign.cli.app import app
from graphalign.ir.files import write_json
from graphalign.render import dot, wheel
from graphalign.render.page import render_page
from tests.fixtures.recorded import report
from tests.render import needs

NO_PLUGINS = 'cat >/dev/null; echo \'Format: "svg" not recognized. No formats found. Perhaps "dot -c" needs to be run\' >&2; exit 1'
BROKEN = {
    "half installed": (NO_PLUGINS, "dot -c"),
    "garbage": ("cat >/dev/null; echo hello", "no SVG"),
    "killed": ("cat >/dev/null; kill -9 $$", "killed by signal 9"),
    "deaf": ("exec 0<&-; exit 3", "exit status 3"),
}


def install(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a script in the place of `dot`."""
    program = folder / "dot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return program


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "program", lambda: None)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_dot_is_named_and_the_page_is_written(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_wheel: None) -> None:
    script, words = BROKEN[kind]
    install(tmp_path, script, monkeypatch)
    said = graphalign.render.files.write_report(report("qwen3"), tmp_path / "report.html")
    assert words in said
    assert "has no diagrams" in said
    page = (tmp_path / "report.html").read_text()
    assert "rope.8" in page
    assert "<svg tabindex" not in page
    assert "does not work here" in page


def test_a_dot_that_hangs_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_wheel: None) -> None:
    monkeypatch.setattr(dot, "SECONDS", 0.2)
    install(tmp_path, f"echo x >> {tmp_path}/calls; exec sleep 60", monkeypatch)
    page = render_page(report("qwen3"))
    assert "took longer than 0.2 s" in page
    assert (tmp_path / "calls").read_text().count("x") <= 2


def test_render_of_one_picture_fails_with_the_source_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_wheel: None) -> None:
    install(tmp_path, NO_PLUGINS, monkeypatch)
    write_json(tmp_path / "sites.json", report("qwen3"))
    result = CliRunner().invoke(app, ["render", str(tmp_path / "sites.json"), "-o", str(tmp_path / "x.svg"), "--group", "rope"])
    assert result.exit_code == 2
    assert "dot -c" in result.stderr
    assert (tmp_path / "x.dot").read_text().startswith("digraph")
    assert not (tmp_path / "x.svg").exists()


@needs.drawing
def test_one_diagram_that_fails_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    run = dot._run

    def fails_for_rope(path: str, source: str) -> object:
        if "q_norm" in source:
            raise dot.DrawingError("Graphviz could not draw the diagram", where="out of memory")
        return run(path, source)

    monkeypatch.setattr(dot, "_run", fails_for_rope)
    page = render_page(report("qwen3"))
    assert "This diagram could not be drawn (out of memory)" in page
    assert "<svg tabindex" in page
