"""From what was read to a report."""

from __future__ import annotations

from typing import Final

import numpy as np

from graphalign.dumps.collect import MOMENTS, POSITIONS, PROBABILITIES, Collection
from graphalign.dumps.findings import find
from graphalign.dumps.report import DumpReport, FileRead, LeftOutRows, Logged, Part
from graphalign.dumps.rows import HINTS, Array, Fault
from graphalign.errors import GapInputError
from graphalign.gap.statistics import GapStatistics, from_sums, summarise

PART_RESAMPLES: Final = 500
"""Bootstrap resamples of parts."""


def report(c: Collection, *, resamples: int, anyway: bool = False) -> DumpReport:
    """The statistics of the dump's own columns, with everything that was found.

    Args:
        c: what was read.
        resamples: bootstrap resamples.
        anyway: show figures that a finding refuses.

    Raises:
        GapInputError: no row can be used.
    """
    if not c.with_training and not c.without_training:
        raise _nothing(c)
    findings, bias = find(c, resamples=resamples)
    refused = any(f.refuses for f in findings)
    shown = bool(c.sums) and (anyway or not refused)
    notes = [*c.notes]
    if c.with_training and c.without_training:
        notes.append(f"{c.without_training} responses have the engine's log-probabilities only: they are not part of the gap")
    if c.repeated:
        notes.append(f"{c.repeated} responses are in several files with the same tokens and numbers (ranks that share data?): counted once")
    if len(c.kept) < c.with_training + c.without_training:
        notes.append(
            f"checks of the whole and plots use {len(c.kept)} of {c.with_training + c.without_training} responses, drawn at random"
        )
    paired = [(k.inference, k.prefill) for k in c.kept if k.prefill is not None and np.isfinite(k.prefill).all()]
    return DumpReport(
        files=tuple(FileRead(path=str(f.path), format=f.format, title=f.title, rows=f.rows, used=f.used, tokens=f.tokens) for f in c.files),
        rows=c.rows, empty=c.empty,
        left_out=tuple(
            LeftOutRows(fault=f.value, rows=x.count, examples=tuple(x.examples), hint=HINTS[f])
            for f, x in sorted(c.faults.items(), key=lambda i: -i[1].count)
        ),
        notes=tuple(notes), findings=tuple(findings),
        gap=_gap(c, resamples) if shown else None, sampling_bias=bias if shown else None,
        outside_clip=_outside(c) if shown else None,
        by_step=_steps(c) if shown else (), by_position=_parts(c, "position") if shown else (),
        by_probability=_parts(c, "probability") if shown else (), logged=_logged(c) if shown else (),
        engine_gap=summarise([a for a, _ in paired], [b for _, b in paired if b is not None], resamples=resamples) if paired else None,
        resamples=resamples, sampled_rows=len(c.kept) if len(c.kept) < c.with_training + c.without_training else None,
    )  # fmt: skip


def _nothing(c: Collection) -> GapInputError:
    if not c.rows and c.answers.scored:
        return GapInputError(
            f"the answers only score {len(c.answers.scored)} prompts (prompt_logprobs): nobody sampled these tokens",
            where=", ".join(f.path.name for f in c.files),
            hint="give the answers that sampled them too: a prompt is paired with the prompt and answer of the same tokens",
        )
    if not c.rows:
        return GapInputError("the dump has no rows", where=", ".join(f.path.name for f in c.files), hint="look at --step, if it was given")
    if c.faults:
        fault, entry = max(c.faults.items(), key=lambda x: x[1].count)
        hint = HINTS[fault]
        if fault in (Fault.NONE, Fault.ZEROS) and c.switches:
            hint += "\nin the trainer: " + "; or ".join(c.switches)
        return GapInputError(f"none of {c.rows} rows can be used; {entry.count}: {fault.value}", where="\n".join(entry.examples), hint=hint)
    return GapInputError(
        f"no token of {c.rows} rows counts", where=", ".join(f.path.name for f in c.files), hint="every mask is 0; was the batch filtered?"
    )


def _gap(c: Collection, resamples: int) -> GapStatistics:
    return from_sums(np.stack(c.sums), max_abs_d=c.largest["all", 0], resamples=resamples)


def _steps(c: Collection) -> tuple[Part, ...]:
    names = list(dict.fromkeys(c.steps))
    if len(names) < 2:
        return ()
    names.sort(key=lambda s: (not s.isdecimal(), int(s) if s.isdecimal() else 0, s))
    labels, sums = np.array(c.steps), np.stack(c.sums)
    return tuple(Part(name=n, gap=from_sums(sums[labels == n], max_abs_d=c.largest_step[n], resamples=PART_RESAMPLES)) for n in names)


def _parts(c: Collection, name: str) -> tuple[Part, ...]:
    edges = POSITIONS if name == "position" else PROBABILITIES
    sums = np.stack(c.positions if name == "position" else c.probabilities)
    out = []
    for i, (low, high) in enumerate(zip(edges, (*edges[1:], None), strict=True)):
        rows: Array = sums[:, i]
        rows = rows[rows[:, 0] > 0]
        if not len(rows):
            continue
        if name == "position":
            title = f"{low} and later" if high is None else f"{low} to {int(high) - 1}"
        else:
            title = f"{low:g} to {1 if high is None else high:g}"
        out.append(Part(name=title, gap=from_sums(rows, max_abs_d=c.largest[name, i], resamples=PART_RESAMPLES)))
    return tuple(out) if len(out) > 1 else ()


def _outside(c: Collection) -> float:
    total = dict(zip(MOMENTS, np.stack(c.moments).sum(0), strict=True))
    return float(total["outside"] / total["tokens"])


def _logged(c: Collection) -> tuple[Logged, ...]:
    """What trainers log of the same columns, for comparison with their dashboards; one value over all tokens, where they log one per step.

    NeMo-RL: nemo_rl/algorithms/loss (token_mult_prob_error); prime-rl: trainer/rl/loss.py (mismatch_kl); verl: verl/utils/debug/metrics.py;
    TRL: grpo_trainer.py (sampling/sampling_logp_difference).
    """
    total = dict(zip(MOMENTS, np.stack(c.moments).sum(0), strict=True))
    n = total["tokens"]
    sums = np.stack(c.sums).sum(0)
    mean = total["difference"] / n
    spread = max(0.0, total["difference²"] - n * mean * mean)
    covariance = total["qp"] / n - total["q"] * total["p"] / n**2
    variances = (total["q²"] / n - (total["q"] / n) ** 2) * (total["p²"] / n - (total["p"] / n) ** 2)
    found = [
        ("mean exp |d|", total["exp |d|"] / n, "NeMo-RL token_mult_prob_error"),
        ("k3", sums[3] / sums[0], "prime-rl mismatch_kl"),
        ("mean |q − p|", mean, "verl training/rollout_probs_diff_mean"),
        ("largest |q − p|", c.largest_probability, "verl training/rollout_probs_diff_max"),
        ("mean |d|", sums[2] / sums[0], "TRL sampling/sampling_logp_difference/mean"),
        ("largest |d|", c.largest["all", 0], "TRL sampling/sampling_logp_difference/max"),
    ]
    if n > 1:
        found.insert(4, ("standard deviation of |q − p|", np.sqrt(spread / (n - 1)), "verl training/rollout_probs_diff_std"))
    if variances > 0:
        found.insert(5, ("correlation of q and p", covariance / np.sqrt(variances), "verl training/rollout_actor_probs_pearson_corr"))
    return tuple(Logged(name=name, value=float(value), logged_as=where) for name, value, where in found)
