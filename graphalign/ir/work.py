"""Folders for intermediate files: one for each job, and nothing else is ever removed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graphalign.errors import BadInputError

try:
    import fcntl
except ImportError:  # no such locks here: then what killed jobs left is not removed
    fcntl = None  # type: ignore[assignment]

PREFIX = ".graphalign-work-"
"""How the name of a job's folder begins."""
MARK = "made by graphalign"
"""File in a job's folder that its process holds a lock on, which ends with the process."""


@contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """A folder for a job's intermediate files, on the same disk as `parent`; gone when the job is done.

    Jobs share nothing. A folder that a killed job left is removed by the next: one that holds the mark, which nobody has a lock on.

    Raises:
        BadInputError: it cannot be made.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_left(parent)
        work = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as e:
        raise BadInputError(
            f"cannot work in {parent}: {e.strerror or e}", where=str(parent), hint="give a folder you may write to, with room on its disk"
        ) from None
    try:
        with _marked(work):
            inside = work / "files"
            inside.mkdir()
            yield inside
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _marked(work: Path) -> Iterator[None]:
    """Hold the lock of a job's folder. The mark gets its name once it is locked: another job must not find it without."""
    if fcntl is None:
        yield
        return
    new = work / "new"
    fd = os.open(new, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):  # a disk without locks: the folder goes unmarked, and stays if the job is killed
            fcntl.flock(fd, fcntl.LOCK_EX)
            new.rename(work / MARK)
        yield
    finally:
        os.close(fd)


def _remove_left(parent: Path) -> None:
    """Remove the folders of jobs whose process is gone."""
    if fcntl is None:
        return
    for left in parent.glob(f"{PREFIX}*"):
        try:
            fd = os.open(left / MARK, os.O_RDWR)
        except OSError:
            continue  # not ours, or just gone
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        except OSError:
            pass  # its job runs
        finally:
            os.close(fd)
