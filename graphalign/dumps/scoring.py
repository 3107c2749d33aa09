"""Runs the trainer here on a dump's tokens, stock and patched, against the engine's log-probabilities in the dump."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from graphalign.dumps.collect import Collection, Kept, tokens_of
from graphalign.dumps.findings import compare_columns
from graphalign.dumps.report import DumpReport, Finding, Sampling, Scored
from graphalign.dumps.rows import Array
from graphalign.dumps.rows import Kept as Flags
from graphalign.dumps.sampling import Observer, findings_of
from graphalign.errors import GapInputError
from graphalign.gap.measure import Tokens, measure_all, score_variant
from graphalign.gap.score import score
from graphalign.gap.statistics import compare, sequence_sums, summarise
from graphalign.gap.store import LogProbs, Store, digest, model_identity
from graphalign.gap.variants import EVERYTHING, STOCK, Variant, main_variants, nudged_variant
from graphalign.logprobs import DEFAULT, LogProbabilities, find_function, name_of
from graphalign.patch.spec import PatchSpec

if TYPE_CHECKING:
    from torch import nn

OBSERVED: Final = 4096
"""Tokens whose logits are looked at for filters and the temperature: the vocabulary is sorted for each."""


@dataclass(frozen=True)
class Response:
    """What `Tokens` wants of a response; the log-probabilities are kept apart, because not every token counts."""

    prompt: int
    tokens: tuple[int, ...]
    seed: int = 0
    sampled: tuple[float, ...] = ()
    prefill: tuple[float, ...] = ()


@dataclass(frozen=True)
class Result:
    """The report with what was scored, and the log-probabilities behind its plots."""

    report: DumpReport
    engine: list[Array]
    """Per response, of the tokens that count."""
    training: dict[str, list[Array]]
    """The same by variant."""


def score_dump(
    c: Collection,
    report: DumpReport,
    folder: Path,
    *,
    spec: PatchSpec | None,
    function: LogProbabilities | None,
    temperature: float = 1.0,
    layers: int | None = None,
    out: Path | None = None,
    resamples: int,
    anyway: bool = False,
    progress: Callable[[str, float | None], None],
) -> Result:
    """Build the model, score the dump's tokens with the stock and the patched trainer.

    Args:
        c: what was read.
        report: of its columns; a copy with more in it is returned.
        folder: of the model, with the weights that sampled.
        spec: the patch; None for the stock trainer only.
        function: the trainer's log-probabilities; None for the patch's, or vLLM's.
        temperature: logits are divided by it, in FP32, before the function.
        layers: keep the first so many decoder layers.
        out: keeps results, so that an interrupted run goes on; None to keep nothing.
        resamples: bootstrap resamples.
        anyway: go on although the stock trainer is not the policy that sampled.
        progress: called with the stage and the fraction done.

    Raises:
        GapInputError: rows without token ids, of several training steps, or with tokens that the model does not have.
        PatchError: the patch does not fit the model.
        BadInputError, CaptureFailedError: the model cannot be built.
    """
    from graphalign.engines.trainer import build_trainer

    kept = scorable(c)
    regime = spec.regime if spec is not None else {}
    function = function or find_function(regime.get("logprobs", DEFAULT))
    progress("build the model", None)
    dtype, attention = str(regime.get("param_dtype") or "bfloat16"), str(regime.get("attention") or "sdpa")
    model = build_trainer(folder, layers=layers, dtype=dtype, attention=attention)
    setting = {"name": folder.name, "dtype": dtype, "attention": attention, "autocast": regime.get("autocast"), "temperature": temperature,
               "logprobs": name_of(function), "device": next(model.parameters()).device.type}  # fmt: skip
    with ExitStack() as stack:
        keeps = out / "variants" if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        identity = (model_identity(folder), setting, layers, [k.row.tokens.tolist() for k in kept if k.row.tokens is not None])
        return score_rows(
            model, kept, report.model_copy(update={"model": setting}), Store(keeps, digest(*identity)), spec=spec, function=function,
            temperature=temperature, resamples=resamples, anyway=anyway, progress=progress,
        )  # fmt: skip


def score_rows(
    model: nn.Module,
    kept: list[Kept],
    report: DumpReport,
    store: Store,
    *,
    spec: PatchSpec | None,
    function: LogProbabilities,
    temperature: float = 1.0,
    resamples: int,
    anyway: bool = False,
    progress: Callable[[str, float | None], None],
) -> Result:
    """`score_dump` with a model that is there: stock, in eval mode; stock again afterwards. Arguments as there."""
    pairs = [(p if len(p) else r[:1], r if len(p) else r[1:]) for p, r in tokens_of(kept)]
    masks, engine, dumped = [], [], []
    for k, (_, response) in zip(kept, pairs, strict=True):
        keep = k.row.keep[-len(response) :] if len(response) else k.row.keep[:0]
        masks.append(keep)
        engine.append(k.row.inference[-len(response) :][keep] if len(response) else np.zeros(0))
        if k.row.training is not None:
            dumped.append(k.row.training[-len(response) :][keep] if len(response) else np.zeros(0))
    tokens = Tokens([p.tolist() for p, _ in pairs], [Response(i, tuple(r.tolist())) for i, (_, r) in enumerate(pairs)])
    autocast = spec.regime.get("autocast") if spec is not None else None
    tempered: LogProbabilities = function if temperature == 1 else lambda logits, ids: function(logits.float() / temperature, ids)
    variants = main_variants(spec, None) if spec is not None and spec.groups else [Variant(STOCK, "stock trainer")]
    nudged = [nudged_variant(spec)] if spec is not None and spec.groups else []
    found: dict[str, LogProbs] = {}

    def measure(variant: Variant, say: Callable[[float], None]) -> LogProbs:
        return score_variant(model, variant, tokens, logprobs=tempered, autocast=autocast, progress=say)

    measure_all(variants[:1], found, store, tokens, measure, progress)
    counted = {STOCK: _counting(found[STOCK], masks)}
    sums = sequence_sums([a - b for a, b in zip(engine, counted[STOCK], strict=True)])
    findings, _ = compare_columns(engine, counted[STOCK], sums, [k.where for k in kept], resamples=resamples)
    progress("look at the logits", None)
    sampling = _observe(model, tokens, masks, engine, tempered, temperature, autocast)
    looked = findings_of(sampling) if sampling is not None else []
    if any(f.kind == "processed" for f in looked):
        findings = []  # the logits say which processing it was, the columns only that something is wrong
    findings = [*looked, *findings]
    refused = [f for f in findings if f.refuses]
    notes = [*report.notes]
    changes: dict[str, object] = {"sampling": sampling}
    changes["findings"] = (*_named(refused), *report.findings, *_named(findings, refuses=False))
    if refused and not anyway:
        notes.append("the patched trainer was not scored: the stock one is not the policy that sampled")
        return Result(report.model_copy(update={**changes, "notes": tuple(notes)}), engine, counted)
    measure_all([*variants, *nudged], found, store, tokens, measure, progress)
    progress("bootstrap", None)
    counted = {name: _counting(values, masks) for name, values in found.items()}
    stock = counted[STOCK]
    whole = len(dumped) == len(kept)
    scored = tuple(
        Scored(
            name=v.name, title=v.title, edges=v.edges, gap=summarise(engine, counted[v.name], resamples=resamples),
            against_stock=None if v.name == STOCK else compare(engine, stock, counted[v.name], resamples=resamples),
            against_dump=compare(engine, dumped, counted[v.name], resamples=resamples) if whole else None,
        )
        for v in variants
    )  # fmt: skip
    floor = summarise(counted[EVERYTHING], counted[nudged[0].name], resamples=resamples) if nudged else None
    if report.model.get("device") == "cpu":
        notes.append(
            "the trainer ran here on a CPU: its GEMM and attention kernels are others than a GPU's, which is part of these figures"
        )
    if store.reused:
        notes.append(f"{len(store.reused)} variants were taken from an earlier run of the same command")
    changes |= {"scored": scored, "floor": floor, "notes": tuple(notes)}
    return Result(report.model_copy(update=changes), engine, counted)


def _named(findings: list[Finding], *, refuses: bool = True) -> list[Finding]:
    """Those of one kind, saying whose columns they are about."""
    return [
        f if f.kind in ("sampling", "processed") else f.model_copy(update={"what": f"the engine against the stock trainer: {f.what}"})
        for f in findings
        if f.refuses == refuses
    ]


def scorable(c: Collection) -> list[Kept]:
    # A trainer may write a response twice, when it was sampled and when it was trained on: the one with both columns is taken.
    once: dict[bytes, Kept] = {}
    for k in c.kept:
        if k.row.tokens is not None:
            key = k.step.encode() + k.row.tokens.tobytes() + k.inference.tobytes()
            if key not in once or once[key].training is None:
                once[key] = k
    kept = list(once.values())
    if not kept:
        raise GapInputError(
            "the dump has no token ids to score",
            where=", ".join(dict.fromkeys(f.title for f in c.files)),
            hint="miles: give rollout_data/*.pt instead of policy_loss_debug; vLLM's server: ask with return_token_ids",
        )
    steps = list(dict.fromkeys(k.step for k in kept))
    if len(steps) > 1:
        named = ", ".join(steps[:12]) + (", …" if len(steps) > 12 else "")
        raise GapInputError(
            f"the dump has rows of {len(steps)} training steps, and a model has the weights of one",
            where=named,
            hint="choose one with --step N",
        )
    return kept


def _counting(values: LogProbs, masks: list[Flags]) -> list[Array]:
    return [np.asarray(v[m], np.float64) for v, m in zip(values, masks, strict=True)]


def _observe(
    model: nn.Module, tokens: Tokens, masks: list[Flags], engine: list[Array], function: LogProbabilities, temperature: float,
    autocast: str | None,
) -> Sampling | None:  # fmt: skip
    """How the first tokens were drawn, at the temperature that is compared."""
    enough = int(np.searchsorted(np.cumsum([m.sum() for m in masks]), OBSERVED)) + 1
    observer = Observer(function, masks[:enough], engine[:enough], temperature)
    score(model, tokens.prompts[:enough], tokens.responses[:enough], logprobs=observer, autocast=autocast)
    return observer.result()
