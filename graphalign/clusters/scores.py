"""From tallies to scores: the plain score, its floor, the score without what sampling adds, an interval.

A finite sample of a uniform distribution does not score 0. With n independent positions E|φ̂(k)|² = 1/n (n unit vectors of random direction,
averaged), so sqrt(1/n) is the floor. But the values of one token are not independent: a norm multiplies all of them with
the same number. What sampling adds is therefore measured between tokens. With the tokens' sums s_t(k) and counts n_t,

    (|Σ s_t|² − Σ |s_t|²) / (N² − Σ n_t²),    N = Σ n_t,

is the mean of s_t·s̄_t' over pairs of different tokens: a U-statistic (Hoeffding 1948), unbiased for |φ(k)|² if tokens are independent
and alike. It can come out negative where |φ| is about 0. Its root is the corrected score; what it takes away from the plain one is the
floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphalign.clusters.positions import FREQUENCIES, Floats, Tally

RESAMPLES = 400
FEWEST = 4
"""Sequences below which no interval is given."""
SEED = 0


@dataclass(frozen=True)
class Score:
    """How unevenly the values of one location fall; medians over layers."""

    plain: float
    """sqrt(mean |φ̂(k)|²)."""
    corrected: float
    """Without what sampling adds; 0 where nothing is left."""
    floor: float
    """What sampling adds, as a score: tokens taken as independent."""
    floor_independent: float
    """sqrt(1/n): values taken as independent."""
    interval: tuple[float, float] | None
    """95 % bootstrap interval of the corrected score, over sequences."""
    layers: tuple[float, ...]
    """The corrected score of every layer."""


@dataclass(frozen=True)
class Sums:
    """What the scores of one location need: axes are (layer, sequence, frequency)."""

    sums: NDArray[np.complex128]
    squares: Floats
    n: Floats
    """Values, (layer, sequence)."""
    pairs: Floats

    @classmethod
    def of(cls, tallies: Sequence[Sequence[Tally | None]]) -> Sums:
        """Stack tallies, [layer][sequence]; None where a layer saw nothing of a sequence (an expert without tokens)."""
        shape = (len(tallies), len(tallies[0]) if tallies else 0)
        sums, squares = np.zeros((*shape, FREQUENCIES), dtype=np.complex128), np.zeros((*shape, FREQUENCIES))
        n, pairs = np.zeros(shape), np.zeros(shape)
        for i, row in enumerate(tallies):
            for j, tally in enumerate(row):
                if tally is not None:
                    sums[i, j], squares[i, j], n[i, j], pairs[i, j] = tally.sums, tally.squares, tally.n, tally.pairs
        return cls(sums, squares, n, pairs)


def corrected_power(s: Sums, weights: Floats | None = None) -> Floats:
    """The U-statistic above, averaged over frequencies, per layer; NaN where no pair of tokens is left.

    Args:
        s: the sums.
        weights: how often each sequence is drawn, [sequence]: pairs of a token with its own copies are left out.
    """
    w = np.ones(s.n.shape[1]) if weights is None else weights
    whole = np.abs(np.einsum("lsf,s->lf", s.sums, w)) ** 2 - np.einsum("lsf,s->lf", s.squares, w**2)
    pairs = (s.n @ w) ** 2 - s.pairs @ w**2
    return _ratio(whole.mean(axis=1), pairs)


def plain_power(s: Sums) -> Floats:
    """mean |φ̂(k)|² per layer; NaN without values."""
    n = s.n.sum(axis=1)
    power = (np.abs(s.sums.sum(axis=1)) ** 2).mean(axis=1)
    return _ratio(power, n**2)


def score(s: Sums) -> Score:
    """All scores of one location."""
    plain, corrected, n = plain_power(s), corrected_power(s), s.n.sum(axis=1)
    added = _median(plain - corrected)
    return Score(
        plain=_median(np.sqrt(plain)),
        corrected=_root(_median(corrected)),
        floor=_root(added),
        floor_independent=math.sqrt(1 / n[n > 0].min()) if (n > 0).any() else math.nan,
        interval=_interval(s),
        layers=tuple(_root(float(x)) for x in corrected),
    )


def _interval(s: Sums) -> tuple[float, float] | None:
    """Percentiles of the corrected score when sequences are drawn with replacement."""
    seen = s.n.sum(axis=0) > 0
    sequences = int(seen.sum())
    if sequences < FEWEST:
        return None
    rng = np.random.default_rng(SEED)
    draws = rng.multinomial(sequences, seen / sequences, size=RESAMPLES).astype(np.float64)
    found = [_root(_median(corrected_power(s, w))) for w in draws]
    low, high = np.nanpercentile(found, [2.5, 97.5])
    return float(low), float(high)


def _ratio(a: Floats, b: Floats) -> Floats:
    """a / b, NaN where b is 0."""
    out: Floats = np.divide(a, b, out=np.full(len(b), np.nan), where=b > 0)
    return out


def _median(x: Floats) -> float:
    x = x[~np.isnan(x)]
    return float(np.median(x)) if x.size else math.nan


def _root(power: float) -> float:
    return math.sqrt(max(0.0, power)) if not math.isnan(power) else math.nan
