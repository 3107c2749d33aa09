"""What is wrong with a dump as a whole: columns that were rounded, copied, processed, or are not of the same tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from graphalign.dumps.collect import Collection
from graphalign.dumps.report import Finding
from graphalign.dumps.rows import HINTS, Array, Fault
from graphalign.errors import GapInputError
from graphalign.gap.inputs import check_agreement
from graphalign.gap.statistics import Estimate, estimate, resample

MANY: Final = 0.05
"""Share of rows with a fault above which the rest is not trusted either."""
ENOUGH: Final = 32
"""Different values below which nothing is said about a column's precision."""
SIGMAS: Final = 5.0
BIAS: Final = 2e-4
"""Probability, cut from the average token, below which it does not matter."""
SHARE_OF_K3: Final = 0.25
RELATIVE_ENTROPY: Final = 0.01
EXPLAINED: Final = 0.2
"""Share of the variance of d that log p must explain."""
SLOPE: Final = 0.01
RAW: Final = 'sample with temperature=1, top_p=1, top_k=0, min_p=0, or start vLLM with logprobs_mode="raw_logprobs" and divide no logits'


def find(c: Collection, *, resamples: int) -> tuple[list[Finding], Estimate | None]:
    """All findings of a collection, and the estimate of `DumpReport.sampling_bias`.

    Args:
        c: with at least one row that is compared or scored.
        resamples: bootstrap resamples.
    """
    out = [*_faults(c), *_precision(c), *_server(c)]
    pairs = [(k.inference, k.training) for k in c.kept if k.training is not None]
    bias = None
    if pairs:
        q, p = [a for a, _ in pairs], [b for _, b in pairs if b is not None]
        copied = all(np.array_equal(a, b) for a, b in zip(q, p, strict=True)) and sum(map(len, q)) >= ENOUGH
        if copied:
            out.append(_copied())
        else:
            names = [k.where for k in c.kept if k.training is not None]
            compared, bias = compare_columns(q, p, np.stack(c.sums), names, resamples=resamples)
            out += compared
        out += _entropy(c, resamples=resamples)
    return sorted(out, key=lambda f: not f.refuses), bias


def _faults(c: Collection) -> list[Finding]:
    usable = c.rows - c.empty - sum(x.count for f, x in c.faults.items() if f is Fault.UNUSABLE)
    if not c.left_out or c.left_out <= MANY * usable:
        return []
    fault, entry = max(((f, x) for f, x in c.faults.items() if f is not Fault.UNUSABLE), key=lambda x: x[1].count)
    what = f"{c.left_out} of {usable} rows are faulty, {entry.count} of them: {fault.value}"
    hint = HINTS[fault]
    if fault in (Fault.ZEROS, Fault.NONE) and c.switches:
        hint += "\nin the trainer: " + "; or ".join(c.switches)
    return [Finding(kind=fault.name.lower(), what=what, where="\n".join(entry.examples), hint=hint, refuses=True)]


def _precision(c: Collection) -> list[Finding]:
    out = []
    for side in ("inference", "training"):
        values = [x for k in c.kept if (x := getattr(k, side)) is not None]
        if values and (form := precision(np.concatenate(values))) is not None:
            hint = (
                "take log_softmax of logits.float(), as vLLM does, and write float32"
                if form.startswith(("BF16", "FP16"))
                else "write float32 with all its digits"
            )
            what = f"the {side} column holds {form} only: its own rounding would be shown as the gap"
            out.append(
                Finding(kind="precision", what=what, hint=hint, side="inference" if side == "inference" else "training", refuses=True)
            )
    return out


def precision(x: Array) -> str | None:
    """What all values of a column are multiples of, in words, if it is coarser than FP32; None if it isn't or if there are too few values.

    Args:
        x: log-probabilities in nats, `[tokens]`. Zeros say nothing.
    """
    x = np.unique(x[(x != 0) & np.isfinite(x)])
    if len(x) < ENOUGH:
        return None
    single = x.astype(np.float32)
    if not (single.view(np.uint32) & 0xFFFF).any() and np.array_equal(single.astype(np.float64), x):
        return "BF16 numbers"
    with np.errstate(over="ignore"):
        if np.array_equal(x.astype(np.float16).astype(np.float64), x):
            return "FP16 numbers"
    for digits in range(1, 6):
        scaled = np.abs(x) * 10.0**digits
        # written by way of float32, the numbers have its error
        if (np.abs(scaled - np.round(scaled)) <= 1e-3 + 2e-7 * scaled).all():
            return f"numbers with {digits} decimal{'s' if digits > 1 else ''}"
    return None


def _copied() -> Finding:
    return Finding(
        kind="copied",
        what="both columns hold the same numbers for every token",
        hint="either the two sides agree bit for bit, or the trainer did not compute its own and wrote the engine's (slime and miles:\n"
        "--use-rollout-logprobs; verl: bypass mode)",
        refuses=False,
    )


def compare_columns(
    q: Sequence[Array], p: Sequence[Array], sums: Array, names: Sequence[str], *, resamples: int
) -> tuple[list[Finding], Estimate]:
    """Whether two columns are of the same tokens and policy, and of the distribution that sampled.

    Args:
        q: the engine's log-probabilities per response, `[tokens]`.
        p: the trainer's.
        sums: `sequence_sums` of their difference; those of more responses if q and p are a sample.
        names: where each response is from.
        resamples: bootstrap resamples.
    """
    bias = sampling_bias(sums, resamples=resamples)
    try:
        check_agreement(q, p)
    except GapInputError as e:
        where = re.sub(r"sequence (\d+)", lambda m: names[int(m[1])], e.where)
        return [Finding(kind="disagreement", what=e.what, where=where, hint=e.hint, refuses=True)], bias
    return [*_truncated(sums.sum(0), bias, q, p), *_tempered(q, p)], bias


