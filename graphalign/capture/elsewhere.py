"""The training side captured in the trainer's own environment, whose Transformers and torch may be others than graphalign's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import graphalign
from graphalign.capture.inference import interpreter
from graphalign.errors import BadInputError, CaptureFailedError, CaptureFileError
from graphalign.ir.files import read_json
from graphalign.ir.training import TrainingGraph

SCRIPT = Path(__file__).with_name("trainer_script.py")
LOG_LINES = 12
"""Last lines of the process's output shown when it fails."""


def capture_training_with(
    python: str | os.PathLike[str], arguments: Mapping[str, Any], progress: Callable[[str], None] | None = None
) -> TrainingGraph:
    """What `capture_training` returns in another environment.

    Args:
        python: an interpreter, or the folder of an environment, that has torch and Transformers. It need not have graphalign.
        arguments: of `capture_training`; what JSON can hold.
        progress: called with a line per stage.

    Raises:
        BadInputError: no such interpreter, it lacks a package, or as in `capture_training`.
        CaptureFailedError: as in `capture_training`, or the process died.
    """
    run = interpreter(python)
    with tempfile.TemporaryDirectory(prefix="graphalign-") as folder:
        out, request = Path(folder) / "train.json.gz", Path(folder) / "request.json"
        request.write_text(json.dumps({
            "arguments": {k: os.fspath(v) if isinstance(v, Path) else v for k, v in arguments.items()},
            "out": str(out), "package": str(Path(graphalign.__file__).parents[1]), "python": list(sys.version_info[:2]),
            "places": [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))],
        }))  # fmt: skip
        with (Path(folder) / "log.txt").open("w+") as log:
            failure, code = _run([run, str(SCRIPT), str(request)], log, progress)
            if failure or code != 0 or not out.exists():
                raise _explain(run, failure, code, log)
        try:
            return read_json(out, TrainingGraph, kind="training capture")
        except CaptureFileError as e:
            raise CaptureFailedError(f"{run} wrote no usable capture: {e.what}", where=e.where) from None


def _run(command: list[str], log: IO[str], progress: Callable[[str], None] | None) -> tuple[dict[str, Any], int]:
    """Run the script to its end; what it said of a failure, and its exit status. It does not outlive this process's interruption."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV")} | {"PYTHONUNBUFFERED": "1"}
    failure: dict[str, Any] = {}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
    except OSError as e:
        raise BadInputError(f"cannot run {command[0]}: {e.strerror or e}", where=command[0]) from None
    try:
        assert process.stdout is not None
        for line in process.stdout:
            message = _message(line)
            if message is None:
                log.write(line)
            elif "error" in message:
                failure.update(message)
            elif progress is not None and isinstance(message.get("stage"), str):
                progress(message["stage"])
        return failure, process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _message(line: str) -> dict[str, Any] | None:
    if not line.startswith("@graphalign "):
        return None
    try:
        found = json.loads(line.removeprefix("@graphalign "))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _explain(python: str, failure: dict[str, Any], code: int, log: IO[str]) -> BadInputError | CaptureFailedError:
    log.flush()
    log.seek(0)
    tail = "\n".join([line.rstrip()[:300] for line in log if line.strip()][-LOG_LINES:])
    if lacks := failure.get("lacks"):
        return BadInputError(
            f"{python} lacks {lacks}, which the capture needs", where=str(failure["error"]),
            hint=f"install {str(lacks).partition('.')[0]} there, or name another environment's Python (--trainer-python)",
        )  # fmt: skip
    if failure:
        kind = BadInputError if failure.get("usage") is True else CaptureFailedError
        return kind(str(failure["error"]), where=str(failure.get("where") or ""), hint=str(failure.get("hint") or ""))
    return CaptureFailedError(f"the trainer's process ended with status {code}", where=tail or python, hint="see the log above")
