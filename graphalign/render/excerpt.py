"""Source lines around an end: from the installed package if it is the file that was captured, else the recorded expression."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from graphalign.render.words import clean
from graphalign.sites.report import End

AROUND = 2
"""Lines shown before and after."""


@dataclass(frozen=True)
class Line:
    """A source line; `marked` holds the expression's columns, empty if it does not touch the line."""

    number: int
    text: str
    marked: tuple[int, int] | None = None


class Sources:
    """Reads modeling files of installed packages, once each. Nothing is imported.

    Args:
        digests: file, from its package's root, to the SHA-256 of what was captured (`Report.model["sources"]`).
    """

    def __init__(self, digests: object) -> None:
        self.digests = digests if isinstance(digests, dict) else {}
        self.files: dict[str, list[str] | None] = {}

    def around(self, end: End) -> tuple[Line, ...]:
        """Lines of an end's expression with some around it; empty if the end has no source."""
        if not end.file:
            return ()
        lines = self._read(end.file)
        if lines is None or not 1 <= end.line <= end.end_line <= len(lines):
            texts = clean(end.text).splitlines() or [""]
            return tuple(Line(end.line + n, t, (0, len(t))) for n, t in enumerate(texts[:12]))
        first, last = max(1, end.line - AROUND), min(len(lines), end.end_line + AROUND)
        return tuple(Line(n, clean(lines[n - 1], 400), _columns(end, n, lines[n - 1])) for n in range(first, last + 1))

    def installed(self, end: End) -> bool:
        """Whether the lines come from the installed file."""
        return bool(end.file) and self._read(end.file) is not None

    def _read(self, name: str) -> list[str] | None:
        if name not in self.files:
            self.files[name] = self._load(name)
        return self.files[name]

    def _load(self, name: str) -> list[str] | None:
        parts = Path(name).parts
        wanted = self.digests.get(name)
        if not wanted or ".." in parts or Path(name).is_absolute() or not parts or not parts[0].isidentifier():
            return None  # names come from captures: only files below a package's folder are read
        try:
            spec = importlib.util.find_spec(parts[0])
            for root in (spec.submodule_search_locations or ()) if spec else ():
                data = Path(root, *parts[1:]).read_bytes()
                if hashlib.sha256(data).hexdigest() == wanted:
                    return data.decode().splitlines()
        except (OSError, ValueError, ImportError):
            return None
        return None


def _columns(end: End, number: int, text: str) -> tuple[int, int] | None:
    if not end.line <= number <= end.end_line:
        return None
    start = _character(text, end.column) if number == end.line else len(text) - len(text.lstrip())
    stop = _character(text, end.end_column) if number == end.end_line else len(text)
    return (start, stop) if start < stop else None


def _character(text: str, column: int) -> int:
    """Columns are counted in UTF-8 bytes (`co_positions`)."""
    return len(text.encode()[:column].decode(errors="ignore"))
