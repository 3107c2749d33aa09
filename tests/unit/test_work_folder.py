"""Intermediate files lie in a folder of ours, and nothing else is ever removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphalign.errors import BadInputError
from graphalign.ir.files import WORK, work_folder


def test_what_a_killed_job_left_is_removed_and_nothing_of_the_users(tmp_path: Path) -> None:
    checkout = tmp_path / "graphalign-main"
    checkout.mkdir()
    (checkout / "thesis.txt").write_text("years of work")
    with work_folder(tmp_path) as killed:
        (killed / "half.bin").write_text("x")
        left = tmp_path / WORK / "job-killed"
        left.mkdir()
    assert left.is_dir()
    with work_folder(tmp_path) as work:
        assert work.is_dir()
        assert not left.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["graphalign-main"]
    assert (checkout / "thesis.txt").read_text() == "years of work"


def test_a_folder_of_that_name_that_is_not_ours_keeps_its_content(tmp_path: Path) -> None:
    theirs = tmp_path / WORK / "job-mine"
    theirs.mkdir(parents=True)
    (theirs / "notes.txt").write_text("mine")
    with work_folder(tmp_path):
        pass
    assert (theirs / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / WORK).write_text("a file")
    with pytest.raises(BadInputError, match="cannot work in"), work_folder(tmp_path):
        pass
