"""Intermediate files lie in a folder of ours, and nothing else is ever removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from graphalign.errors import BadInputError
from graphalign.ir.work import MARK, PREFIX, work_folder


def test_what_a_killed_job_left_is_removed_and_nothing_of_the_users(tmp_path: Path) -> None:
    checkout = tmp_path / "graphalign-main"
    checkout.mkdir()
    (checkout / "thesis.txt").write_text("years of work")
    left = tmp_path / f"{PREFIX}killed"
    left.mkdir()
    (left / MARK).touch()
    with work_folder(tmp_path) as work:
        assert work.is_dir()
        assert not left.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["graphalign-main"]
    assert (checkout / "thesis.txt").read_text() == "years of work"


def test_a_folder_of_such_a_name_that_is_not_ours_keeps_its_content(tmp_path: Path) -> None:
    theirs = tmp_path / f"{PREFIX}mine"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    with work_folder(tmp_path):
        pass
    assert (theirs / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(BadInputError, match="cannot work in"), work_folder(tmp_path / "taken"):
        pass


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    text = f"import sys, time\nfrom pathlib import Path\nfrom graphalign.ir.work import work_folder\n{code}"
    return subprocess.Popen([sys.executable, "-c", text, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def test_a_job_that_runs_keeps_its_folder_and_one_that_was_killed_does_not(tmp_path: Path) -> None:
    code = """
with work_folder(Path(sys.argv[1])) as work:
    (work / "half.bin").write_text("x")
    print(work, flush=True)
    time.sleep(600)
"""
    job = start(code, tmp_path)
    try:
        assert job.stdout is not None
        theirs = Path(job.stdout.readline().strip())
        with work_folder(tmp_path) as first, work_folder(tmp_path) as second:
            assert len({theirs, first, second}) == 3
            assert (theirs / "half.bin").read_text() == "x"
        assert (theirs / "half.bin").read_text() == "x"
    finally:
        job.kill()
        job.wait()
    assert theirs.is_dir(), "killed: nothing of its own removed it"
    with work_folder(tmp_path):
        assert not theirs.exists()
    assert list(tmp_path.iterdir()) == []


def test_jobs_that_come_and_go_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    code = """
for i in range(150):
    with work_folder(Path(sys.argv[1])) as work:
        (work / "a").write_text(str(i))
        time.sleep(0.0005)
        assert (work / "a").read_text() == str(i)
"""
    jobs = [start(code, tmp_path) for _ in range(4)]
    assert [job.wait(timeout=120) for job in jobs] == [0] * 4
    assert list(tmp_path.iterdir()) == []
