"""Each outcome has its own exit code, and each failure one message."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from graphalign.errors import AlignmentError, BadInputError, CaptureFailedError
from graphalign.ir.files import write_json


def test_find_writes_its_files_and_exits_0(stage, tmp_path: Path) -> None:
    result = stage.run("find", "example:qwen3", "--out", tmp_path / "new" / "qwen3")
    assert result.code == 0, result.err
    assert stage.calls["inference"]["out"] == tmp_path / "new" / "qwen3" / "inference.json.gz"
    # the inference capture is written by `capture_inference` itself, which is a stand-in here
    assert sorted(p.name for p in (tmp_path / "new" / "qwen3").iterdir()) == ["report.html", "sites.json", "training.json.gz"]
    assert "TABLE" in result.out
    assert "explains a node" in result.out
    assert re.search(r"then \d+\.\d s", result.out)


def test_find_without_the_report(stage, tmp_path: Path) -> None:
    assert stage.run("find", "example:qwen3", "--out", tmp_path, "--no-report").code == 0
    assert not (tmp_path / "report.html").exists()
    assert (tmp_path / "sites.json").exists()


def test_progress_without_a_terminal_is_a_line_per_stage_on_stderr(stage, tmp_path: Path) -> None:
    result = stage.run("find", "example:qwen3", "--out", tmp_path)
    assert result.err.splitlines() == [
        f"{job}: {name}"
        for job in ("inference", "training", "diff")
        for name in (["find the model"] if job != "diff" else []) + ["a stage", "another stage"]
    ] + ["diff: report"]


def test_semantic_divergence_exits_3_and_keeps_the_result(stage, tmp_path: Path) -> None:
    stage.report.semantic = ["the YaRN factor is missing"]
    result = stage.run("find", "example:qwen3", "--out", tmp_path)
    assert result.code == 3
    assert "the two sides compute different functions in 1 place: no patch of roundings can make them agree" in result.err
    assert (tmp_path / "sites.json").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [(BadInputError("no model there", hint="give a folder"), 2), (CaptureFailedError("the engine died", where="last line\nof its log"), 4)],
)
def test_errors_become_a_message_and_their_exit_code(stage, tmp_path: Path, error, code: int) -> None:
    stage.fail["inference"] = error
    result = stage.run("capture", "inference", "x", "-o", tmp_path / "inf.json.gz")
    assert result.code == code
    assert f"error: {error.what}" in result.err
    assert "Traceback" not in result.err
    if error.where:
        assert "  where: last line\n         of its log\n" in result.err
    else:
        assert "  try:   give a folder\n" in result.err


def test_markup_in_an_error_is_shown_as_it_is(stage, tmp_path: Path) -> None:
    stage.fail["inference"] = BadInputError("no [bold]model[/] there", where="[red]", hint="[/]")
    result = stage.run("capture", "inference", "x", "-o", tmp_path / "inf.json.gz")
    assert "error: no [bold]model[/] there\n  where: [red]\n  try:   [/]\n" in result.err


def test_nothing_aligned_is_an_error(stage, tmp_path: Path) -> None:
    stage.fail["diff"] = AlignmentError("nothing could be aligned")
    assert stage.run("find", "example:qwen3", "--out", tmp_path).code == 2
    assert not (tmp_path / "sites.json").exists()


def test_an_unexpected_exception_is_called_a_bug_and_logged(stage, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stage.fail["training"] = ZeroDivisionError("division by zero")
    result = stage.run("capture", "training", "x", "-o", tmp_path / "out" / "train.json.gz")
    assert result.code == 1
    assert "error: this is a bug in graphalign, not in your input" in result.err
    assert "where: ZeroDivisionError: division by zero" in result.err
    (log,) = tmp_path.glob("graphalign-crash-*.log")
    assert str(log) in result.err
    assert "Traceback (most recent call last)" in log.read_text()


def test_interrupt_exits_130(stage, tmp_path: Path) -> None:
    stage.fail["inference"] = KeyboardInterrupt()
    result = stage.run("find", "example:qwen3", "--out", tmp_path)
    assert result.code == 130
    assert result.err.endswith("interrupted\n")


@pytest.mark.parametrize("arguments", [["find"], ["find", "m"], ["nonsense"], ["diff", "a"], ["find", "m", "--out", "o", "--layers", "0"]])
def test_usage_errors_exit_2(stage, arguments: list[str]) -> None:
    assert stage.run(*arguments).code == 2


def test_diff_reads_both_captures(stage, tmp_path: Path) -> None:
    write_json(tmp_path / "inf.json.gz", stage.inference)
    write_json(tmp_path / "train.json.gz", stage.training)
    result = stage.run("diff", tmp_path / "inf.json.gz", tmp_path / "train.json.gz", "-o", tmp_path / "sites.json")
    assert result.code == 0, result.err
    assert stage.calls["diff"]["inference"] == stage.inference
    assert stage.calls["diff"]["training"] == stage.training
    assert (tmp_path / "sites.json").exists()


def test_why_prints_the_explanation(stage, tmp_path: Path) -> None:
    write_json(tmp_path / "sites.json", stage.report)
    result = stage.run("why", tmp_path / "sites.json", "mul_3")
    assert (result.code, result.out) == (0, "mul_3 is aligned\n")


def test_a_report_that_cannot_be_made_changes_no_exit_code(stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(report: object) -> str:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(sys.modules["graphalign.render.page"], "render_page", fails)
    assert stage.run("find", "example:qwen3", "--out", tmp_path / "a").code == 0
    stage.report.semantic = ["the YaRN factor is missing"]
    result = stage.run("find", "example:qwen3", "--out", tmp_path / "b")
    assert result.code == 3
    assert "report.html was not written: RuntimeError: no fonts" in result.err
    assert "TABLE" in result.out


def test_a_run_that_failed_leaves_no_empty_folders(stage, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    stage.fail["inference"] = KeyboardInterrupt()
    assert stage.run("find", "example:qwen3", "--out", tmp_path / "mine" / "new" / "out").code == 130
    assert list((tmp_path / "mine").iterdir()) == []
    assert stage.run("find", "example:qwen3", "--out", tmp_path / "mine").code == 130
    assert (tmp_path / "mine").is_dir()


def test_a_part_that_was_not_compared_exits_7_and_semantic_goes_first(stage, tmp_path: Path) -> None:
    stage.report.uncompared = ["2 anchors of the trainer have no partner"]
    result = stage.run("find", "example:qwen3", "--out", tmp_path / "a")
    assert result.code == 7
    assert "part of the model was not compared" in result.err
    assert (tmp_path / "a" / "sites.json").exists()
    stage.report.semantic = ["the YaRN factor is missing"]
    assert stage.run("find", "example:qwen3", "--out", tmp_path / "b").code == 3
