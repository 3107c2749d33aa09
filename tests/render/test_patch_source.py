"""The patch as source beside its sites: in `why`, in the text, in the report."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from typer.testing import CliRunner

import graphalign.cli.render  # noqa: F401  (registers the command)
from graphalign.cli.app import app
from graphalign.errors import BadInputError
from graphalign.ir.files import write_json
from graphalign.patch.make import make_spec
from graphalign.patch.spec import save
from graphalign.render.patch_source import read_source, source_beside
from graphalign.source.generate import Generated, generate
from graphalign.source.ids import all_ids, short_ids
from graphalign.source.write import files, write
from tests.breadth import models
from tests.breadth.captured import report

NAME = "llama_odd"


@functools.cache
def generated() -> Generated:
    return generate(models.build(NAME), make_spec(report(NAME)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What `find` and then `graphalign source` leave behind."""
    write_json(tmp_path / "sites.json", report(NAME))
    save(make_spec(report(NAME)), tmp_path / "patch.yaml")
    write(files(generated(), tmp_path / "modeling_aligned.py", "module"))
    return tmp_path


def run(*args: object) -> str:
    done = CliRunner().invoke(app, [str(a) for a in args])
    assert done.exit_code == 0, done.output
    return done.output


def test_ids_in_a_comment() -> None:
    sites = ["rope.1", "rope.10", "rope.2", "rope.3", "norm_weight.4"]
    assert short_ids(sites) == "norm_weight.4, rope.1-3, rope.10"
    assert sorted(all_ids(short_ids(sites))) == sorted(sites)


def test_every_site_has_its_lines(folder: Path) -> None:
    source = source_beside(folder / "sites.json")
    assert source is not None
    served = {s for h in source.hunks for s in h.sites}
    assert served == {s.id for g in report(NAME).groups for s in g.sites}
    rope = [line for line in source.lines("rope.1") if "cos" in line]
    assert rope
    assert all("modeling_llama.py:" in line and "graphalign" not in line for line in rope)


def test_why_prints_them(folder: Path) -> None:
    said = run("why", folder / "sites.json", "swiglu.1")
    assert "in modeling_aligned.diff: transformers/models/llama/modeling_llama.py:" in said
    assert ".gate_proj(x).float()" in said
    (folder / "patch.yaml").write_text("another patch")
    assert "modeling_aligned" not in run("why", folder / "sites.json", "swiglu.1")
    assert "modeling_aligned" in run("why", folder / "sites.json", "swiglu.1", "--source", folder / "modeling_aligned.py")


def test_text_and_report_show_them(folder: Path) -> None:
    said = run("render", folder / "sites.json", "--group", "swiglu")
    assert " swiglu in modeling_aligned.diff" in said
    assert "graphalign: swiglu.1" in said
    run("render", folder / "sites.json", "-o", folder / "report.html")
    page = (folder / "report.html").read_text()
    assert "The patch as source: modeling_aligned.diff" in page
    assert 'class="added"' in page
    assert '<a href="#site-swiglu.1">swiglu.1</a>' in page


def test_what_is_no_generated_diff(tmp_path: Path) -> None:
    (tmp_path / "x.diff").write_text("--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n")
    with pytest.raises(BadInputError, match="names a site"):
        read_source(tmp_path / "x.diff")
    with pytest.raises(BadInputError, match="cannot read"):
        read_source(tmp_path / "missing.py")
