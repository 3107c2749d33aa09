"""Which expression of the model's own code an op comes from.

Python 3.11+ keeps the column span of every bytecode instruction, so a running frame names the exact
expression it is in, not only its line.
"""

from __future__ import annotations

import hashlib
import itertools
import linecache
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

from graphalign.ir.training import Source

GLUE = frozenset({"torch", "graphalign", "torchvision", "einops", "opt_einsum", "jaxtyping", "beartype", "typeguard", "numpy"})
"""Packages whose frames are never modeling code: they only pass a call on."""

_PACKAGE_ROOT = Path(__file__).resolve().parent.parent
_STDLIB = Path(sysconfig.get_paths()["stdlib"]).resolve()


class SourceTable:
    """Sources seen so far, each once.

    Attributes:
        sources: the table, in order of first use.
        files: relative file name (as in `Source.file`) to the absolute path on this machine.
    """

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.files: dict[str, str] = {}
        self._by_instruction: dict[tuple[CodeType, int], int] = {}
        self._by_source: dict[Source, int] = {}
        self._modeling: dict[str, bool] = {}

    def locate(self, frame: FrameType | None) -> int | None:
        """Index of the source of the innermost modeling frame at or outside `frame`; None if there is none."""
        while frame is not None and not self._is_modeling(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return None
        key = (frame.f_code, frame.f_lasti)
        if key not in self._by_instruction:
            self._by_instruction[key] = self._add(self._read(frame))
        return self._by_instruction[key]

    def add(self, filename: str, source: Source) -> int:
        """Index of a source found otherwise, in the file with the absolute path `filename`."""
        file = relative_file(filename)
        self.files.setdefault(file, filename)
        return self._add(source.model_copy(update={"file": file}))

    def _add(self, source: Source) -> int:
        index = self._by_source.setdefault(source, len(self.sources))
        if index == len(self.sources):
            self.sources.append(source)
        return index

    def digests(self) -> dict[str, str]:
        """SHA-256 of every source file seen, by relative name."""
        return {name: digest for name in sorted(self.files) if (digest := file_digest(self.files[name]))}

    def _is_modeling(self, filename: str) -> bool:
        known = self._modeling.get(filename)
        if known is None:
            known = self._modeling[filename] = is_modeling_file(filename)
        return known

    def _read(self, frame: FrameType) -> Source:
        code = frame.f_code
        file = relative_file(code.co_filename)
        self.files.setdefault(file, code.co_filename)
        line, end_line, column, end_column = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
        line = line or frame.f_lineno or code.co_firstlineno
        if column is None or end_column is None or end_line is None:  # python -X no_debug_ranges keeps lines only
            text = linecache.getline(code.co_filename, line, frame.f_globals).rstrip("\n")
            end_line, column, end_column = line, 0, len(text.encode())
        else:
            text = span(linecache.getlines(code.co_filename, frame.f_globals), line, column, end_line, end_column)
        return Source(file=file, function=code.co_qualname, line=line, column=column, end_line=end_line, end_column=end_column, text=text)


def span(lines: list[str], line: int, column: int, end_line: int, end_column: int) -> str:
    """Text of a span; lines count from 1, columns are UTF-8 byte offsets as in `ast` and `co_positions()`."""
    cut = [x.encode() for x in lines[line - 1 : end_line]]
    if not cut:
        return ""
    cut[-1] = cut[-1][:end_column]  # before the start is cut: on one line both offsets count from its beginning
    cut[0] = cut[0][column:]
    return b"".join(cut).decode(errors="replace")


def is_modeling_file(filename: str) -> bool:
    """Whether a file is the model's own code: not torch, not graphalign, not the standard library, not other glue."""
    if filename.startswith("<"):  # <string>, <frozen ...>, generated code
        return False
    path = Path(filename).resolve()
    if path.is_relative_to(_PACKAGE_ROOT):
        return path == _PACKAGE_ROOT / "logprobs.py"  # stands in for the trainer's own
    parts = path.parts
    for i, part in enumerate(parts[:-1]):
        if part in ("site-packages", "dist-packages"):
            return parts[i + 1].removesuffix(".py") not in GLUE
    # A virtual environment's site-packages lies inside the standard library's folder, so this comes second.
    return not path.is_relative_to(_STDLIB)


def relative_file(filename: str) -> str:
    """A file's path from its package's root, never absolute: `transformers/models/qwen3/modeling_qwen3.py`."""
    path = Path(filename).resolve()
    parts = path.parts
    for i in range(len(parts) - 1, 0, -1):
        if parts[i - 1] in ("site-packages", "dist-packages"):
            return "/".join(parts[i:])
    top = path.parent
    while (top / "__init__.py").exists() and top.parent != top:
        top = top.parent
    return path.relative_to(top).as_posix()


def file_digest(path: str) -> str:
    """SHA-256 of a file's content, `` if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def caller(depth: int) -> FrameType | None:
    """The frame `depth` calls outside the caller of this function."""
    return sys._getframe(depth + 1)
