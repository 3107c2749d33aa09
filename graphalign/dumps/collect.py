"""Reads rows and keeps what the statistics need: sums per response, and a sample of whole responses for what needs their tokens.

A dump may be larger than memory, so no more responses are kept than have `SAMPLE` positions (reservoir sampling over responses; Vitter,
"Random Sampling with a Reservoir", 1985, algorithm R, with a limit on positions instead of items).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graphalign.dumps.adapters import Formats
from graphalign.dumps.faults import fault_of
from graphalign.dumps.recognise import Source, recognise
from graphalign.dumps.rows import Array, Fault, Ids, Refused, Row
from graphalign.dumps.server import Server
from graphalign.gap.statistics import sequence_sums

SAMPLE: Final = 1 << 21
"""Positions, prompts included, of the responses that are kept."""
POSITIONS: Final = (0, 16, 64, 256, 1024, 4096)
"""Positions in the response at which parts begin."""
PROBABILITIES: Final = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99)
"""The engine's probabilities at which parts begin."""
CLIP: Final = 0.2
"""PPO's usual clip range: a token's ratio p/q outside of 1 ± this."""
EXAMPLES: Final = 3
SHORTEST: Final = 8
"""Tokens from which two equal responses in different files are taken for one."""


@dataclass(frozen=True)
class Kept:
    """One response of the sample, only the tokens that count."""

    where: str
    step: str
    inference: Array
    training: Array | None
    entropy: Array | None
    prefill: Array | None
    row: Row


@dataclass
class LeftOut:
    """Rows with one fault."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class File:
    """One file that was read."""

    path: Path
    format: str
    title: str
    rows: int = 0
    used: int = 0
    tokens: int = 0


@dataclass
class Collection:
    """Everything that was read."""

    files: list[File] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    switches: dict[str, None] = field(default_factory=dict)
    faults: dict[Fault, LeftOut] = field(default_factory=dict)
    empty: int = 0
    """Rows without a token that counts: truncated, filtered, or all of it written by tools."""
    repeated: int = 0
    """Rows that another file has too, with the same tokens and numbers: ranks that share data, or a file given twice."""
    seen: dict[bytes, int] = field(default_factory=dict)
    """Digest of a row to the file that had it first."""
    rows: int = 0
    with_training: int = 0
    without_training: int = 0
    steps: list[str] = field(default_factory=list)
    """Per row that is compared."""
    sums: list[Array] = field(default_factory=list)
    """Per row that is compared: `sequence_sums` of d, `[5]`."""
    positions: list[Array] = field(default_factory=list)
    """The same by part of the response, `[parts, 5]`."""
    probabilities: list[Array] = field(default_factory=list)
    """The same by the engine's probability, `[parts, 5]`."""
    moments: list[Array] = field(default_factory=list)
    """Per row: see `_moments`."""
    entropies: list[Array] = field(default_factory=list)
    """Per row with entropies: tokens, sum of −log p, sum of the entropy."""
    largest: dict[tuple[str, int], float] = field(default_factory=dict)
    """Largest |d| of a part; ("all", 0) of everything."""
    largest_step: dict[str, float] = field(default_factory=dict)
    largest_probability: float = 0.0
    """Largest |exp log q − exp log p|."""
    kept: list[Kept] = field(default_factory=list)
    answers: Server = field(default_factory=Server)
    seen_tokens: int = 0

    @property
    def left_out(self) -> int:
        """Rows with a fault, those that the trainer marks as unusable excepted."""
        return sum(x.count for f, x in self.faults.items() if f is not Fault.UNUSABLE)

    @property
    def tokens(self) -> int:
        return int(sum(s[0] for s in self.sums))


def collect(
    paths: list[Path],
    formats: Formats,
    *,
    wanted: str | None = None,
    step: str | None = None,
    limit: int | None = None,
    progress: Callable[[str, float | None], None],
) -> Collection:
    """Read files.

    Args:
        paths: of one run, in any formats.
        formats: that are known.
        wanted: name of the format, if the user gave one.
        step: read rows of this training step only.
        limit: take the first so many rows that can be used.
        progress: called with the stage and the fraction done.

    Raises:
        BadInputError: a file that cannot be read or is of no known format.
    """
    out = Collection()
    reservoir = _Reservoir()
    for path in paths:
        if limit is not None and reservoir.offered >= limit:
            break
        source = recognise(path, formats, wanted=wanted, answers=out.answers)
        _read(source, out, reservoir, step, limit, lambda f, name=path.name: progress(f"read {name}", f))  # type: ignore[misc]
    out.kept = [k if k.prefill is not None else _paired(k, out.answers) for k in reservoir.in_order()]
    return out


def _read(
    source: Source, out: Collection, reservoir: _Reservoir, step: str | None, limit: int | None, say: Callable[[float], None]
) -> None:
    file = File(source.path, source.name, source.title)
    out.files.append(file)
    out.notes.update(dict.fromkeys(source.notes))
    if source.switch:
        out.switches[source.switch] = None
    say(0.0)
    for record in source.records(say):
        for row in source.rows(record):
            if isinstance(row, Row) and step is not None and row.step != step:
                continue
            file.rows += 1
            out.rows += 1
            if isinstance(row, Refused):
                _leave_out(out, row.fault, f"{row.where}: {row.detail}")
            elif not row.keep.any():
                out.empty += 1
            elif (found := fault_of(row)) is not None:
                _leave_out(out, found[0], f"{row.where}: {found[1]}")
            elif _seen(out, row, len(out.files)):
                out.repeated += 1
            else:
                _add(out, reservoir, row)
                file.used += 1
                file.tokens += int(row.keep.sum())
                if limit is not None and reservoir.offered >= limit:
                    return


