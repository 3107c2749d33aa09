"""Positions against exact rational arithmetic, tallies and scores against distributions whose coefficients are known."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphalign.clusters.positions import BINS, FREQUENCIES, LARGEST, SHOWN_BINS, Tally, positions, rounded
from graphalign.clusters.scores import Score, Sums, score

ORDERED = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
NUMBERS = sorted({float(x) for x in ORDERED[torch.isfinite(ORDERED)]})
"""Every finite BF16 number, ascending."""
EDGES = (
    0.0, -0.0, 1.0, -1.0, 2.0**-126, -(2.0**-126), 2.0**-133, -(2.0**-133), 2.0**-134, 1.5 * 2.0**-133, 2.0**-200, -(2.0**-1074), LARGEST,
    -LARGEST, 1 + 2.0**-8, 1 + 2.0**-45, 1 - 2.0**-45, -1 - 2.0**-52, 2 - 2.0**-52, 2.0**-126 * (1 - 2.0**-52), 3.3, -3.3, 1e38, 1e-40,
)  # fmt: skip


def neighbours(x: float) -> tuple[Fraction, Fraction]:
    """The BF16 numbers around x by search, and nothing else."""
    import bisect

    at = bisect.bisect_right(NUMBERS, x) - 1
    if NUMBERS[at] == x and at + 1 == len(NUMBERS):
        return Fraction(x), Fraction(x) + 1
    return Fraction(NUMBERS[at]), Fraction(NUMBERS[at + 1])


def check(x: float) -> None:
    (u,), (valid,) = positions(np.array([x]))
    assert valid
    low, high = neighbours(x)
    exact = (Fraction(x) - low) / (high - low)
    assert abs(Fraction(float(u)) - exact) <= Fraction(1, 2**52)
    assert (u == 0) == (exact == 0)


@pytest.mark.parametrize("x", EDGES)
def test_positions_at_the_edges_of_the_format(x: float) -> None:
    check(x)


@settings(deadline=None, max_examples=500)
@given(st.floats(min_value=-LARGEST, max_value=LARGEST))
def test_positions_are_those_of_exact_arithmetic(x: float) -> None:
    check(x)


@settings(deadline=None)
@given(st.sampled_from(NUMBERS[1:-1]), st.floats(min_value=0, max_value=1, exclude_max=True))
def test_positions_between_two_neighbours(low: float, share: float) -> None:
    high = NUMBERS[NUMBERS.index(low) + 1]
    check(low + (high - low) * share)


def test_what_is_no_finite_bf16_number_has_no_position() -> None:
    _, valid = positions(np.array([math.nan, math.inf, -math.inf, np.nextafter(LARGEST, math.inf), 1e300, LARGEST]))
    assert valid.tolist() == [False, False, False, False, False, True]
    tally = Tally()
    tally.add(np.array([[math.nan, 1.0], [1e300, 1.5]]))
    assert (tally.n, tally.outside, tally.exact) == (2, 2, 2)


@settings(deadline=None)
@given(st.floats(allow_nan=False))
def test_rounding_is_pytorchs(x: float) -> None:
    with np.errstate(over="ignore"):
        mine = rounded(np.array([x]))
    assert mine.view(np.int16)[0] == torch.tensor([x], dtype=torch.float64).to(torch.bfloat16).view(torch.int16)[0]


def at(u: np.ndarray, tokens: int = 100) -> Score:
    """Scores of values with given positions, as four sequences."""
    tallies: list[Tally | None] = []
    for part in np.split(u.reshape(-1), 4):
        tally = Tally()
        tally.add((1 + part / 128).reshape(tokens, -1))  # between 1 and the next number, 1/128 away
        tallies.append(tally)
    return score(Sums.of([tallies]))


def test_uniform_positions_score_the_floor_and_nothing_above_it() -> None:
    n = 400_000
    found = at(np.random.default_rng(1).random(n))
    assert found.floor_independent == pytest.approx(math.sqrt(1 / n))
    assert found.plain == pytest.approx(found.floor_independent, rel=0.5)
    assert found.floor == pytest.approx(found.floor_independent, rel=0.1)
    assert found.corrected < 1.5 * found.floor
    assert found.interval is not None
    assert found.interval[0] == 0


def test_bf16_numbers_score_one() -> None:
    found = at(np.zeros(40_000))
    assert (found.plain, found.corrected) == (pytest.approx(1), pytest.approx(1))


def test_ties_alternate_and_score_one() -> None:
    tally = Tally()
    tally.add(np.full((10, 50), 1 + 1 / 256))
    assert (tally.ties, tally.exact, tally.n) == (500, 0, 500)
    assert tally.sums.real == pytest.approx([500 * (-1) ** k for k in range(1, FREQUENCIES + 1)])


def test_an_exact_share_scores_itself() -> None:
    """φ of p·δ(0) + (1 − p)·uniform is p at every frequency."""
    u = np.random.default_rng(2).random(400_000)
    u[::10] = 0
    assert at(u).corrected == pytest.approx(0.1, rel=0.01)


def test_a_triangular_distribution() -> None:
    """The sum of two uniform variables on [0, 1/2) has |φ(k)| = sinc²(k/2): (2/πk)² for odd k, 0 for even k."""
    rng = np.random.default_rng(3)
    u = (rng.random(400_000) + rng.random(400_000)) / 2
    expected = math.sqrt(sum((2 / (math.pi * k)) ** 4 for k in range(1, FREQUENCIES + 1, 2)) / FREQUENCIES)
    assert at(u).corrected == pytest.approx(expected, rel=0.01)


def test_products_of_bf16_numbers_keep_their_coefficients_exactly() -> None:
    rng = np.random.default_rng(4)
    u = rng.integers(0, 256, 5000) / 256
    tally = Tally()
    tally.add((1 + u / 128).reshape(50, 100))
    expected = [np.exp(2j * np.pi * k * u).sum() for k in range(1, FREQUENCIES + 1)]
    assert tally.sums == pytest.approx(expected, abs=1e-6)


def test_tokens_that_share_their_position_are_one_sample_each() -> None:
    """All values of a token alike, tokens uniform: the plain score is far above sqrt(1/n), the corrected one is not."""
    tokens = 400
    u = np.repeat(np.random.default_rng(5).random(4 * tokens), 100)
    found = at(u, tokens)
    assert found.plain > 5 * found.floor_independent
    assert found.floor == pytest.approx(math.sqrt(1 / (4 * tokens)), rel=0.1)
    assert found.corrected < found.floor
    assert found.interval is not None
    assert found.interval[0] == 0


def test_the_median_is_over_layers_and_missing_sequences_are_left_out() -> None:
    def tally(u: float) -> Tally:
        t = Tally()
        t.add(np.full((4, 3), 1 + u / 128))
        return t

    even = Tally()
    even.add(1 + np.tile(np.arange(BINS) / BINS, (4, 1)) / 128)
    found = score(Sums.of([[tally(0), None], [even, even], [tally(0.5), tally(0.5)]]))
    assert found.plain == pytest.approx(1)
    assert found.layers == pytest.approx((1, 0, 1), abs=1e-6)
    assert found.interval is None


def test_tallies_add_up_and_histograms_are_centred() -> None:
    rng = np.random.default_rng(6)
    x = rng.normal(size=(30, 70))
    whole, parts = Tally(), Tally()
    whole.add(x)
    for half in (x[:10], x[10:]):
        part = Tally()
        part.add(half)
        parts.merge(part)
    assert parts.counts.tolist() == whole.counts.tolist()
    assert parts.sums == pytest.approx(whole.sums)
    assert (parts.squares, parts.pairs) == (pytest.approx(whole.squares), whole.pairs)
    near = Tally()
    near.add(1 + np.array([[0.999, 0.0, 0.001]]) / 128)
    assert near.counts[0] == 3
    assert len(near.counts) == SHOWN_BINS
