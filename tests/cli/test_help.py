"""Help is instant and teaches; rules are found wherever graphalign is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from graphalign.errors import BadInputError
from graphalign.rules import rules_dir


@pytest.mark.parametrize("command", [["find"], ["capture", "inference"], ["capture", "training"], ["diff"], ["why"], ["show"]])
def test_every_command_has_an_example(stage, command: list[str]) -> None:
    result = stage.run(*command, "--help")
    assert result.code == 0
    assert f" graphalign {' '.join(command)} " in result.out.split("Example", 1)[1]


def test_help_imports_no_heavy_package() -> None:
    code = "import sys, graphalign.cli.app; print(sorted({'torch', 'numpy', 'networkx', 'vllm', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_version(stage) -> None:
    assert stage.run("--version").out.startswith("graphalign 0.")


def test_rules_come_from_the_argument_then_the_environment_then_the_package(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("GRAPHALIGN_RULES", raising=False)
    assert rules_dir().name in ("rules", "_rules")
    monkeypatch.setenv("GRAPHALIGN_RULES", str(tmp_path))
    assert rules_dir() == tmp_path
    (tmp_path / "mine").mkdir()
    assert rules_dir(tmp_path / "mine") == tmp_path / "mine"
    monkeypatch.setenv("GRAPHALIGN_RULES", str(tmp_path / "none"))
    with pytest.raises(BadInputError, match="no rules folder"):
        rules_dir()
