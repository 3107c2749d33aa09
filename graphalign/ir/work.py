"""Folders for intermediate files: one for each job, and nothing else is ever removed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from graphalign.errors import BadInputError

try:
    import fcntl
except ImportError:  # no such locks here: then what killed jobs left is not removed
    fcntl = None  # type: ignore[assignment]

WORK = ".graphalign-work"
"""The one folder inside a user's folder whose content is ours to remove."""
_MARK = "made by graphalign"
_ALIVE = "in use"
"""File in a job's folder that its process holds a lock on, which ends with the process."""


@contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """A folder for a job's intermediate files, on the same disk as `parent`; gone when the job is done.

    It lies in `parent`/.graphalign-work, which holds a mark, beside those of other jobs that run at the same time. What a job that was
    killed left there is removed, and nothing else: a folder of that name without the mark is not ours.

    Raises:
        BadInputError: it cannot be made.
    """
    ours = parent / WORK
    with ExitStack() as held:
        try:
            with _alone(ours):
                _remove_left(ours)
                work = Path(tempfile.mkdtemp(prefix="job-", dir=ours))
                held.enter_context(_locked(work / _ALIVE))
        except OSError as e:
            raise BadInputError(
                f"cannot work in {parent}: {e.strerror or e}", where=str(ours), hint="give a folder you may write to, with room on its disk"
            ) from None
        inside = work / "files"
        inside.mkdir()
        try:
            yield inside
        finally:
            with suppress(OSError), _alone(ours):
                shutil.rmtree(work, ignore_errors=True)
                if (ours / _MARK).is_file() and {p.name for p in ours.iterdir()} == {_MARK}:
                    gone = tempfile.mkdtemp(prefix=f"{WORK}.", dir=parent)
                    ours.rename(gone)  # at once: another job must not find it without its mark
                    shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def _alone(ours: Path) -> Iterator[None]:
    """The folder of all jobs, made if it is not there, for one process at a time."""
    while True:
        if not ours.exists():
            _make(ours)
        mark = ours / _MARK
        if not mark.is_file():
            if not ours.exists():  # removed since
                continue
            yield  # a user's own folder
            return
        with ExitStack() as held:
            try:
                held.enter_context(_locked(mark, create=False))
            except FileNotFoundError:  # removed while we waited for it
                continue
            yield
            return


def _make(ours: Path) -> None:
    """The folder of all jobs with its mark, at once: another job must not find it without."""
    ours.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f"{WORK}.", dir=ours.parent))
    (new / _MARK).touch()
    try:
        new.rename(ours)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        if not ours.exists():  # else another job was faster
            raise


def _remove_left(ours: Path) -> None:
    """Remove the folders of jobs whose process is gone."""
    if fcntl is None or not (ours / _MARK).is_file():
        return
    for left in ours.glob("job-*"):
        try:
            with _locked(left / _ALIVE, wait=False, create=False):
                pass
        except BlockingIOError:
            continue  # its job runs
        except OSError:
            pass  # an older version's, which held no lock
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _locked(file: Path, *, wait: bool = True, create: bool = True) -> Iterator[None]:
    """Hold a lock on a file.

    Raises:
        BlockingIOError: another process holds it, and this one does not wait.
        FileNotFoundError: the file is not there, or was removed while this process waited.
    """
    fd = os.open(file, os.O_RDWR | (os.O_CREAT if create else 0), 0o644)
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.fstat(fd).st_nlink == 0:
                raise FileNotFoundError(file)
        yield
    finally:
        os.close(fd)
