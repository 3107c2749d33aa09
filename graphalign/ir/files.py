"""Reading and writing the JSON files between stages.

Captures come from other people's machines: sizes are bounded, nothing is unpickled or evaluated,
and every problem becomes a `CaptureFileError` that names the file.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from graphalign.errors import BadInputError, CaptureFileError
from graphalign.ir.collector import paused

MAX_BYTES = 2 << 30
"""Most bytes a decompressed capture may have."""
MAX_DEPTH = 64
"""Deepest nesting of lists and objects a capture may have."""
_QUOTE = ord('"')
_OPEN = [ord(c) for c in "[{"]
_CLOSE = [ord(c) for c in "]}"]
_CHUNK = 1 << 22
"""Bytes whose nesting is counted at once."""

Model = TypeVar("Model", bound=BaseModel)


def write_json(path: str | os.PathLike[str], model: BaseModel, *, indent: int | None = None) -> None:
    """Write `model` to `path` (gzip if it ends in .gz), atomically: no partial file under the final name.

    Raises:
        BadInputError: the folder cannot be written or the disk is full.
    """
    data = model.model_dump_json(indent=indent, exclude_defaults=False).encode()
    write_bytes(path, gzip.compress(data, 6, mtime=0) if str(path).endswith(".gz") else data)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` atomically (temporary file in the same folder, then rename)."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "wb") as f:
                f.write(data)
            os.chmod(tmp, 0o644)
            os.replace(tmp, path)
        except BaseException:
            os.unlink(tmp)
            raise
    except OSError as e:
        raise BadInputError(
            f"cannot write {path}: {e.strerror or e}", where=str(path), hint="give a folder you may write to, with room on its disk"
        ) from None


@paused()
def read_json(path: str | os.PathLike[str], model: type[Model], *, kind: str) -> Model:
    """Read and validate a file written by `write_json`.

    Args:
        path: the file.
        model: the pydantic model it must be.
        kind: what the file is, in words, for messages ("inference capture").

    Raises:
        CaptureFileError: unreadable, truncated, not JSON, too large, too deep, or not of this kind.
    """
    raw = load_raw(path, kind=kind)
    _refuse_other_kind(raw, model, path, kind)
    _refuse_newer(raw, model, path, kind)
    try:
        return model.model_validate(raw)
    except ValidationError as e:
        first = e.errors()[0]
        at = ".".join(str(x) for x in first["loc"][:8])
        raise CaptureFileError(
            f"{path} is not a valid {kind}: {first['msg']}",
            where=f"at {at or 'the top level'} ({e.error_count()} problem(s))",
            hint="capture it again with this version of graphalign",
        ) from None


KINDS = {
    "graphalign.inference": "an inference capture",
    "graphalign.training": "a training capture",
    "graphalign.sites": "a sites file",
    "graphalign.patch": "a patch spec",
    "graphalign.drift": "what `drift --format json` printed",
}
"""What a file's `format` says, in words."""


def _refuse_other_kind(raw: object, model: type[BaseModel], path: str | os.PathLike[str], kind: str) -> None:
    """Name a file of another kind for what it is: captures get swapped."""
    wanted = getattr(model.model_fields.get("format"), "default", None)
    found = raw.get("format") if isinstance(raw, dict) else None
    if isinstance(found, str) and found in KINDS and wanted in KINDS and found != wanted:
        raise CaptureFileError(
            f"{path} is not a valid {kind}: it is {KINDS[found]}",
            where=f"its `format` is {found}",
            hint=f"give the {kind} here" + ("; the inference capture comes first" if "capture" in f"{kind}, {KINDS[found]}" else ""),
        )


def _refuse_newer(raw: object, model: type[BaseModel], path: str | os.PathLike[str], kind: str) -> None:
    """Name a file that a later graphalign wrote: capturing it again would not help."""
    known = getattr(model.model_fields.get("version"), "default", None)
    found = raw.get("version") if isinstance(raw, dict) else None
    if type(known) is int and type(found) is int and found > known:
        raise CaptureFileError(
            f"{path} is a {kind} of format version {found}; this graphalign reads up to {known}", where=str(path), hint="upgrade graphalign"
        )


def load_raw(path: str | os.PathLike[str], *, kind: str) -> object:
    """The parsed JSON of a file, bounded in size and depth."""
    try:
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            d = zlib.decompressobj(31)
            data = d.decompress(data, MAX_BYTES)
            if d.unconsumed_tail:
                raise CaptureFileError(f"{path} holds more than {MAX_BYTES >> 20} MiB", where=str(path))
            if not d.eof:
                raise CaptureFileError(f"{path} is truncated", where=str(path), hint="copy or capture it again")
        text = data.decode()
    except OSError as e:
        raise CaptureFileError(f"cannot read {kind} {path}: {e.strerror or e}", where=str(path)) from None
    except (zlib.error, UnicodeDecodeError) as e:
        raise CaptureFileError(f"{path} is damaged: {e}", where=str(path), hint="copy or capture it again") from None
    _check_depth(text, path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise CaptureFileError(f"{path} is not JSON: {e}", where=str(path), hint=f"give a {kind}, as graphalign writes it") from None


def _check_depth(text: str, path: object) -> None:
    """Refuse deep nesting before the parser, which recurses, sees it. What is no JSON is counted too, and left to the parser to refuse."""
    if text.count("[") + text.count("{") < MAX_DEPTH:
        return
    data = np.frombuffer(text.replace("\\\\", "").replace('\\"', "").encode(), np.uint8)
    depth, inside = 0, False
    for start in range(0, data.size, _CHUNK):
        part = data[start : start + _CHUNK]
        quotes = np.logical_xor(np.cumsum(part == _QUOTE) % 2 == 1, inside)  # within a string, its closing quote not included
        opened = np.isin(part, _OPEN).astype(np.int64) - np.isin(part, _CLOSE)
        levels = depth + np.cumsum(np.where(quotes, 0, opened))
        if int(levels.max()) > MAX_DEPTH:
            raise CaptureFileError(f"{path} is nested deeper than {MAX_DEPTH}", where=str(path), hint="no file of graphalign's is so deep")
        depth, inside = int(levels[-1]), bool(quotes[-1])
