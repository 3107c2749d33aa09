"""`graphalign drift`: exit codes, formats, and bad input by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import graphalign.cli.drift
import graphalign.cli.find  # noqa: F401  (registers the command)
from graphalign.cli.app import app
from graphalign.cli.drift import end_find
from graphalign.ir.files import write_json
from graphalign.patch.make import make_spec
from graphalign.patch.spec import save
from graphalign.rules import rules_dir
from tests.drift.data import capture, path, report
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


def changed(name: str, tmp_path: Path, **header: Any) -> Path:
    """A capture whose header says something else."""
    graph = capture(name)
    out = tmp_path / f"{name}.changed.json.gz"
    update = {k: {**getattr(graph.header, k), **v} if isinstance(v, dict) else v for k, v in header.items()}
    write_json(out, graph.model_copy(update={"header": graph.header.model_copy(update=update)}))
    return out


def refused(old: Path, new: Path, message: str) -> None:
    result = run("drift", old, new)
    assert result.code == 2, message
    assert message in result.err
    assert "Traceback" not in result.err


def test_other_models_targets_and_regimes_are_refused_by_name(files: Path, tmp_path: Path) -> None:
    qwen3, spec, sites = path("qwen3"), files / "qwen3.yaml", files / "qwen3.sites.json"
    models = "these are of different models: architecture is Qwen3ForCausalLM in one and Qwen2ForCausalLM in the other"
    write_json(tmp_path / "qwen2.sites.json", report("qwen2"), indent=1)
    save(make_spec(report("qwen2")), tmp_path / "qwen2.yaml")
    for old, new in (
        (qwen3, path("qwen2")),
        (spec, tmp_path / "qwen2.yaml"),
        (spec, tmp_path / "qwen2.sites.json"),
        (sites, tmp_path / "qwen2.sites.json"),
        (recorded.paths("qwen3")[1], recorded.paths("qwen2")[1]),
    ):
        refused(old, new, models)
    refused(qwen3, path("qwen3.h100"), "these are of different targets: device is cpu in one and cuda in the other")
    refused(qwen3, changed("qwen3", tmp_path, target={"isa": "AVX2"}), "different targets: isa is AVX512 in one and AVX2 in the other")
    refused(qwen3, changed("qwen3", tmp_path, target={"tp": 2}), "different targets: tp is 1 in one and 2 in the other")
    refused(qwen3, changed("qwen3", tmp_path, simulated=True), "one of the two is simulated, the other from a real device")
    training = recorded.captures("qwen3")[1]
    regime = {**training.header.regime, "autocast": "bfloat16"}
    other = training.model_copy(update={"header": training.header.model_copy(update={"regime": regime})})
    write_json(tmp_path / "autocast.train.json.gz", other)
    message = "these are of different regimes: autocast is None in one and bfloat16 in the other"
    refused(recorded.paths("qwen3")[1], tmp_path / "autocast.train.json.gz", message)
    write_json(tmp_path / "autocast.sites.json", report("qwen3").model_copy(update={"regime": regime}), indent=1)
    refused(sites, tmp_path / "autocast.sites.json", message)
    refused(spec, tmp_path / "autocast.sites.json", message)


def test_files_of_different_kinds_are_refused_by_name(files: Path) -> None:
    qwen3, spec, sites, training = path("qwen3"), files / "qwen3.yaml", files / "qwen3.sites.json", recorded.paths("qwen3")[1]
    refused(spec, qwen3, "a patch spec cannot be compared with an inference capture")
    refused(qwen3, training, "an inference capture cannot be compared with a training capture")
    refused(training, qwen3, "a training capture cannot be compared with an inference capture")
    refused(sites, spec, "a sites file cannot be compared with a patch spec")


def test_swapped_captures_are_called_what_they_are(tmp_path: Path) -> None:
    inference, training = recorded.paths("qwen3")
    for pair, message in (
        ((training, inference), "is not a valid inference capture: it is a training capture"),
        ((inference, inference), "is not a valid training capture: it is an inference capture"),
    ):
        result = run("diff", *pair, "-o", tmp_path / "sites.json")
        assert result.code == 2
        assert message in result.err
        assert "the inference capture comes first" in result.err


@pytest.mark.parametrize("kind", ["inference", "training", "sites", "spec"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "stripped", "newer"])
def test_damaged_files_are_named(kind: str, damage: str, files: Path, tmp_path: Path) -> None:
    whole = {"inference": path("qwen3"), "training": recorded.paths("qwen3")[1], "sites": files / "qwen3.sites.json",
             "spec": files / "qwen3.yaml"}[kind]  # fmt: skip
    data = whole.read_bytes()
    text = gzip.decompress(data).decode() if data[:2] == b"\x1f\x8b" else data.decode()
    bad = tmp_path / f"bad{''.join(whole.suffixes[-2:])}"
    if damage == "cut":
        bad.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        middle = len(data) // 2
        bad.write_bytes(data[:middle] + b"\xff\x00\xfe" + data[middle + 3 :])
    elif damage == "emptied":
        bad.write_bytes(b"")
    elif damage == "stripped":
        bad.write_text('{"format": "graphalign.inference"}' if kind != "spec" else "format: graphalign.patch\nversion: 1\n")
    else:
        bad.write_text(text.replace('"version":1', '"version":99', 1).replace('"version": 1', '"version": 99', 1)
                       .replace("version: 1", "version: 99", 1))  # fmt: skip
    for pair in ((bad, whole), (whole, bad)):
        result = run("drift", *pair)
        assert result.code == 2
        assert bad.name in result.err
        assert "Traceback" not in result.err


def test_what_is_no_file_of_ours_is_named(files: Path, tmp_path: Path) -> None:
    spec, other = files / "qwen3.yaml", tmp_path / "other.json"
    other.write_text('{"format": "something"}')
    refused(spec, other, "other.json is no spec, sites file or capture")
    refused(spec, tmp_path / "none", "cannot read")
    refused(spec, tmp_path, "cannot read")


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
