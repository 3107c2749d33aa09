"""`graphalign gap --dump`: options, exit codes, what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import graphalign.cli.gap  # noqa: F401  (registers the command)
from graphalign.cli.app import app
from tests.dumps import samples

RUN = samples.run(30, 40)


def run(*arguments: object) -> SimpleNamespace:
    result = CliRunner().invoke(app, ["gap", *map(str, arguments)], env={"COLUMNS": "120"})
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


def test_files_may_follow_as_a_shell_expands_them(tmp_path: Path) -> None:
    files = [samples.write_lines(tmp_path / f"train_data_step{i}.jsonl", samples.nemo(samples.run(30, 40, seed=i))) for i in range(3)]
    result = run("--dump", *files, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert "from 3 files" in result.out
    assert "By training step" in result.out
    assert "NeMo-RL token_mult_prob_error" in result.out
    report = json.loads((tmp_path / "out" / "gap.json").read_text())
    assert [f["format"] for f in report["files"]] == ["nemo-rl"] * 3
    assert report["gap"]["tokens"] == sum(f["tokens"] for f in report["files"])
    page = (tmp_path / "out" / "gap.html").read_text()
    assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")
    assert page.count("<figure>") == 2


def test_faulty_rows_are_exit_code_7(tmp_path: Path) -> None:
    rows = samples.own(RUN)
    rows[3]["training_logprobs"][2] = None
    result = run("--dump", samples.write_lines(tmp_path / "x.jsonl", rows))
    assert result.code == 7
    assert "left out: 1 of 30 responses: NaN or null" in result.out
    assert "x.jsonl line 4" in result.out
    assert "1 faulty responses were left out" in result.err


def test_no_numeric_gap_is_exit_code_2_and_shown_only_if_asked_for(tmp_path: Path) -> None:
    rows = samples.own(RUN)
    for row in rows:
        row["training_logprobs"] = [*row["training_logprobs"][1:], -1.0]
    path = samples.write_lines(tmp_path / "x.jsonl", rows)
    result = run("--dump", path, "--out", tmp_path)
    assert result.code == 2
    assert "sides shifted by one token" in result.out + result.err
    path = samples.write_lines(tmp_path / "y.jsonl", samples.own(RUN) + rows)
    result = run("--dump", path, "--out", tmp_path)
    assert result.code == 2
    assert "no numeric gap: 30 of 60 rows are faulty" in result.out
    assert "k3 [" not in result.out
    assert json.loads((tmp_path / "gap.json").read_text())["gap"] is None
    assert "no numeric gap" in (tmp_path / "gap.html").read_text()
    result = run("--dump", path, "--anyway")
    assert result.code == 7
    assert "no numeric gap" in result.out
    assert "k3 [" in result.out


def test_the_engines_column_alone_asks_for_a_model(tmp_path: Path) -> None:
    result = run("--dump", samples.write_lines(tmp_path / "x.jsonl", samples.completions(RUN)))
    assert result.code == 2
    assert "--model MODEL scores the same tokens" in result.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "gap needs a model, or a dump"),
        (("--dump", "nowhere.jsonl"), "no such file"),
        (("--dump", "{file}", "--patch", "p.yaml"), "are about a model"),
        (("--dump", "{file}", "--step", "99"), "the dump has no rows"),
        (("--dump", "{file}", "--format", "nope"), "no format is called"),
        (("--dump", "{file}", "--model", "{folder}"), "config.json"),
        (("--dump", "{file}", "--max-tokens", "8"), "--max-tokens is about a live engine"),
        (("example:qwen3", "--anyway"), "--anyway is about a dump"),
        (("{file}",), "files go behind --dump"),
        (("example:qwen3", "example:llama", "--out", "{folder}"), "gap takes one model"),
        (("example:qwen3",), "needs a folder"),
    ],
)
def test_bad_input_is_exit_code_2(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    file = samples.write_lines(tmp_path / "x.jsonl", samples.own(RUN))
    result = run(*(a.format(file=file, folder=tmp_path) for a in arguments))
    assert result.code == 2, result.out + result.err
    assert words in result.err


def test_the_old_name_of_the_command_still_works_and_is_not_listed() -> None:
    old = CliRunner().invoke(app, ["verify", "example:qwen3"])
    assert (old.exit_code, "needs a folder" in old.stderr) == (2, True)
    assert "verify" not in CliRunner().invoke(app, ["--help"]).stdout


def test_help_shows_an_example() -> None:
    assert " graphalign gap --dump " in run("--help").out.split("Example", 1)[1]


def test_tables_fit_into_80_columns(tmp_path: Path) -> None:
    path = samples.write_lines(tmp_path / "x.jsonl", samples.prime(RUN))
    result = CliRunner().invoke(app, ["gap", "--dump", str(path)], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout.split("The gap", 1)[1]
