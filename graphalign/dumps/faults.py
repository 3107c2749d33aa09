"""What is wrong with a row, seen in the row alone. Nothing is repaired: such a row is left out, counted and named."""

from __future__ import annotations

from typing import Final

import numpy as np

from graphalign.dumps.rows import Array, Fault, Kept, Row
from graphalign.gap.inputs import POSITIVE

SHORTEST: Final = 6
"""Tokens from which a shift is looked for in one row."""
APART: Final = 0.1
"""Mean |d| in nats from which it is looked for."""
CLOSER: Final = 0.1
"""A shift must reduce mean |d| to this share: by chance it hardly changes it."""
RUN: Final = 4
"""Zeros in a row on one side, where the other side is below `SURE` nats on average, which are no log-probabilities of certain tokens."""
SURE: Final = -0.1
TAIL: Final = 8
"""Zeros at the end on both sides, all of one token id, which are padding. Certain tokens have exact zeros too, but seldom so many alike."""


def fault_of(row: Row) -> tuple[Fault, str] | None:
    """The first thing that is wrong with a row, with details; None if nothing is.

    Args:
        row: with at least one token that counts.
    """
    if (moved := _mask_shift(row)) is not None:
        return Fault.MASK_SHIFTED, moved
    q = row.inference[row.keep]
    p = None if row.training is None else row.training[row.keep]
    if (zeros := _zeros(row, q, p)) is not None:
        return Fault.ZEROS, zeros
    for name, x in (("inference", q), ("training", p)):
        if x is not None and (found := _value(name, x, row.keep)) is not None:
            return found
    if p is not None and (shift := _shift(q, p)) is not None:
        return Fault.SHIFTED, shift
    return None


def _value(name: str, x: Array, keep: Kept) -> tuple[Fault, str] | None:
    for fault, bad in (
        (Fault.UNDEFINED, np.isnan(x)),
        (Fault.FILTERED, np.isneginf(x)),
        (Fault.POSITIVE, x > POSITIVE),
    ):
        if bad.any():
            t = int(np.flatnonzero(bad)[0])
            return fault, f"{name}, position {np.flatnonzero(keep)[t]}: {x[t]:.6g} ({int(bad.sum())} of {x.size} tokens that count)"
    return None


def _shift(q: Array, p: Array) -> str | None:
    if len(q) < SHORTEST:
        return None
    apart = float(np.abs(q - p).mean())
    if apart < APART:
        return None
    for word, moved in (("later", np.abs(q[:-1] - p[1:])), ("earlier", np.abs(q[1:] - p[:-1]))):
        if moved.mean() < CLOSER * apart:
            return f"mean |d| {apart:.3g}, and {moved.mean():.3g} with training one token {word}"
    return None


def _mask_shift(row: Row) -> str | None:
    """Zeros stand for tokens that the engine did not sample, so its column shows where the response is."""
    at = np.flatnonzero(row.keep)
    if len(at) < SHORTEST or row.training is None:
        return None
    q, p, first, last = row.inference, row.training, int(at[0]), int(at[-1])

    def filled(i: int) -> bool:
        return 0 <= i < len(q) and bool(np.isfinite(q[i])) and q[i] != 0

    def empty(i: int) -> bool:
        return 0 <= i < len(q) and q[i] == 0 and p[i] < -0.01  # a token that both sides are sure of has a 0 too

    if empty(first) and filled(first + 1) and filled(last + 1):
        return f"position {first} counts, where inference has 0, and {last + 1} does not, where it has {q[last + 1]:.4g}"
    if filled(first - 1) and not filled(first - 2) and empty(last) and filled(last - 1):
        return f"position {first - 1} does not count, where inference has {q[first - 1]:.4g}, and {last} does, where it has 0"
    return None


def _zeros(row: Row, q: Array, p: Array | None) -> str | None:
    for name, x, other in (("inference", q, p), ("training", p, q)):
        if x is None or other is None:
            continue
        for start, stop in runs(x == 0):
            if stop - start >= RUN and other[start:stop].mean() < SURE:
                return f"{name} has {stop - start} zeros, from token {start} of those that count; the other side has {other[start]:.4g}, …"
    both = (q == 0) if p is None else (q == 0) & (p == 0)
    tail = len(both) - (int(np.flatnonzero(~both)[-1]) + 1 if (~both).any() else 0)
    if tail >= TAIL:
        ids = None if row.tokens is None else row.tokens[-len(row.keep) :][row.keep][-tail:]
        if ids is None or len(set(ids.tolist())) == 1:
            return f"the last {tail} of {len(both)} tokens that count are zeros" + (" on both sides" if p is not None else "")
    return None


def runs(flags: Kept) -> list[tuple[int, int]]:
    """Start and end of every run of true flags."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
