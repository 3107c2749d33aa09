"""Scores one set of rollouts with every variant of the trainer, and works the statistics out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from graphalign.gap.inputs import check
from graphalign.gap.report import Measured, VariantResult
from graphalign.gap.score import score
from graphalign.gap.statistics import compare, summarise
from graphalign.gap.store import LogProbs, Store
from graphalign.gap.variants import STOCK, Variant
from graphalign.logprobs import LogProbabilities, fp32_log_softmax
from graphalign.rewrite.apply import apply

Progress = Callable[[str, float | None], None]


class Response(Protocol):
    """What is needed of a generated response (`capture.rollouts.Response`)."""

    @property
    def seed(self) -> int: ...
    @property
    def prompt(self) -> int: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def sampled(self) -> tuple[float, ...]: ...
    @property
    def prefill(self) -> tuple[float, ...]: ...


class Tokens:
    """The engine's side of the comparison."""

    def __init__(self, prompts: Sequence[Sequence[int]], responses: Sequence[Response]) -> None:
        kept = [r for r in responses if r.tokens]
        self.empty = len(responses) - len(kept)
        self.prompts = [prompts[r.prompt] for r in kept]
        self.responses = [r.tokens for r in kept]
        self.seeds = [r.seed for r in kept]
        self.engine: dict[str, LogProbs] = {
            "sampled": [np.asarray(r.sampled, np.float64) for r in kept],
            "prefill": [np.asarray(r.prefill, np.float64) for r in kept],
        }

    @property
    def lengths(self) -> list[int]:
        return [len(r) for r in self.responses]

    def check(self, stock: LogProbs) -> None:
        """Refuse log-probabilities that cannot be of the same tokens and policy.

        Raises:
            GapInputError: with the likely causes.
        """
        check(self.engine["sampled"], stock)
        check(self.engine["prefill"], stock)

    def of_seed(self, seed: int, values: LogProbs) -> LogProbs:
        """The sequences of one seed."""
        return [v for v, s in zip(values, self.seeds, strict=True) if s == seed]


def score_variant(
    model: nn.Module,
    variant: Variant,
    tokens: Tokens,
    *,
    logprobs: LogProbabilities = fp32_log_softmax,
    autocast: str | None = None,
    shared: Callable[[nn.Module, tuple[str, ...]], Any] | None = None,
    progress: Callable[[float], None] | None = None,
) -> LogProbs:
    """The log-probabilities of one variant. The model is stock before and after.

    Args:
        model: the stock model, in eval mode.
        variant: what to do to it.
        tokens: what to score.
        logprobs, autocast, progress: see `score`.
        shared: makes the mode in which the engine's kernels replace the trainer's; needed for a variant with `shared`.
    """

    def run(m: nn.Module, mode: Any = None) -> LogProbs:
        within = (lambda: mode) if mode is not None else nullcontext
        return score(m, tokens.prompts, tokens.responses, logprobs=logprobs, autocast=autocast, within=within, progress=progress)

    if variant.upcast:
        return run(copy.deepcopy(model).float())
    if variant.nudge:
        with _nudged(model):
            return score_variant(model, replace(variant, nudge=False), tokens, logprobs=logprobs, autocast=autocast, progress=progress)
    handle = apply(model, variant.spec, allow_stale=False) if variant.spec is not None else nullcontext()
    with handle:
        if not variant.shared:
            return run(model)
        assert shared is not None
        # compile what is patched before the mode is on, as the replay does
        score(model, tokens.prompts[:1], [tokens.responses[0][:2]], logprobs=logprobs, autocast=autocast)
        return run(model, shared(model, variant.shared))


@contextmanager
def _nudged(model: nn.Module) -> Iterator[None]:
    """Within the block the first element of the first vector parameter, a norm's weight, is the next larger number of its format."""
    weight = next((p for p in model.parameters() if p.dim() == 1), next(model.parameters()))
    element = weight.data.view(-1)[:1]
    before = element.clone()
    element.copy_(torch.nextafter(before, torch.full_like(before, torch.inf)))
    try:
        yield
    finally:
        element.copy_(before)


def measured(tokens: Tokens, side: str, values: LogProbs, stock: LogProbs | None, paper: LogProbs | None, *, resamples: int) -> Measured:
    """Statistics of one variant against the engine's "sampled" or "prefill" log-probabilities, pooled over seeds and for each."""
    engine = tokens.engine[side]
    seeds = list(dict.fromkeys(tokens.seeds))
    part = {s: (tokens.of_seed(s, engine), tokens.of_seed(s, values)) for s in seeds}
    against: dict[str, Any] = {"against_stock": None}
    if stock is not None:
        against = {
            "against_stock": compare(engine, stock, values, resamples=resamples, strata=tokens.seeds),
            "against_stock_by_seed": {s: compare(part[s][0], tokens.of_seed(s, stock), part[s][1], resamples=resamples) for s in seeds},
        }
    if paper is not None:
        against["against_paper"] = compare(engine, paper, values, resamples=resamples, strata=tokens.seeds)
    return Measured(
        pooled=summarise(engine, values, resamples=resamples, strata=tokens.seeds),
        by_seed={s: summarise(*part[s], resamples=resamples) for s in seeds},
        **against,
    )


def measure_all(
    variants: Sequence[Variant],
    found: dict[str, LogProbs],
    store: Store,
    tokens: Tokens,
    measure: Callable[[Variant, Callable[[float], None]], LogProbs],
    progress: Progress,
) -> None:
    """Measure what is not in `found` yet, each saved as it is done; says how much time is left.

    Args:
        variants: in the order in which they are measured.
        found: filled in: variant name to its log-probabilities.
        store: where they are kept.
        tokens: what is scored.
        measure: scores one variant.
        progress: called with the stage and the fraction done.
    """
    todo = [v for v in variants if v.name not in found]
    label = f"score {len(todo)} variants" if len(todo) > 1 else f"score the {todo[0].title}" if todo else ""
    for done, variant in enumerate(todo):

        def say(fraction: float, at: int = done) -> None:
            progress(label, (at + fraction) / len(todo))

        def run(variant: Variant = variant, say: Callable[[float], None] = say) -> LogProbs:
            return measure(variant, say)

        say(0.0)
        spec = variant.spec.model_dump(mode="json", include={"groups", "regime"}) if variant.spec else None
        found[variant.name] = store.get(
            variant.name, [spec, variant.upcast, variant.shared, *(["nudge"] if variant.nudge else [])], tokens.lengths, run
        )


def results(
    variants: Sequence[Variant], found: dict[str, LogProbs], tokens: Tokens, paper: str | None, *, resamples: int
) -> tuple[VariantResult, ...]:
    """Statistics of every variant, in order."""
    stock = found[STOCK]
    papers = found.get(paper) if paper else None
    out = []
    for v in variants:
        values = found[v.name]
        base = None if v.name == STOCK else stock
        beside = None if v.name in (STOCK, paper) else papers
        sides = {side: measured(tokens, side, values, base, beside, resamples=resamples) for side in ("sampled", "prefill")}
        out.append(VariantResult(name=v.name, title=v.title, groups=v.groups, edges=v.edges, **sides))
    return tuple(out)
