"""Which format a file is of: by its fields, never by its name alone. Exactly one, or an error that says what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from graphalign.dumps import server
from graphalign.dumps.adapters import Adapter, Formats, Refusal, has, look_up
from graphalign.dumps.files import Progress, Record, kind_of, load_torch, read_lines, read_parquet
from graphalign.dumps.rows import Refused, Row, rows_of
from graphalign.errors import BadInputError

OWN = "docs/dumps.md says how to describe a format in YAML (--adapter), and how to write rows of ours (graphalign.dumps.write_rows)"


@dataclass
class Source:
    """A file whose format is known."""

    path: Path
    name: str
    """Of the format."""
    title: str
    notes: tuple[str, ...]
    switch: str
    """What makes the trainer write log-probabilities that are missing."""
    rows: Callable[[Record], Iterator[Row | Refused]]
    records: Callable[[Progress | None], Iterator[Record]] = field(repr=False)
    has_training: bool = False
    """The format has the trainer's log-probabilities too."""


def recognise(path: Path, formats: Formats, *, wanted: str | None = None, answers: server.Server) -> Source:
    """The format of a file.

    Args:
        path: the file.
        formats: that are known.
        wanted: name of the format, if the user gave one: the fields are not looked at then.
        answers: pairs the answers of vLLM's server.

    Raises:
        BadInputError: none or several, or one that cannot be used; says what would help.
    """
    for refusal in formats.refusals:
        if refusal.suffixes and path.suffix in refusal.suffixes:
            raise _refused(path, refusal)
    kind = kind_of(path)
    content = load_torch(path) if kind == "torch" else None

    def records(progress: Progress | None = None) -> Iterator[Record]:
        return read_parquet(path, progress) if kind == "parquet" else read_lines(path, progress)

    if kind == "torch":
        sample = content
    else:
        first = next(islice(records(), 1), None)
        if first is None:
            raise BadInputError(
                f"{path} holds no record", where=str(path), hint="a run that was stopped may leave such a file; leave it out"
            )
        sample = first.value
    if wanted == server.NAME or (wanted is None and kind == "jsonl" and server.body_of(sample) is not None):
        return Source(path, server.NAME, server.TITLE, (), server.SWITCH, answers.rows, records)
    adapter = formats.adapter(wanted) if wanted else _only(path, sample, kind, formats)
    if adapter.kind != kind:
        raise BadInputError(f"{path} is a {kind} file, the format {adapter.name} is of {adapter.kind} files", where=str(path))
    if kind == "torch":
        values = _torch_records(content, adapter, path)

        def in_memory(progress: Progress | None = None) -> Iterator[Record]:
            for i, value in enumerate(values):
                yield Record(f"{path.name} sample {i}", value)
                if progress is not None:
                    progress((i + 1) / len(values))

        return _source(path, adapter, in_memory)
    return _source(path, adapter, records)


def _source(path: Path, a: Adapter, records: Callable[[Progress | None], Iterator[Record]]) -> Source:
    return Source(path, a.name, a.title, a.notes, a.switch, lambda r: rows_of(r, a, str(path)), records, a.training is not None)


def _only(path: Path, sample: Any, kind: str, formats: Formats) -> Adapter:
    fits = [
        a for a in formats.adapters if a.kind == kind and all(has(sample, n) for n in a.needs) and not any(has(sample, n) for n in a.absent)
    ]
    most = max((len(a.needs) for a in fits), default=0)
    best = [a for a in fits if len(a.needs) == most]
    if len(best) == 1:
        return best[0]
    found = _fields(sample)
    if best:
        names = ", ".join(a.name for a in best)
        raise BadInputError(f"{path} fits several formats: {names}", where=f"its fields: {found}", hint="choose one with --format")
    for refusal in formats.refusals:
        if refusal.needs and all(has(sample, n) for n in refusal.needs) and not any(has(sample, n) for n in refusal.absent):
            raise _refused(path, refusal)
    if message := look_up(sample, "error.message"):
        raise BadInputError(
            f"{path} begins with an error of a server", where=str(message)[:200], hint="give the answers of requests that succeeded"
        )
    near = max(
        (a for a in formats.adapters if a.kind == kind), key=lambda a: sum(has(sample, n) for n in a.needs) / len(a.needs), default=None
    )
    hint = OWN
    if near is not None and 2 * sum(has(sample, n) for n in near.needs) >= len(near.needs):
        lacking = ", ".join(n for n in near.needs if not has(sample, n)) or f"it has {', '.join(n for n in near.absent if has(sample, n))}"
        hint = f"nearest: {near.title}, which has {lacking} too ({near.switch})\n{OWN}"
    raise BadInputError(f"{path} is of no format that is known", where=f"its fields: {found}", hint=hint)


def _refused(path: Path, r: Refusal) -> BadInputError:
    return BadInputError(f"{path} cannot be used: {r.title}", where=r.why, hint=r.switch)


def _fields(sample: Any) -> str:
    if not isinstance(sample, dict):
        return f"none: it is a {type(sample).__name__}"
    names = [str(k) for k in sample]
    for key in ("samples", "rollout_data", "turns"):
        inner = sample.get(key)
        inner = inner[0] if isinstance(inner, list) and inner else inner
        if isinstance(inner, dict):
            names = [n for n in names if n != key] + [f"{key}: {{{', '.join(map(str, inner))}}}"]
    return ", ".join(names)[:600] or "none"


def _torch_records(content: Any, a: Adapter, path: Path) -> list[Any]:
    found = look_up(content, a.records) if a.records else content
    if a.by_column and isinstance(found, dict):
        lead = look_up(found, a.response_length or a.inference.field)
        count = len(lead) if hasattr(lead, "__len__") else 0
        columns = {k: v for k, v in found.items() if hasattr(v, "__len__") and not isinstance(v, str | dict) and len(v) == count}
        return [{k: v[i] for k, v in columns.items()} for i in range(count)]
    if not isinstance(found, list):
        raise BadInputError(f"{path} has no list of samples", where=a.records, hint=f"the format {a.name} has one; is the file whole?")
    return found
