"""The estimators against closed forms, and the intervals against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphalign.errors import GapInputError
from graphalign.gap.statistics import (
    Array,
    Estimate,
    compare,
    draws,
    estimate_of,
    from_sums,
    k3,
    resample,
    sequence_sums,
    summarise,
)


def split(x: Array, length: int) -> list[Array]:
    return [x[i : i + length] for i in range(0, len(x), length)]


def test_on_samples_of_two_categorical_distributions_mean_d_and_k3_are_their_kl() -> None:
    rng = np.random.default_rng(0)
    q = np.array([0.5, 0.3, 0.15, 0.05])
    p = np.array([0.4, 0.35, 0.15, 0.1])
    kl = float((q * np.log(q / p)).sum())
    drawn = rng.choice(4, size=200_000, p=q)
    found = summarise(split(np.log(q)[drawn], 100), split(np.log(p)[drawn], 100))
    assert found.tokens == 200_000
    assert found.sequences == 2000
    assert found.mean_d.low is not None
    assert found.mean_d.low < kl < found.mean_d.high  # type: ignore[operator]
    assert found.k3.low < kl < found.k3.high  # type: ignore[operator]
    assert found.k3.value == pytest.approx(kl, rel=0.02)
    assert found.equal_share.value == pytest.approx(0.15, abs=0.005)
    assert found.max_abs_d == pytest.approx(math.log(2))
    width = [e.high - e.low for e in (found.k3, found.mean_d)]  # type: ignore[operator]
    assert width[0] < width[1] / 2, "k3 is the less noisy of the two"


def test_for_normal_d_the_means_are_those_of_the_normal_distribution() -> None:
    # E exp(−d) = exp(−μ + σ²/2) and E|d| = σ √(2/π) for μ = 0.
    sigma = 0.3
    d = np.random.default_rng(1).normal(0, sigma, 400_000)
    found = summarise(split(d, 200), split(np.zeros_like(d), 200))
    assert found.k3.value == pytest.approx(math.exp(sigma**2 / 2) - 1, rel=0.01)
    assert found.mean_abs_d.value == pytest.approx(sigma * math.sqrt(2 / math.pi), rel=0.01)
    assert found.mean_d.value == pytest.approx(0, abs=0.003)


@given(st.floats(-20, 20))
def test_k3_is_accurate_where_its_terms_cancel(d: float) -> None:
    # For |d| < 0.1 from the alternating series with its remainder, else directly.
    exact = sum((-d) ** n / math.factorial(n) for n in range(2, 14)) if abs(d) < 0.1 else math.exp(-d) - 1 + d
    assert k3(np.array([d]))[0] == pytest.approx(exact, rel=1e-12, abs=0)
    assert k3(np.array([d]))[0] >= 0


def test_a_mean_weighs_tokens_not_sequences() -> None:
    found = summarise([np.array([1.0]), np.zeros(9)], [np.zeros(1), np.zeros(9)])
    assert found.mean_d.value == pytest.approx(0.1)
    assert found.equal_share.value == pytest.approx(0.9)


def test_intervals_over_sequences_cover_clustered_data_and_intervals_over_tokens_would_not() -> None:
    rng = np.random.default_rng(2)
    covered, naive, runs = 0, 0, 300
    for run in range(runs):
        # Each sequence of 50 tokens has an offset of its own: 80 % of the variance is between sequences.
        d = [rng.normal(0.1 + 0.2 * rng.normal(), 0.1, 50) for _ in range(40)]
        found = summarise(d, [np.zeros(50)] * 40, resamples=400, seed=run).mean_d
        assert found.low is not None
        covered += found.low <= 0.1 <= found.high  # type: ignore[operator]
        flat = np.concatenate(d)
        naive += abs(flat.mean() - 0.1) <= 1.96 * flat.std() / math.sqrt(flat.size)
    assert 0.90 < covered / runs <= 0.985
    assert naive / runs < 0.5


def test_the_bootstrap_gives_the_standard_error_of_a_mean_over_equal_sequences() -> None:
    rng = np.random.default_rng(3)
    d = [rng.normal(0, 1, 1) for _ in range(400)]
    found = summarise(d, [np.zeros(1)] * 400, resamples=4000).mean_d
    half = 1.96 * np.concatenate(d).std() / math.sqrt(400)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.05)  # type: ignore[operator]


def test_paired_differences_are_sharper_than_two_intervals() -> None:
    rng = np.random.default_rng(4)
    q = [rng.normal(-2, 1, 64) for _ in range(60)]
    shared = [rng.normal(0, 0.1 * (1 + 3 * rng.random()), 64) for _ in range(60)]
    first = [a + e for a, e in zip(q, shared, strict=True)]
    second = [a + 0.9 * e for a, e in zip(q, shared, strict=True)]
    found = compare(q, first, second)
    assert found.k3_relative is not None
    assert found.k3_relative.value == pytest.approx(0.81 - 1, abs=0.01)  # k3 ≈ d²/2
    assert found.k3_relative.excludes_zero
    a, b = summarise(q, first).k3, summarise(q, second).k3
    assert found.k3.value == pytest.approx(b.value - a.value)
    assert a.low < b.high  # type: ignore[operator]  # the two intervals overlap, the difference excludes 0
    assert found.k3.high < 0  # type: ignore[operator]
    nothing = compare(q, first, first)
    assert nothing.k3 == Estimate(value=0, low=0, high=0)


def test_a_perfect_first_variant_has_no_relative_change() -> None:
    q = [np.array([-1.0, -2.0]), np.array([-3.0])]
    assert compare(q, q, [x + 0.1 for x in q]).k3_relative is None


def test_one_seed_draws_the_same_sequences_whatever_the_columns() -> None:
    rng = np.random.default_rng(5)
    sums = rng.normal(size=(30, 3))
    both = resample(np.hstack([sums, sums]), resamples=50)
    assert np.array_equal(both[:, :3], both[:, 3:])
    assert np.allclose(resample(sums, resamples=50), both[:, :3])
    assert not np.allclose(resample(sums, resamples=50, seed=1), both[:, :3])


def test_strata_are_resampled_on_their_own() -> None:
    sums = np.array([[1.0, 10.0], [1.0, 10.0], [1.0, 0.0], [1.0, 0.0]])
    assert set(resample(sums, resamples=100, strata=[7, 7, 9, 9])[:, 1]) == {20.0}
    assert len(set(resample(sums, resamples=100)[:, 1])) > 1
    with pytest.raises(ValueError, match="2 strata for 4 sequences"):
        resample(sums, strata=[0, 1])


def test_pooling_seeds_is_the_statistics_of_their_sequences() -> None:
    rng = np.random.default_rng(6)
    runs = [[rng.normal(0, 0.1, 20) for _ in range(10)] for _ in range(3)]
    pooled = [x for run in runs for x in run]
    found = summarise(pooled, [np.zeros(20)] * 30, strata=[i for i in range(3) for _ in range(10)])
    assert found.sequences == 30
    assert found.k3.value == pytest.approx(np.mean([k3(x).mean() for x in pooled]))
    stacked = from_sums(np.vstack([sequence_sums(run) for run in runs]), max_abs_d=found.max_abs_d)
    assert stacked.k3.value == pytest.approx(found.k3.value)


def test_draws_give_the_estimate_that_summarise_gives() -> None:
    rng = np.random.default_rng(7)
    d = [rng.normal(0, 0.1, 20) for _ in range(10)]
    assert estimate_of(draws(sequence_sums(d), 3), 10) == summarise(d, [np.zeros(20)] * 10).k3


def test_one_sequence_has_values_but_no_interval() -> None:
    found = summarise([np.array([-1.0, -2.0])], [np.array([-1.1, -2.0])])
    assert found.k3.value > 0
    assert found.k3.low is None
    assert found.k3.reason == "one sequence: the spread between sequences is unknown"
    assert not found.k3.excludes_zero
    assert "no interval" in str(found)
    assert type(found).model_validate_json(found.model_dump_json()) == found


def test_sequences_without_tokens_do_not_count() -> None:
    q = [np.array([-1.0]), np.zeros(0), np.array([-2.0])]
    found = summarise(q, q, strata=[0, 1, 1])
    assert found.sequences == 2
    assert found.max_abs_d == 0
    assert found.k3 == Estimate(value=0, low=0, high=0)


@pytest.mark.parametrize(
    ("inference", "training", "message"),
    [
        ([], [], "there are no generated tokens in 0 sequences"),
        ([np.zeros(0)], [np.zeros(0)], "there are no generated tokens in 1 sequences"),
        ([np.zeros(2)], [np.zeros(3)], r"inference has log-probabilities of shape \(2,\), training of shape \(3,\)"),
        ([np.zeros(2)], [], "inference has 1 sequences, training 0"),
        ([np.array([-1.0, np.nan])], [np.zeros(2)], "a log-probability is not finite: inference nan, training 0.0"),
    ],
)
def test_what_cannot_be_summarised_is_an_error(inference: list[Array], training: list[Array], message: str) -> None:
    with pytest.raises(GapInputError, match=message):
        summarise(inference, training)


def test_thousands_of_sequences_are_quick() -> None:
    rng = np.random.default_rng(8)
    sums = rng.normal(size=(20_000, 5)) ** 2
    assert resample(sums, resamples=500).shape == (500, 5)
