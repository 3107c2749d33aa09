"""The whole measurement on one machine: variants, attribution, residue, drift."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from graphalign.align.finer import compare_pair
from graphalign.align.pair import Pair
from graphalign.gap import variants as v
from graphalign.gap.attribution import attribute, wanted_subsets
from graphalign.gap.measure import Progress, Tokens, measure_all, results, score_variant
from graphalign.gap.report import Attribution, VariantResult
from graphalign.gap.residue import Residue, drift_by_layer, measure_residue
from graphalign.gap.statistics import GapStatistics, summarise
from graphalign.gap.store import LogProbs, Store
from graphalign.logprobs import LogProbabilities, fp32_log_softmax
from graphalign.patch.spec import PatchSpec
from graphalign.proof.values import EngineValues
from graphalign.proof.variants import everything_fp32
from graphalign.rewrite.apply import apply
from graphalign.sites.ends import Ends


@dataclass
class Found:
    """What `measure_gap` found."""

    variants: tuple[VariantResult, ...]
    attribution: Attribution | None
    logprobs: dict[str, LogProbs]
    """Variant to the log-probabilities of every sequence."""
    floor: GapStatistics | None = None
    residue: Residue | None = None
    drift: dict[str, dict[int, float]] = field(default_factory=dict)


def measure_gap(
    model: nn.Module,
    spec: PatchSpec,
    pair: Pair,
    tokens: Tokens,
    store: Store,
    *,
    values: EngineValues | None = None,
    shared: Callable[[nn.Module, tuple[str, ...]], Any] | None = None,
    logprobs: LogProbabilities = fp32_log_softmax,
    attribution: bool = True,
    resamples: int,
    progress: Progress,
) -> Found:
    """Score the engine's tokens with every variant of the trainer, and say where the rest of the gap comes from.

    Args:
        model: the stock trainer, in eval mode; stock again afterwards.
        spec: the whole patch.
        pair: both captures, of the stock model.
        tokens: the engine's tokens and log-probabilities.
        store: keeps every variant's result.
        values: the engine's anchor values for one prompt; without them residue and drift are left out.
        shared: makes the mode in which the trainer uses the engine's kernels; None if there are none here.
        logprobs: the trainer's log-probability function.
        attribution: also measure the subsets that the Shapley shares need.
        resamples: bootstrap resamples.
        progress: called with (stage, fraction).

    Raises:
        PatchError: the patch does not fit the model.
        GapInputError: log-probabilities that cannot belong to these tokens.
    """
    names = tuple(g.name for g in spec.groups)
    compared = compare_pair(pair)
    pair = compared.pair
    ends = Ends(pair.capture_t, pair.flow_t)
    pointwise = everything_fp32(spec, compared.alignment, compared.comparison, ends) if spec.groups else None
    main = v.main_variants(spec, pointwise)
    if shared is not None and spec.groups:
        main += v.shared_variants(spec)
    nudged = [v.nudged_variant(spec)] if spec.groups else []
    subsets = [v.subset_variant(spec, s) for s in wanted_subsets(names)] if attribution and names else []
    order = list({x.name: x for x in [*main, *subsets]}.values())
    found: dict[str, LogProbs] = {}
    autocast = spec.regime.get("autocast")

    def measure(variant: v.Variant, say: Callable[[float], None]) -> LogProbs:
        return score_variant(model, variant, tokens, logprobs=logprobs, autocast=autocast, shared=shared, progress=say)

    measure_all(order[:1], found, store, tokens, measure, progress)
    tokens.check(found[v.STOCK])
    measure_all([*order, *nudged], found, store, tokens, measure, progress)
    paper = v.subset_name(spec, v.paper_groups(spec)) if v.paper_groups(spec) else None
    progress("bootstrap", None)
    out = Found(results(order, found, tokens, paper, resamples=resamples), None, found)
    if nudged:
        out.floor = summarise(found[v.EVERYTHING], found[v.NUDGED], resamples=resamples, strata=tokens.seeds)
    if subsets:
        out.attribution = attribute(spec, found, tokens, resamples=resamples)
    if values is not None:
        progress("compare kernels", None)
        handle = apply(model, spec) if spec.groups else nullcontext()
        with handle:
            out.residue = measure_residue(model, pair, values, autocast=autocast)
            out.drift[v.EVERYTHING] = drift_by_layer(model, pair, values, autocast=autocast)
        out.drift[v.STOCK] = drift_by_layer(model, pair, values, autocast=autocast)
    return out
