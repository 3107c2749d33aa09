"""Records of a dump, one after the other, from files that may be far larger than memory. Nothing is unpickled or evaluated."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from graphalign.errors import BadInputError

Progress = Callable[[float], None]
"""Called with the fraction of the file that has been read."""
LONGEST_LINE = 1 << 30
"""Most characters of one line of JSON."""
READABLE = (".jsonl", ".ndjson", ".json", ".pt", ".pth", ".parquet")
"""Endings of files that are looked at when a folder is given; .jsonl and .json also with .gz."""


@dataclass(frozen=True)
class Record:
    """One record as it was read."""

    where: str
    """File and place in it, in words."""
    value: Any


def kind_of(path: Path) -> str:
    """`torch`, `parquet` or `jsonl`, by the first bytes of the file and then by its name.

    Raises:
        BadInputError: it cannot be read, is empty or is a folder.
    """
    try:
        with path.open("rb") as f:
            head = f.read(8)
    except OSError as e:
        raise BadInputError(f"cannot read {path}: {e.strerror or e}", where=str(path), hint="give a file that a trainer wrote") from None
    if not head:
        raise BadInputError(f"{path} is empty", where=str(path), hint="a trainer that was stopped may leave an empty file; leave it out")
    if head[:4] == b"PAR1":
        return "parquet"
    if head[:4] == b"PK\x03\x04" or path.suffix in (".pt", ".pth"):
        return "torch"
    return "jsonl"


def expand(paths: list[Path]) -> list[Path]:
    """Files in order: those given, and of folders everything below that may be a dump.

    Raises:
        BadInputError: a path that is not there, or a folder without such a file.
    """
    out: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and _readable(p))
            if not found:
                endings = ", ".join(READABLE)
                raise BadInputError(f"no dump in the folder {path}", where=f"looked for {endings}", hint="give the files themselves")
            out += found
        elif path.exists():
            out.append(path)
        else:
            raise BadInputError(f"no such file: {path}", where="--dump", hint="give files that a trainer wrote, or their folder")
    return list(dict.fromkeys(out))


def _readable(path: Path) -> bool:
    return path.suffix in READABLE or (path.suffix == ".gz" and path.with_suffix("").suffix in READABLE[:3])


def read_lines(path: Path, progress: Progress | None = None) -> Iterator[Record]:
    """Every line of a JSON-lines file, or every element of one JSON list, or one indented object; gzip is undone.

    Raises:
        BadInputError: not JSON, cut short, damaged; names the line.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            last, number = None, 0
            for number, line in enumerate(_bounded(stream, path), 1):
                if not (line := line.strip()):
                    continue
                if last is None and line.startswith(b"["):
                    yield from _whole(line + stream.read(LONGEST_LINE), path)
                    return
                if last is None and line == b"{":  # one object, indented
                    yield from _whole(line + stream.read(LONGEST_LINE), path)
                    return
                last = line
                yield Record(f"{path.name} line {number}", _parse(line, path, number))
                if progress is not None and size:
                    progress(min(raw.tell() / size, 1.0))
    except (OSError, EOFError, zlib.error) as e:
        raise BadInputError(f"{path} is damaged: {e}", where=str(path), hint="copy it again; gzip -t FILE checks it") from None


def _bounded(stream: IO[bytes], path: Path) -> Iterator[bytes]:
    while line := stream.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise BadInputError(f"{path} has a line of over {LONGEST_LINE >> 20} MiB", where=str(path), hint="it is no JSON-lines file")
        yield line


def _parse(line: bytes, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as e:
        if number == 1 and b"\x80" in line[:2]:
            raise _pickled(path) from None
        excerpt = line[:60].decode(errors="replace")
        raise BadInputError(
            f"{path} is not JSON lines: {str(e).splitlines()[0]}",
            where=f"line {number}: {excerpt}…",
            hint="give a file that a trainer wrote; a last line that is cut short is of a run that was stopped: remove it",
        ) from None


def _whole(text: bytes, path: Path) -> Iterator[Record]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise BadInputError(f"{path} is not JSON: {str(e).splitlines()[0]}", where=str(path), hint="give JSON lines") from None
    for i, value in enumerate(found if isinstance(found, list) else [found]):
        yield Record(f"{path.name} element {i}", value)


def load_torch(path: Path) -> Any:
    """The content of a torch file, on the CPU, read by torch's unpickler that builds tensors and plain Python only.

    Raises:
        BadInputError: it holds anything else, or is no torch file.
    """
    import pickle

    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        reason = next((line.strip() for line in str(e).splitlines() if "GLOBAL" in line or "Unsupported" in line), str(e).splitlines()[0])
        raise BadInputError(
            f"{path} holds more than tensors and plain Python, and such a file can run anything when it is opened",
            where=reason[:300],
            hint="in the trainer's own environment open it yourself and call graphalign.dumps.write_rows (docs/dumps.md)",
        ) from None
    except (RuntimeError, OSError, EOFError, KeyError, ValueError) as e:
        raise BadInputError(
            f"{path} is no whole torch file: {str(e).splitlines()[0][:200]}",
            where=str(path),
            hint="copy it again; a stopped run leaves parts",
        ) from None


def read_parquet(path: Path, progress: Progress | None = None) -> Iterator[Record]:
    """Every row of a Parquet file, a row group at a time.

    Raises:
        BadInputError: pyarrow is not here, or it is no Parquet file.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise BadInputError("reading Parquet needs pyarrow", where=str(path), hint="pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            row = 0
            for group in range(file.num_row_groups):
                for value in file.read_row_group(group).to_pylist():
                    yield Record(f"{path.name} row {row}", value)
                    row += 1
                if progress is not None:
                    progress((group + 1) / file.num_row_groups)
    except (pyarrow.ArrowException, OSError) as e:
        raise BadInputError(
            f"{path} is no whole Parquet file: {str(e).splitlines()[0][:200]}", where=str(path), hint="copy it again"
        ) from None


def _pickled(path: Path) -> BadInputError:
    return BadInputError(
        f"{path} is a pickle, which can run anything when it is opened",
        where=str(path),
        hint="in the trainer's own environment open it yourself and call graphalign.dumps.write_rows (docs/dumps.md)",
    )
