"""`graphalign.find`: what the command does, for Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import graphalign
from graphalign.errors import BadInputError


def test_it_writes_nothing_unless_asked_to(stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "here")
    found = graphalign.find("example:qwen3", layers=2, engine_args={"max_model_len": 64})
    assert (found.inference, found.training, found.report) == (stage.inference, stage.training, stage.report)
    assert (found.patch, found.outcome) == (None, graphalign.Outcome.DONE)
    assert stage.calls["inference"]["engine_args"] == {"max_model_len": 64}
    assert [*(tmp_path / "temporary").iterdir(), *(tmp_path / "here").iterdir()] == []
    assert capfd.readouterr() == ("", "")
    assert set(found.seconds) == {"inference", "training", "diff"}


def test_it_leaves_the_files_of_the_command(stage, tmp_path: Path) -> None:
    graphalign.find("example:qwen3", tmp_path / "new" / "out", page=True)
    assert sorted(p.name for p in (tmp_path / "new" / "out").iterdir()) == ["report.html", "sites.json", "training.json.gz"]


def test_the_outcome_is_the_exit_code_of_the_command(stage) -> None:
    stage.report.uncompared = ["2 anchors of the trainer have no partner"]
    assert graphalign.find("example:qwen3").outcome == 7
    stage.report.semantic = ["the YaRN factor is missing"]
    assert graphalign.find("example:qwen3").outcome == 3


def test_errors_are_graphaligns(stage) -> None:
    with pytest.raises(BadInputError, match=r"is not pkg\.module:function"):
        graphalign.find("example:qwen3", factory="nonsense")


def test_every_export_is_there_and_importing_the_package_loads_nothing() -> None:
    assert all(getattr(graphalign, name) is not None for name in graphalign.__all__)
    assert set(graphalign.__all__) <= set(dir(graphalign))
    code = "import sys, graphalign; print(sorted({'torch', 'numpy', 'networkx', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
