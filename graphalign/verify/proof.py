"""The proof of a patch: capture the patched model again, and replay its regions on the engine's real values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from graphalign.align.align import Alignment, Pair, align, prepare
from graphalign.align.edges import Comparison, compare
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph
from graphalign.patch.make import make_spec
from graphalign.patch.spec import PatchSpec
from graphalign.rewrite.apply import apply
from graphalign.sites.ends import Ends
from graphalign.sites.find import diff
from graphalign.sites.report import Report
from graphalign.verify.replay import Summary, replay, summarise
from graphalign.verify.values import EngineValues
from graphalign.verify.variants import everything_fp32, negated

Progress = Callable[[str, float | None], None]
ENOUGH = 0.9995
"""Share of bitwise equal elements that a patched region must reach."""


@dataclass
class Proof:
    """What was shown."""

    stock: Report
    patched: Report
    groups: tuple[str, ...]
    """Groups that the patch has."""
    edges: dict[str, int]
    """Variant to the number of edges it changes."""
    summaries: dict[str, Summary] = field(default_factory=dict)
    """Variant (stock, patched, negated, everything_fp32) to its replay scores by group; empty if nothing was recorded."""
    skipped: str = ""
    """Why nothing was replayed."""

    @property
    def remaining(self) -> tuple[str, ...]:
        """Groups of the patch that still have sites in the patched model: must be none."""
        return tuple(g.name for g in self.patched.groups if g.name in self.groups)

    @property
    def problems(self) -> list[str]:
        """Everything that is wrong, in words; empty if the patch is proven."""
        out = [f"{name}: sites remain after the patch" for name in self.remaining]
        out += [f"the patched model has {len(getattr(self.patched, k))} {k} entries that the stock model does not have" for k in _KINDS
                if len(getattr(self.patched, k)) > len(getattr(self.stock, k))]  # fmt: skip
        patched = self.summaries.get("patched")
        if patched is not None:
            for name in self.groups:
                low = patched.lowest.get(name)
                complete = set(self.groups) >= {g.name for g in self.stock.groups}
                if complete and low is not None and low < ENOUGH:
                    out.append(f"{name}: only {low:.4%} of a region's elements are bitwise the engine's")
        return out


_KINDS = ("leftovers", "undetermined", "conflicting", "semantic")


def prove(
    model: nn.Module,
    spec: PatchSpec,
    inference: InferenceGraph,
    record: Callable[[nn.Module], TrainingGraph],
    values: EngineValues | None,
    *,
    rules: Path,
    skipped: str = "",
    progress: Progress | None = None,
) -> Proof:
    """Prove a patch on a model.

    Args:
        model: the trainer's stock model, in eval mode; it is stock again afterwards.
        spec: the patch.
        inference: a capture of the engine.
        record: captures the training side of a model, stock or patched.
        values: the engine's real anchor values, from the same run; None to leave replay out.
        rules: folder of rules.
        skipped: why `values` is None.
        progress: called with (stage, fraction).

    Raises:
        PatchError: the patch does not fit the model.
    """
    say = progress or (lambda stage, fraction: None)
    say("capture the stock model", None)
    training = record(model)
    stock = diff(inference, training, rules=rules)
    pair = prepare(inference, training, rules)
    say("capture the patched model", None)
    with apply(model, spec):
        again = record(model)
    patched = diff(inference, again, rules=rules)
    out = Proof(stock, patched, tuple(g.name for g in spec.groups), {"stock": 0, "patched": spec.edges}, skipped=skipped)
    if values is None:
        return out
    al = align(pair)
    comparison = compare(al)
    reaches = operands_by_group(stock)
    variants = _variants(spec, al, comparison, pair, training, make_spec(stock))
    autocast = spec.regime.get("autocast")
    for name, variant in variants.items():
        say(f"replay: {name}", None)
        out.edges[name] = variant.edges if variant else 0
        if variant is None:
            out.summaries[name] = summarise(replay(model, pair, values, autocast=autocast), reaches)
        else:
            with apply(model, variant, allow_stale=True, trial=False):
                out.summaries[name] = summarise(replay(model, pair, values, autocast=autocast), reaches)
    return out


def _variants(
    spec: PatchSpec, al: Alignment, comparison: Comparison, pair: Pair, training: TrainingGraph, whole: PatchSpec
) -> dict[str, PatchSpec | None]:
    ends = Ends(training, pair.flow_t)
    out: dict[str, PatchSpec | None] = {"stock": None, "patched": spec}
    if {g.name for g in whole.groups} != {g.name for g in spec.groups}:
        out["all groups"] = whole
    out["negated"] = negated(spec, al, comparison, ends)
    out["all in FP32"] = everything_fp32(spec, al, comparison, ends)
    return out


def operands_by_group(report: Report) -> dict[str, set[str]]:
    """Group to the anchor operands, layer by layer, that its sites change."""
    out: dict[str, set[str]] = defaultdict(set)
    for g in report.groups:
        for s in g.sites:
            layers: Sequence[Any] = s.layers or (None,)
            for layer in layers:
                for pattern in s.reaches:
                    # a residual sum reaches into the next layer too
                    for at in (layer, layer + 1) if layer is not None else (None,):
                        out[g.name].add(pattern.replace("*", str(at), 1) if at is not None else pattern)
    return dict(out)
