"""`graphalign drift`: exit codes, formats, and bad input by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import graphalign.cli_drift  # noqa: F401  (registers the commands)
from graphalign.cli import app
from graphalign.cli_drift import end_find
from graphalign.ir.files import write_json
from graphalign.patch.make import make_spec
from graphalign.patch.spec import dump, save
from graphalign.rules import rules_dir
from tests.drift.data import path, report
from tests.fixtures import recorded


def run(*arguments: str | Path) -> SimpleNamespace:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("qwen3", "qwen3.casts"):
        write_json(tmp_path / f"{name}.sites.json", report(name), indent=1)
        save(make_spec(report(name)), tmp_path / f"{name}.yaml")
    return tmp_path


def test_exit_codes_of_every_kind_of_file(files: Path) -> None:
    for old, new in (
        (files / "qwen3.yaml", files / "qwen3.casts.yaml"),
        (files / "qwen3.sites.json", files / "qwen3.casts.sites.json"),
        (files / "qwen3.yaml", files / "qwen3.casts.sites.json"),
        (path("qwen3"), path("qwen3.casts")),
    ):
        assert run("drift", old, old).code == 0, old
        assert run("drift", old, new).code == 5, old
    training = recorded.paths("qwen3")[1]
    assert run("drift", training, training).code == 0


def test_formats(files: Path) -> None:
    old, new = files / "qwen3.yaml", files / "qwen3.casts.yaml"
    assert "the old patch is wrong" in run("drift", old, new).out
    assert run("drift", old, new, "--format", "markdown").out.startswith("### ❌ Rounding drift, Qwen3ForCausalLM\n")
    plain = json.loads(run("drift", old, new, "--format", "json").out)
    assert (plain["format"], plain["verdict"]) == ("graphalign.drift", "wrong")


def test_bad_input_is_named(files: Path, tmp_path: Path) -> None:
    qwen3, spec = path("qwen3"), files / "qwen3.yaml"
    damaged = tmp_path / "damaged.json.gz"
    damaged.write_bytes(qwen3.read_bytes()[:500])
    cut = tmp_path / "cut.yaml"
    cut.write_text(dump(make_spec(report("qwen3")))[:2000])
    other = tmp_path / "other.json"
    other.write_text('{"format": "something"}')
    for old, new, message in (
        (qwen3, path("qwen2"), "these are of different models: architecture is Qwen3ForCausalLM in one and Qwen2ForCausalLM in the other"),
        (qwen3, damaged, "damaged.json.gz is truncated"),
        (cut, spec, "cut.yaml is not"),
        (spec, other, "other.json is no spec, sites file or capture"),
        (spec, tmp_path / "none", "cannot read"),
        (spec, qwen3, "a patch spec cannot be compared with a inference capture"),
        (qwen3, recorded.paths("qwen3")[1], "cannot be compared with a training capture"),
    ):
        result = run("drift", old, new)
        assert result.code == 2, message
        assert message in result.err


def test_what_find_says_last(capsys: pytest.CaptureFixture[str]) -> None:
    rules = rules_dir()
    assert end_find(report("qwen3"), rules, None, None) is False
    assert capsys.readouterr().out == "as many sites as expected for Qwen3ForCausalLM on cpu\n"
    assert end_find(report("qwen3"), rules, make_spec(report("qwen3")), Path("patch.yaml")) is False
    assert "Nothing moved; the old patch is right" in capsys.readouterr().out
    assert end_find(report("qwen3.casts"), rules, make_spec(report("qwen3")), Path("patch.yaml")) is True
    said = capsys.readouterr().out
    assert "not the sites expected for Qwen3ForCausalLM on cpu:\n  norm_weight: 0 where 4 are expected (fewer), layers 0-5\n" in said
    assert "the old patch is wrong" in said


def test_a_baseline_that_is_none_is_refused_before_the_captures(tmp_path: Path) -> None:
    result = run("find", "example:qwen3", "--out", tmp_path / "out", "--baseline", tmp_path / "none.yaml")
    assert result.code == 2
    assert "cannot read patch spec" in result.err
