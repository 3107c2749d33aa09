"""Statistics of the gap between inference and training, with bootstrap intervals over sequences.

For every generated token d = log q − log p, where q is the probability that the inference policy gave it when it was sampled and p the one
that the trainer gives it. Tokens of a sequence depend on each other, so sequences are resampled (the cluster bootstrap; Davison and
Hinkley, "Bootstrap Methods and their Application", 1997, section 3.8); a statistic is the mean over all tokens of the resampled sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from graphalign.errors import GapInputError

Array = NDArray[np.float64]
RESAMPLES: Final = 2000
"""Bootstrap resamples: the end points of a 95 % interval then move by about 2 % of its width from seed to seed."""
LEVEL: Final = 0.95
"""Coverage that the intervals aim at."""
_CHUNK: Final = 4_000_000
"""Entries of one block of the matrix of counts (resamples × sequences)."""
_ONE: Final = "one sequence: the spread between sequences is unknown"
_RATIO: Final = "the denominator is 0 in some resamples"


class Estimate(BaseModel):
    """A value with its interval. Prints as `1.77e-03 [1.61e-03, 1.94e-03]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    """The statistic on the sequences as they are."""
    low: float | None = None
    """Lower end of the bootstrap 95 % percentile interval; None if there is no interval."""
    high: float | None = None
    """Upper end."""
    reason: str = ""
    """Why there is no interval; empty if there is one."""

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval lies on one side of 0; False without an interval."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        between = f"[no interval: {self.reason}]" if self.low is None or self.high is None else f"[{self.low:.3g}, {self.high:.3g}]"
        return f"{self.value:.3g} {between}"


class GapStatistics(BaseModel):
    """How far the trainer's log-probabilities are from the engine's, on the engine's own samples."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(gt=0)
    sequences: int = Field(gt=0)
    """Sequences with at least one token."""
    mean_d: Estimate
    """Mean of d, in nats: unbiased for KL(inference ‖ training) (k1 in Schulman, "Approximating KL Divergence", 2020), but noisy: single
    tokens have either sign and the standard deviation of d is many times its mean."""
    mean_abs_d: Estimate
    """Mean of |d|, in nats."""
    k3: Estimate
    """Mean of exp(−d) − 1 + d, in nats: Schulman's k3 with r = p/q = exp(−d), so (r − 1) − log r. Never negative, unbiased for the same KL
    where the engine's policy covers the trainer's, and far less noisy than `mean_d`."""
    max_abs_d: float
    """Largest |d|. It has no interval: the bootstrap is not valid for an extreme (Bickel and Freedman 1981: the largest value is in a
    resample with probability 1 − 1/e, however many there are), and it grows with the number of tokens."""
    equal_share: Estimate
    """Share of tokens whose two log-probabilities are exactly equal, as given."""

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens in {self.sequences} sequences: mean d {self.mean_d}, mean |d| {self.mean_abs_d}, k3 {self.k3}, "
            f"max |d| {self.max_abs_d:.3g}, equal {self.equal_share}"
        )


class PairedDifference(BaseModel):
    """What changes from a first to a second variant of the trainer on the same tokens. Negative `k3`: the second is closer to inference.

    Both variants are evaluated on the same resampled sequences, so what they share cancels.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(gt=0)
    sequences: int = Field(gt=0)
    mean_d: Estimate
    """Second minus first, in nats. As inference's log-probabilities cancel, this is the mean of log p₁ − log p₂."""
    mean_abs_d: Estimate
    k3: Estimate
    k3_relative: Estimate | None
    """k3 of the second divided by k3 of the first, minus 1 (a ratio of means); None if the first's k3 is 0."""


def k3(d: Array) -> Array:
    """exp(−d) − 1 + d, elementwise, accurate to the last digits for small d too, where the terms cancel; never negative."""
    d = np.asarray(d, np.float64)
    series = d * d * (1 / 2 - d * (1 / 6 - d * (1 / 24 - d * (1 / 120 - d * (1 / 720 - d / 5040)))))
    with np.errstate(over="ignore"):
        return np.where(np.abs(d) < 1e-2, series, np.expm1(-d) + d)


def differences(inference: Sequence[Array], training: Sequence[Array]) -> list[Array]:
    """d = inference − training log-probability, per sequence, in float64. Sequences without tokens are left out.

    Raises:
        GapInputError: the two sides do not have the same sequences and lengths, something is not finite, or there are no tokens at all.
    """
    if len(inference) != len(training):
        raise GapInputError(
            f"inference has {len(inference)} sequences, training {len(training)}",
            hint="give both sides the same sequences in the same order",
        )
    out: list[Array] = []
    for i, (q, p) in enumerate(zip(inference, training, strict=True)):
        q, p = np.asarray(q, np.float64), np.asarray(p, np.float64)
        if q.shape != p.shape or q.ndim != 1:
            raise GapInputError(
                f"inference has log-probabilities of shape {q.shape}, training of shape {p.shape}",
                where=f"sequence {i}",
                hint="give one log-probability per generated token on both sides, without prompt and padding",
            )
        d = q - p
        if not np.isfinite(d).all():
            at = int(np.flatnonzero(~np.isfinite(d))[0])
            raise GapInputError(
                f"a log-probability is not finite: inference {q[at]}, training {p[at]}",
                where=f"sequence {i}, token {at}",
                hint="look for NaN or overflow in the logits, and for tokens that a top-k or top-p filter set to −inf",
            )
        out.append(d)
    out = [d for d in out if d.size]
    if not out:
        raise GapInputError(
            f"there are no generated tokens in {len(inference)} sequences", hint="every response is empty: check the mask and max_tokens"
        )
    return out


def sequence_sums(d: Sequence[Array]) -> Array:
    """Sums per sequence that every statistic is made of: `[sequences, 5]` with columns tokens, d, |d|, k3, equal tokens.

    Sums of several ranks or batches may be stacked: the statistics of the whole follow from them.
    """
    return np.array([(x.size, x.sum(), np.abs(x).sum(), k3(x).sum(), (x == 0).sum()) for x in d], np.float64).reshape(len(d), 5)


def resample(sums: Array, *, resamples: int = RESAMPLES, seed: int = 0, strata: Sequence[int] | None = None) -> Array:
    """Sums over sequences drawn with replacement.

    Args:
        sums: `[sequences, columns]`, any quantities that add up over sequences.
        resamples: how often to draw.
        seed: calls with the same seed, number of sequences and strata draw the same sequences, whatever the columns are: pairs stay pairs.
        strata: a label per sequence, e.g. its seed; each stratum is resampled on its own. None for one stratum.

    Returns:
        `[resamples, columns]`.
    """
    rng = np.random.default_rng(seed)
    labels = np.zeros(len(sums), np.int64) if strata is None else np.unique(np.asarray(strata), return_inverse=True)[1]
    if len(labels) != len(sums):
        raise ValueError(f"{len(labels)} strata for {len(sums)} sequences")
    out = np.zeros((resamples, sums.shape[1]))
    for label in range(labels.max() + 1):
        rows = sums[labels == label]
        n = len(rows)
        step = max(1, _CHUNK // n)
        for start in range(0, resamples, step):
            stop = min(resamples, start + step)
            # How often each sequence is drawn: n draws with equal probability.
            counts = rng.multinomial(n, np.full(n, 1 / n), size=stop - start)
            out[start:stop] += counts.astype(np.float64) @ rows
    return out


def draws(sums: Array, column: int, *, resamples: int = RESAMPLES, seed: int = 0, strata: Sequence[int] | None = None) -> Array:
    """A token-weighted mean with its bootstrap draws, `[1 + resamples]`: first the mean on the data, then on each resample.

    Differences and ratios of such arrays, made with one seed, are paired; `estimate_of` turns the result into an estimate.

    Args:
        sums: what `sequence_sums` returns.
        column: which column of it; 1 d, 2 |d|, 3 k3, 4 equal tokens.
        resamples, seed, strata: see `resample`.
    """
    both = np.vstack([sums.sum(0), resample(sums, resamples=resamples, seed=seed, strata=strata)])
    return np.asarray(both[:, column] / both[:, 0], np.float64)


def estimate_of(values: Array, sequences: int) -> Estimate:
    """An estimate from `[1 + resamples]`: the value on the data, then on each resample."""
    return estimate(float(values[0]), values[1:], sequences)


def estimate(value: float, draws: Array, sequences: int) -> Estimate:
    """A value with the percentile interval of its bootstrap draws (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, ch. 13).

    Args:
        value: the statistic on the data.
        draws: the statistic on each resample.
        sequences: how many sequences there are; with one there is no interval.
    """
    if sequences < 2:
        return Estimate(value=value, reason=_ONE)
    if not np.isfinite(draws).all():
        return Estimate(value=value, reason=_RATIO)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value=value, low=float(low), high=float(high))


def summarise(
    inference: Sequence[Array],
    training: Sequence[Array],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    strata: Sequence[int] | None = None,
) -> GapStatistics:
    """Statistics of the gap.

    Args:
        inference: per sequence, the log-probabilities of the generated tokens that the engine reported when it sampled them, `[tokens]`.
        training: the trainer's log-probabilities of the same tokens.
        resamples: bootstrap resamples.
        seed: of the bootstrap.
        strata: a label per sequence for a stratified bootstrap; to pool runs with different sampling seeds, concatenate their sequences and
            give each the number of its run.

    Raises:
        GapInputError: see `differences`.
    """
    d = differences(inference, training)
    return from_sums(
        sequence_sums(d),
        max_abs_d=max(float(np.abs(x).max()) for x in d),
        resamples=resamples,
        seed=seed,
        strata=_kept(inference, strata),
    )


def from_sums(
    sums: Array, *, max_abs_d: float, resamples: int = RESAMPLES, seed: int = 0, strata: Sequence[int] | None = None
) -> GapStatistics:
    """The statistics from `sequence_sums`, which may come from several processes.

    Raises:
        GapInputError: no tokens.
    """
    if not len(sums) or not sums[:, 0].sum():
        raise GapInputError("there are no generated tokens", hint="every response is empty: check the mask and max_tokens")
    n, draws, total = len(sums), resample(sums, resamples=resamples, seed=seed, strata=strata), sums.sum(0)
    mean_d, mean_abs_d, mean_k3, equal = (estimate(float(total[c] / total[0]), draws[:, c] / draws[:, 0], n) for c in range(1, 5))
    return GapStatistics(
        tokens=int(total[0]), sequences=n, mean_d=mean_d, mean_abs_d=mean_abs_d, k3=mean_k3, max_abs_d=max_abs_d, equal_share=equal
    )  # fmt: skip


def compare(
    inference: Sequence[Array],
    first: Sequence[Array],
    second: Sequence[Array],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    strata: Sequence[int] | None = None,
) -> PairedDifference:
    """Second variant minus first, both on inference's tokens, with paired intervals. Arguments as in `summarise`.

    Raises:
        GapInputError: see `differences`.
    """
    a, b = sequence_sums(differences(inference, first)), sequence_sums(differences(inference, second))
    sums = np.hstack([a, b[:, 1:]])
    n, draws, total = len(sums), resample(sums, resamples=resamples, seed=seed, strata=_kept(inference, strata)), sums.sum(0)

    def difference(column: int) -> Estimate:
        value = (total[column + 4] - total[column]) / total[0]
        return estimate(float(value), (draws[:, column + 4] - draws[:, column]) / draws[:, 0], n)

    relative = None
    if total[3]:
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = estimate(float(total[7] / total[3] - 1), draws[:, 7] / draws[:, 3] - 1, n)
    return PairedDifference(
        tokens=int(total[0]), sequences=n, mean_d=difference(1), mean_abs_d=difference(2), k3=difference(3), k3_relative=relative
    )  # fmt: skip


def _kept(inference: Sequence[Array], strata: Sequence[int] | None) -> list[int] | None:
    """The strata of the sequences that have tokens."""
    if strata is None:
        return None
    if len(strata) != len(inference):
        raise ValueError(f"{len(strata)} strata for {len(inference)} sequences")
    return [s for s, q in zip(strata, inference, strict=True) if len(q)]
