"""Which temperature the engine's log-probabilities were taken at, and which the tokens were drawn at, from the trainer's logits.

The two differ: vLLM samples at the requested temperature and by default reports log-probabilities at temperature 1. The gap is about the
policy that sampled, so both have to be 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from graphalign.errors import GapInputError

Array = NDArray[np.float64]
Ids = NDArray[np.integer]

_LOW, _HIGH = np.log(1 / 20), np.log(20)
_TOLERANCE: Final = 0.02
"""|log T| below which a temperature counts as 1: rounding moves the estimate by less (0.005 on SmolLM2-135M's scale of gaps)."""
_SIGMAS: Final = 5.0


class Temperature(BaseModel):
    """A temperature estimated from data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float = Field(gt=0)
    error: float | None
    """Standard error of `value`; None where it is not a statistical estimate."""
    at_estimate: float
    """The criterion at `value`: mean |d| in nats for reported log-probabilities, mean negative log-likelihood for drawn tokens."""
    at_one: float
    """The criterion at temperature 1."""

    @property
    def is_one(self) -> bool:
        """Whether it may be 1: near it, or within five standard errors."""
        off = abs(float(np.log(self.value)))
        return off < _TOLERANCE or (self.error is not None and off < _SIGMAS * self.error / self.value)


def detect_temperature(inference: Array, training_logits: Array, token_ids: Ids) -> Temperature:
    """The temperature T at which the trainer's logits explain best what the engine reported: least squares of
    inference − (z_token/T − logsumexp(z/T)) over log T in [1/20, 20].

    Args:
        inference: the engine's log-probabilities of the generated tokens, `[tokens]`.
        training_logits: the trainer's logits where it predicts these tokens, before any temperature, `[tokens, vocabulary]`.
        token_ids: the tokens, `[tokens]`.

    Raises:
        GapInputError: shapes do not fit.
    """
    z, ids = _logits(training_logits, token_ids)
    q = np.asarray(inference, np.float64)
    if q.shape != ids.shape:
        raise GapInputError(
            f"{q.size} log-probabilities for {ids.size} tokens", hint="give one sequence, or concatenate them on both sides"
        )

    def error(log_t: float) -> float:
        return float(((q - _logprobs(z, ids, log_t)) ** 2).mean())

    best = _minimise(error)
    return Temperature(
        value=float(np.exp(best)),
        error=None,
        at_estimate=float(np.abs(q - _logprobs(z, ids, best)).mean()),
        at_one=float(np.abs(q - _logprobs(z, ids, 0.0)).mean()),
    )


def sampled_temperature(training_logits: Array, token_ids: Ids) -> Temperature:
    """The temperature that the tokens were drawn at: its maximum-likelihood estimate, whatever the engine reported.

    With β = 1/T the log-likelihood Σ β z_token − logsumexp(β z) is concave in β; its curvature Σ Var_β(z) is the Fisher information, so
    β has the standard error 1/√ΣVar, also for the dependent tokens of a sequence (the score is a martingale).
    Arguments as in `detect_temperature`.
    """
    z, ids = _logits(training_logits, token_ids)
    best = _minimise(lambda log_t: float(-_logprobs(z, ids, log_t).mean()))
    beta = float(np.exp(-best))
    p = np.exp(beta * z - _logsumexp(beta * z)[:, None])
    mean = (p * z).sum(1)
    variance = float(((p * (z - mean[:, None]) ** 2).sum(1)).sum())
    error = float(np.exp(2 * best) / np.sqrt(variance)) if variance > 0 else float("inf")  # dT = T² dβ
    at = (float(-_logprobs(z, ids, t).mean()) for t in (best, 0.0))
    return Temperature(value=float(np.exp(best)), error=error, at_estimate=next(at), at_one=next(at))


def check_temperature(inference: Array, training_logits: Array, token_ids: Ids) -> None:
    """Refuse log-probabilities reported, or tokens drawn, at a temperature other than 1. Arguments as in `detect_temperature`.

    Raises:
        GapInputError: with the temperature found.
    """
    reported = detect_temperature(inference, training_logits, token_ids)
    if not reported.is_one and reported.at_estimate < 0.5 * reported.at_one:
        raise GapInputError(
            f"the engine's log-probabilities are those of temperature {reported.value:.3g}: "
            f"mean |d| {reported.at_estimate:.3g} there, {reported.at_one:.3g} at 1",
            where=f"{len(token_ids)} tokens",
            hint="sample with temperature=1, or divide the trainer's logits by the same temperature;\n"
            'in vLLM, logprobs_mode="raw_logprobs"',
        )
    drawn = sampled_temperature(training_logits, token_ids)
    if not drawn.is_one:
        raise GapInputError(
            f"the tokens were drawn at temperature {drawn.value:.3g} ± {drawn.error:.2g}, the log-probabilities are those of temperature 1",
            where=f"{len(token_ids)} tokens",
            hint="sample with temperature=1, top_p=1, top_k=0: on other samples the mean of d does not estimate the KL",
        )


def _logits(training_logits: Array, token_ids: Ids) -> tuple[Array, Ids]:
    z, ids = np.asarray(training_logits, np.float64), np.asarray(token_ids)
    if z.ndim != 2 or ids.shape != z.shape[:1] or not ids.size:
        raise GapInputError(
            f"logits of shape {z.shape} for tokens of shape {ids.shape}",
            hint="give logits [tokens, vocabulary] at the positions that predict the tokens",
        )
    if ids.min() < 0 or ids.max() >= z.shape[1]:
        raise GapInputError(
            f"token {ids.max()} is outside of the vocabulary of {z.shape[1]}", hint="the engine and the trainer have different tokenizers"
        )
    if not np.isfinite(z).all():
        t = int(np.flatnonzero(~np.isfinite(z).all(1))[0])
        raise GapInputError("the trainer's logits are not finite", where=f"token {t}")
    return z - z.max(1, keepdims=True), ids


def _logsumexp(z: Array) -> Array:
    top = z.max(1)
    return np.asarray(top + np.log(np.exp(z - top[:, None]).sum(1)), np.float64)


def _logprobs(z: Array, ids: Ids, log_t: float) -> Array:
    scaled = z * np.exp(-log_t)
    return np.asarray(scaled[np.arange(len(ids)), ids] - _logsumexp(scaled), np.float64)


def _minimise(f: Callable[[float], float]) -> float:
    """A grid over log T, then golden-section search around its best point (Kiefer 1953): least squares in log T may have several minima."""
    grid = np.linspace(_LOW, _HIGH, 49)
    i = int(np.argmin([f(float(x)) for x in grid]))
    a, b = float(grid[max(i - 1, 0)]), float(grid[min(i + 1, len(grid) - 1)])
    ratio = (np.sqrt(5) - 1) / 2
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    fc, fd = f(c), f(d)
    while b - a > 1e-6:
        if fc < fd:
            b, d, fd = d, c, fc
            c = b - ratio * (b - a)
            fc = f(c)
        else:
            a, c, fc = c, d, fd
            d = a + ratio * (b - a)
            fd = f(d)
    return (a + b) / 2