def _seen(out: Collection, row: Row, file: int) -> bool:
    """Whether another file has this row. Short responses come again by themselves, and equal ones in one file are samples of one prompt."""
    if row.keep.sum() < SHORTEST:
        return False
    digest = hashlib.blake2b(digest_size=16)
    for x in (row.tokens, row.inference[row.keep], None if row.training is None else row.training[row.keep]):
        digest.update(b"-" if x is None else np.ascontiguousarray(x).tobytes())
    return out.seen.setdefault(digest.digest(), file) != file


def _leave_out(out: Collection, fault: Fault, example: str) -> None:
    entry = out.faults.setdefault(fault, LeftOut())
    entry.count += 1
    if len(entry.examples) < EXAMPLES:
        entry.examples.append(example)


def _add(out: Collection, reservoir: _Reservoir, row: Row) -> None:
    q = row.inference[row.keep]
    p = None if row.training is None else row.training[row.keep]
    h = None if row.entropy is None else row.entropy[row.keep]
    prefill = None if row.prefill is None else row.prefill[row.keep]
    reservoir.offer(Kept(row.where, row.step, q, p, h, prefill, row))
    out.seen_tokens += len(q)
    if p is None:
        out.without_training += 1
        return
    out.with_training += 1
    d = q - p
    out.steps.append(row.step)
    out.sums.append(sequence_sums([d])[0])
    at = np.flatnonzero(row.keep)
    out.positions.append(_by_part(out, "position", d, np.searchsorted(POSITIONS, at - at[0], "right") - 1, len(POSITIONS)))
    out.probabilities.append(_by_part(out, "probability", d, np.searchsorted(PROBABILITIES, np.exp(q), "right") - 1, len(PROBABILITIES)))
    out.moments.append(_moments(q, p))
    largest = float(np.abs(d).max())
    out.largest["all", 0] = max(out.largest.get(("all", 0), 0.0), largest)
    out.largest_step[row.step] = max(out.largest_step.get(row.step, 0.0), largest)
    out.largest_probability = max(out.largest_probability, float(np.abs(np.exp(q) - np.exp(p)).max()))
    if h is not None and np.isfinite(h).all():
        out.entropies.append(np.array([len(p), -p.sum(), h.sum()]))


def _by_part(out: Collection, name: str, d: Array, part: NDArray[np.intp], parts: int) -> Array:
    found = np.zeros((parts, 5))
    for i in np.unique(part):
        x = d[part == i]
        found[i] = sequence_sums([x])[0]
        out.largest[name, int(i)] = max(out.largest.get((name, int(i)), 0.0), float(np.abs(x).max()))
    return found


MOMENTS: Final = ("tokens", "exp |d|", "outside", "difference", "difference²", "q", "p", "q²", "p²", "qp")
"""Columns of the sums from which the figures that trainers log follow; q and p are probabilities."""


def _moments(log_q: Array, log_p: Array) -> Array:
    q, p = np.exp(log_q), np.exp(log_p)
    d, x = log_q - log_p, np.abs(q - p)
    ratio = np.exp(np.minimum(-d, 50.0))
    columns = (np.exp(np.minimum(np.abs(d), 50.0)), np.abs(ratio - 1) > CLIP, x, x * x, q, p, q * q, p * p, q * p)
    return np.array([len(d), *(float(c.sum()) for c in columns)])


class _Reservoir:
    """Whole responses, each kept with equal probability, within a number of positions."""

    def __init__(self, positions: int = SAMPLE) -> None:
        self.rng, self.positions, self.held, self.offered = np.random.default_rng(0), positions, 0, 0
        self.items: list[tuple[int, Kept]] = []

    def offer(self, item: Kept) -> None:
        index, size = self.offered, _size(item)
        self.offered += 1
        if self.held + size <= self.positions or not self.items:
            self.items.append((index, item))
            self.held += size
            return
        slot = int(self.rng.integers(0, index + 1))
        if slot < len(self.items):
            self.held += size - _size(self.items[slot][1])
            self.items[slot] = (index, item)

    def in_order(self) -> list[Kept]:
        return [k for _, k in sorted(self.items, key=lambda x: x[0])]


def _size(item: Kept) -> int:
    return len(item.row.keep) if item.row.tokens is None else len(item.row.tokens)


def _paired(k: Kept, answers: Server) -> Kept:
    row = answers.pair(k.row)
    if row is k.row or row.prefill is None:
        return k
    return Kept(k.where, k.step, k.inference, k.training, k.entropy, row.prefill[row.keep], row)


def tokens_of(kept: list[Kept]) -> list[tuple[Ids, Ids]]:
    """Prompt and response of every row that has tokens; the response begins with the first token that counts."""
    out = []
    for k in kept:
        assert k.row.tokens is not None
        begin = k.row.first + int(np.flatnonzero(k.row.keep)[0])
        out.append((k.row.tokens[:begin], k.row.tokens[begin:]))
    return out