def sampling_bias(sums: Array, *, resamples: int) -> Estimate:
    """1 − mean p/q over the tokens, which is mean d − k3, with its bootstrap interval over responses.

    Tokens drawn from q have E[p/q] = the trainer's probability of what q can draw: 1, unless q was truncated by top-k, top-p or min-p, in
    which case it is what the filter kept. Rounding has no part in it: it moves d up as often as down.
    """
    with np.errstate(invalid="ignore"):
        drawn = resample(sums, resamples=resamples)
        total = sums.sum(0)
        return estimate(float((total[1] - total[3]) / total[0]), (drawn[:, 1] - drawn[:, 3]) / drawn[:, 0], len(sums))


def _truncated(sums: Array, bias: Estimate, q: Sequence[Array], p: Sequence[Array]) -> list[Finding]:
    d = np.concatenate(q) - np.concatenate(p)
    k3 = float(sums[3] / sums[0])
    error = float(np.std(np.exp(-np.clip(d, -50, None))) / np.sqrt(sums[0]))
    if bias.low is not None and bias.high is not None:
        error = max(error, (bias.high - bias.low) / 3.92)
    if len(d) < 4 * ENOUGH or bias.value < max(SIGMAS * error, BIAS, SHARE_OF_K3 * k3):
        return []
    most = float(-np.expm1(-np.quantile(d, 0.99)))
    what = (
        f"mean d ({float(sums[1] / sums[0]):.3g}) is above k3 ({k3:.3g}) by {bias.value:.3g}, {bias.value / error:.0f} standard errors: "
        "the engine's log-probabilities are of a truncated distribution"
    )
    where = f"on average {bias.value:.2%} of the probability was cut away, up to {most:.1%} at 99 % of the tokens"
    hint = f"top_p, top_k or min_p with processed_logprobs: d = −log of what was kept, at every token, which is not rounding; {RAW}"
    return [Finding(kind="truncated", what=what, where=where, hint=hint, side="inference", refuses=True)]


def _tempered(q: Sequence[Array], p: Sequence[Array]) -> list[Finding]:
    """A temperature near 1 on one side. Rounding moves d up as often as down whatever log p is; a temperature moves it with log p.

    `check_agreement` refuses what is proportional to log p at a glance; this is for 0.95 and the like, where d is small.
    """
    log_p = np.concatenate(p)
    d = np.concatenate(q) - log_p
    if len(d) < 4 * ENOUGH or not d.std() or not log_p.std():
        return []
    correlation = float(np.corrcoef(d, log_p)[0, 1])
    slope = correlation * float(d.std() / log_p.std())
    explained = correlation**2
    if explained < EXPLAINED or abs(slope) < SLOPE or abs(correlation) * np.sqrt(len(d)) < 2 * SIGMAS:
        return []
    what = f"d grows with the log-probability (d ≈ {slope:.3g} · log p + const, which explains {explained:.0%} of it): that is not rounding"
    cause = f"a temperature near {1 / (1 + slope):.3g} on the engine's side only would do this, and so would weights that were not synced"
    hint = f"{cause}; {RAW}"
    return [Finding(kind="tempered", what=what, hint=hint, refuses=True)]


def _entropy(c: Collection, *, resamples: int) -> list[Finding]:
    """Tokens that were drawn from the trainer's distribution have −log p = its entropy on average."""
    if not c.entropies:
        return []
    sums = np.stack(c.entropies)
    total, drawn = sums.sum(0), resample(sums, resamples=resamples)
    found = estimate(float((total[1] - total[2]) / total[0]), (drawn[:, 1] - drawn[:, 2]) / drawn[:, 0], len(sums))
    entropy = float(total[2] / total[0])
    if found.low is None or found.high is None or total[0] < 4 * ENOUGH:
        return []
    error = (found.high - found.low) / 3.92
    if abs(found.value) < max(SIGMAS * error, RELATIVE_ENTROPY * entropy):
        return []
    below = found.value < 0
    cause = "a temperature below 1 or a top-k, top-p or min-p filter" if below else "a temperature above 1"
    what = (
        f"mean −log p is {float(total[1] / total[0]):.4g}, the trainer's mean entropy {entropy:.4g}, "
        f"{abs(found.value) / error:.0f} standard errors apart: they were not drawn from what is compared, but with {cause}"
    )
    return [
        Finding(kind="sampling", what=what, hint=f"the figures hold for these tokens, and estimate no KL divergence; {RAW}", refuses=False)
    ]


def _server(c: Collection) -> list[Finding]:
    out = []
    a = c.answers
    if a.uncertain_rows >= ENOUGH and a.full_rows > 0.9 * a.uncertain_rows:
        what = (
            f"{a.full_rows} of {a.uncertain_rows} rows of top tokens, of tokens with a probability below 0.5, hold all of the probability: "
            "it was renormalised after a top-k, top-p or min-p filter"
        )
        out.append(Finding(kind="truncated", what=what, hint=RAW, side="inference", refuses=True))
    if a.unusual:
        named = ", ".join(f"{k} ({n} responses)" for k, n in a.unusual.items())
        what = f"the requests asked for {named}: the tokens were not drawn from the model's own distribution"
        hint = "the engine's log-probabilities are of the model's own only with logprobs_mode=raw_logprobs (vLLM's default)"
        out.append(Finding(kind="sampling", what=what, hint=hint, refuses=False))
    return out
