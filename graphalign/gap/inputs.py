"""Log-probabilities that cannot be compared are refused by name, before anyone believes a gap made of them.

Nothing here repairs anything. What can be seen in the sampled tokens' log-probabilities alone is checked by `check`; `check_reported` also
needs the rows of top tokens that the engine returned, and graphalign.gap.temperature the trainer's logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from graphalign.errors import GapInputError

Array = NDArray[np.float64]
Ids = NDArray[np.integer]

POSITIVE: Final = 1e-6
"""Log-probabilities up to this are taken for 0: log_softmax in FP32 goes that far."""
FAR: Final = 1.0
"""Mean |d| in nats above which two policies are not the same model. Rounding alone gives 1e-3 to 1e-1 (NeMo-RL#1801, prime-rl#1167)."""
_ENOUGH: Final = 32
"""Tokens below which nothing is said about how the two sides are distributed."""
_VISIBLE: Final = 0.02
"""Mean |d| in nats below which no mistake is looked for: it would be too small to tell from rounding."""
_MASS: Final = 1e-3
"""How far above 1 probabilities may sum."""

_RAW = 'start vLLM with logprobs_mode="raw_logprobs" (its default) and sample with temperature=1, top_p=1, top_k=0, no penalties'


def check(inference: Sequence[Array], training: Sequence[Array], *, allow_empty: bool = False) -> None:
    """Refuse log-probabilities that are broken, or that cannot be of the same tokens and policy.

    Args:
        inference: per sequence, the engine's log-probabilities of the generated tokens, `[tokens]`.
        training: the trainer's, of the same tokens.
        allow_empty: sequences without tokens are all right (a trainer masks truncated responses).

    Raises:
        GapInputError: what is wrong, at which sequence and token, and what to do.
    """
    check_values(inference, "inference", allow_empty=allow_empty)
    check_values(training, "training", allow_empty=allow_empty)
    check_shapes(inference, training)
    check_agreement(inference, training)


def check_values(sequences: Sequence[Array], side: str, *, allow_empty: bool = False) -> None:
    """One side alone: one finite log-probability per token, none positive.

    Raises:
        GapInputError: the first that is not.
    """
    empty = [i for i, x in enumerate(sequences) if not np.size(x)]
    if len(empty) == len(sequences) or (empty and not allow_empty):
        which = ", ".join(map(str, empty[:8])) + (", …" if len(empty) > 8 else "")
        raise GapInputError(
            f"{len(empty)} of {len(sequences)} responses are empty",
            where=f"{side}, sequences {which}" if empty else side,
            hint="check max_tokens, the stop tokens and the mask, or leave these sequences out",
        )
    for i, x in enumerate(sequences):
        x = np.asarray(x, np.float64)
        if x.ndim != 1:
            raise GapInputError(
                f"log-probabilities of shape {x.shape}: one number per token is wanted",
                where=f"{side}, sequence {i}",
                hint="of a distribution or of top tokens take the entry of the token that was sampled, by its id and not by its rank",
            )
        for bad, what, hint in (
            (np.isnan(x), "is NaN", "look for NaN in the logits; TRL passes on a NaN of vLLM's as None"),
            (
                x == -np.inf,
                "is −inf: a token that could not have been sampled",
                "a top-k, top-p or min-p filter was applied to it: " + _RAW,
            ),
            (x == np.inf, "is +inf", "look for overflow in the logits"),
            (x > POSITIVE, "is positive", _positive(x)),
        ):
            if bad.any():
                t = int(np.flatnonzero(bad)[0])
                more = f" ({int(bad.sum())} of {x.size} in this sequence)" if bad.sum() > 1 else ""
                raise GapInputError(
                    f"log-probability {x[t]:.6g} {what}{more}", where=f"{side}, sequence {i}, token {t} of {x.size}", hint=hint
                )


def _positive(x: Array) -> str:
    if ((x >= 0) & (x <= 1)).all():
        return "all lie in [0, 1]: these look like probabilities; take their logarithm"
    if (x >= 0).all():
        return "none is negative: these look like negated log-probabilities (a loss); change the sign"
    return 'these look like logits: take log_softmax in float32; in vLLM, logprobs_mode="raw_logprobs"'


def check_shapes(inference: Sequence[Array], training: Sequence[Array]) -> None:
    """Same sequences, same numbers of tokens.

    Raises:
        GapInputError: the first sequence that differs.
    """
    if len(inference) != len(training):
        raise GapInputError(
            f"inference has {len(inference)} sequences, training {len(training)}",
            hint="give both sides the same sequences in the same order",
        )
    excess = [np.size(p) - np.size(q) for q, p in zip(inference, training, strict=True)]
    i = next((i for i, e in enumerate(excess) if e), None)
    if i is None:
        return
    hint = "give one log-probability per generated token on both sides, without prompt and padding"
    if set(excess) == {-1}:
        hint = (
            "training has one token fewer everywhere: logits[:, :-1] predict tokens[:, 1:], so keep the one that predicts the first token"
        )
    elif set(excess) == {1}:
        hint = "training has one token more everywhere: it ends with a token that was not sampled (EOS added?), or starts in the prompt"
    elif sorted(map(np.size, inference)) == sorted(map(np.size, training)):
        hint = "the same lengths in another order: sort the engine's outputs by request"
    raise GapInputError(
        f"inference has {np.size(inference[i])} tokens, training {np.size(training[i])}",
        where=f"sequence {i}" + (f", and {sum(map(bool, excess)) - 1} more" if sum(map(bool, excess)) > 1 else ""),
        hint=hint,
    )


def check_agreement(inference: Sequence[Array], training: Sequence[Array]) -> None:
    """Both sides look like the same tokens under nearly the same policy. Not decided below 32 tokens unless the two are a nat apart.

    Tested: d is far from what rounding can do; pairing the tokens at random would fit about as well; a shift by one fits much better;
    d is positive nearly everywhere, as after a top-k or top-p filter, where q = p/Z on what is kept and so d = −log Z > 0 for every
    token; d is a linear function of log p, as with another temperature.

    Raises:
        GapInputError: with the likely causes.
    """
    q, p = (np.concatenate([np.asarray(x, np.float64).ravel() for x in side]) for side in (inference, training))
    d = q - p
    size, apart = len(d), float(np.abs(d).mean())
    if apart < _VISIBLE:
        return
    worst = _worst(inference, training)
    if size >= _ENOUGH:
        for shift, word in ((1, "later"), (-1, "earlier")):
            if (moved := _shifted(inference, training, shift)) < 0.25 * apart:
                raise GapInputError(
                    f"the sides are shifted by one token: mean |d| {apart:.3g}, and {moved:.3g} with training one token {word}",
                    where=worst,
                    hint="logits at position t predict token t + 1: score tokens[:, 1:] with logits[:, :-1]",
                )
        if q.min() == q.max():
            raise GapInputError(
                f"inference gives every token the same log-probability, {q[0]:.4g}",
                where="inference",
                hint=("the engine decodes greedily and returns processed log-probabilities: " + _RAW)
                if abs(q[0]) < POSITIVE
                else "this looks like padding",
            )
        share = float((d > 0).mean())
        if share > 0.95 and _correlation(q, p) > 0.9:
            raise GapInputError(
                f"inference is above training at {share:.1%} of the tokens, by {d.mean():.3g} on average: "
                "its log-probabilities were processed",
                where=worst,
                hint=f"a top-k, top-p or min-p filter (d = −log of the kept mass) or a temperature below 1 was applied:\n{_RAW}",
            )
        a, b = np.random.default_rng(0).integers(0, size, (2, 1 << 14))
        paired = float(np.abs(q[a] - p[b]).mean())
        if apart > 0.5 * paired:
            raise GapInputError(
                f"the log-probabilities are not of the same tokens: mean |d| {apart:.3g}, and {paired:.3g} with tokens paired at random "
                f"(correlation {_correlation(q, p):.2f})",
                where=worst,
                hint=_CAUSES,
            )
    if apart > FAR:
        raise GapInputError(f"mean |d| is {apart:.3g} nats: these are not the same policy", where=worst, hint=_CAUSES)
    if size >= 4 * _ENOUGH and (slope := _slope(d, p)):
        raise GapInputError(
            f"d is proportional to the log-probability (d ≈ {slope:.3g} · log p + const): not rounding",
            where=worst,
            hint=f"a temperature near {1 / (1 + slope):.2g} would do this ({_RAW}),\nand so would weights that were not synced",
        )


_CAUSES = (
    "likely causes: tokens decoded to text and tokenised again, or another tokenizer; responses in another order; padding or\n"
    "prompt scored; the engine has other weights than the trainer (sync them before the rollout); processed log-probabilities;\n"
    "a temperature other than 1"
)


def check_reported(
    ids: Sequence[Ids],
    top_ids: Sequence[Ids],
    top_logprobs: Sequence[Array],
    *,
    inference: Sequence[Array] | None = None,
    vocabulary: int = 0,
) -> None:
    """The engine's rows of top tokens are raw probabilities, and the sampled token is among them.

    Args:
        ids: per sequence, the sampled tokens, `[tokens]`.
        top_ids: the tokens of each row, `[tokens, k]`.
        top_logprobs: their log-probabilities, `[tokens, k]`.
        inference: what is used as the sampled tokens' log-probabilities, `[tokens]`; checked against the rows if given.
        vocabulary: size of the vocabulary; rows shorter than it may not hold all of the probability. 0 if unknown.

    Raises:
        GapInputError: the first row that is wrong.
    """
    for i, (sampled, tops, logs) in enumerate(zip(ids, top_ids, top_logprobs, strict=True)):
        logs = np.asarray(logs, np.float64)
        if np.shape(tops) != logs.shape or logs.ndim != 2 or len(logs) != len(sampled):
            raise GapInputError(
                f"{len(sampled)} tokens with rows of ids {np.shape(tops)} and of log-probabilities {logs.shape}", where=f"sequence {i}"
            )
        hit = np.asarray(tops) == np.asarray(sampled)[:, None]
        mass = np.exp(logs).sum(1)
        for bad, what, hint in (
            (~hit.any(1), "does not hold the sampled token", "the row and the token are of different positions, or another tokenizer's"),
            (
                mass > 1 + _MASS,
                "sums to more than 1",
                "these are not log-probabilities of one distribution; a token listed twice, or logits",
            ),
            (np.isneginf(logs).any(1), "holds −inf", "tokens were filtered before the log-probabilities were taken: " + _RAW),
        ):
            _refuse_row(bad, i, mass, what, hint)
        if logs.shape[1] < vocabulary:
            full = np.abs(mass - 1) < 1e-6
            if len(full) >= _ENOUGH and full.mean() > 0.9:
                _refuse_row(
                    full, i, mass, f"of {logs.shape[1]} tokens holds all of the probability", "renormalised after a filter: " + _RAW
                )
        if inference is not None:
            own = np.where(hit, logs, -np.inf).max(1)
            off = np.abs(own - inference[i]) > 1e-4
            _refuse_row(
                off,
                i,
                mass,
                "gives the sampled token another log-probability than is used",
                "take the entry of the token's id, not of rank 0",
            )


def _refuse_row(bad: Any, sequence: int, mass: Array, what: str, hint: str) -> None:
    if bad.any():
        t = int(np.flatnonzero(bad)[0])
        raise GapInputError(
            f"a row of top tokens {what} (its probabilities sum to {mass[t]:.6g}; {int(bad.sum())} rows are so)",
            where=f"sequence {sequence}, token {t}",
            hint=hint,
        )


def check_tokens(inference: Sequence[Ids], training: Sequence[Ids], *, vocabulary: int = 0) -> None:
    """The trainer scores the tokens that the engine sampled.

    Args:
        inference: token ids per sequence, as the engine returned them.
        training: as the trainer scores them.
        vocabulary: size of the trainer's vocabulary; 0 if unknown.

    Raises:
        GapInputError: the first token that differs.
    """
    if len(inference) != len(training):
        raise GapInputError(f"inference has {len(inference)} sequences, training {len(training)}")
    for i, (a, b) in enumerate(zip(inference, training, strict=True)):
        a, b = np.asarray(a), np.asarray(b)
        n = min(len(a), len(b))
        different = np.flatnonzero(a[:n] != b[:n])
        t = int(different[0]) if len(different) else n
        if len(different) or len(a) != len(b):
            pair = f"{a[t] if t < len(a) else 'nothing'} against {b[t] if t < len(b) else 'nothing'}"
            raise GapInputError(
                f"the trainer scores other tokens than were sampled: {pair}",
                where=f"sequence {i}, token {t}",
                hint="pass the engine's token ids on; text tokenised again, or by another tokenizer, gives other tokens",
            )
        if vocabulary and len(a) and (a.min() < 0 or a.max() >= vocabulary):
            t = int(np.flatnonzero((a < 0) | (a >= vocabulary))[0])
            raise GapInputError(
                f"token {a[t]} is outside of the trainer's vocabulary of {vocabulary}",
                where=f"sequence {i}, token {t}",
                hint="the engine and the trainer have different tokenizers or models",
            )


def rounded_to_bfloat16(sequences: Sequence[Array]) -> bool:
    """Whether all values, 32 or more, are BF16 numbers: log_softmax was then taken in BF16, which puts a token with log-probability −5
    off by up to 0.016. vLLM takes it in FP32 of BF16 logits; do the same with `logits.float().log_softmax(-1)`."""
    x = np.concatenate([np.asarray(s, np.float32).ravel() for s in sequences]) if len(sequences) else np.zeros(0, np.float32)
    return x.size >= _ENOUGH and bool(x.min() < x.max()) and not (x.view(np.uint32) & 0xFFFF).any()


def _slope(d: Array, p: Array) -> float:
    """Slope of d over log p if it is large and explains most of d, else 0. Rounding errors are as often up as down at every log p."""
    if p.std() < 1e-3 or d.std() == 0:
        return 0.0
    correlation = _correlation(d, p)
    slope = correlation * float(d.std() / p.std())
    return slope if correlation**2 > 0.5 and abs(slope) > 0.05 and slope > -0.95 else 0.0


def _shifted(inference: Sequence[Array], training: Sequence[Array], shift: int) -> float:
    """Mean |d| with training's token t + shift in the place of t."""
    total, count = 0.0, 0
    for q, p in zip(inference, training, strict=True):
        a, b = (q[:-1], p[1:]) if shift > 0 else (q[1:], p[:-1])
        total, count = total + float(np.abs(np.subtract(a, b)).sum()), count + len(a)
    return total / count if count else np.inf


def _correlation(q: Array, p: Array) -> float:
    return float(np.corrcoef(q, p)[0, 1]) if q.std() and p.std() else 0.0


def _worst(inference: Sequence[Array], training: Sequence[Array]) -> str:
    """Where |d| is largest, in words."""
    far = [float(np.abs(np.subtract(q, p)).max()) if np.size(q) else -1.0 for q, p in zip(inference, training, strict=True)]
    i = int(np.argmax(far))
    t = int(np.argmax(np.abs(np.subtract(inference[i], training[i]))))
    return f"furthest apart at sequence {i}, token {t}: inference {inference[i][t]:.4g}, training {training[i][t]:.4g}"
