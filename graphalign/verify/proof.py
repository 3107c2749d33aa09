"""The proof of a patch: capture the patched model again, and replay its regions on the engine's real values."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from graphalign.align.align import Alignment, Pair, align, prepare
from graphalign.align.edges import Comparison, compare
from graphalign.errors import PatchError, PatchNotLiveError
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
    left_out: dict[str, int] = field(default_factory=dict)
    """Group to the number of the stock model's sites that the patch leaves as they are."""

    @property
    def remaining(self) -> dict[str, int]:
        """Group to the number of sites that the patched model has beyond those that the patch left out: must be empty."""
        count = {g.name: sum(s.count for s in g.sites) - self.left_out.get(g.name, 0) for g in self.patched.groups}
        return {name: n for name, n in count.items() if n > 0}

    @property
    def unpatched(self) -> dict[str, int]:
        """Kind to the number of differences that remain because no patch removes them."""
        found = {kind: sum(e.count for e in getattr(self.patched, kind)) for kind in ("unpatchable", "conflicting", "undetermined")}
        found["left out"] = sum(self.left_out.values())
        return {kind: n for kind, n in found.items() if n}

    @property
    def assumptions(self) -> str:
        """Composite anchors that the proof takes for equal without having compared their inside, in words; empty if there are none."""
        return self.patched.assumptions

    @property
    def problems(self) -> list[str]:
        """Everything that is wrong, in words; empty if the patch is proven."""
        out = [f"{name}: {n} sites remain after the patch" for name, n in self.remaining.items()]
        for kind in _KINDS:
            before, after = _entries(self.stock, kind), _entries(self.patched, kind)
            out += [f"the patched model has {n} {kind} entries that the stock model does not have: {what}"
                    for (what, _), n in (after - before).items()]  # fmt: skip
            if kind == "unpatchable":  # what a patch cannot remove is still there, or it is not seen any more
                out += [f"{n} {kind} entries of the stock model are not found in the patched one: {what}"
                        for (what, _), n in (before - after).items()]  # fmt: skip
        if lost := sum(e.count for e in self.patched.leftovers):
            out.append(f"{lost} ops or edges have no partner on the other side: nothing is shown about what they compute")
        patched = self.summaries.get("patched")
        if patched is not None:
            for name in self.groups:
                low = patched.lowest.get(name)
                complete = set(self.groups) >= {g.name for g in self.stock.groups}
                if complete and low is not None and low < ENOUGH:
                    out.append(f"{name}: only {low:.4%} of a region's elements are bitwise the engine's")
        return out


_VALUE = re.compile(r"%\d+")
_KINDS = ("leftovers", "undetermined", "conflicting", "unpatchable", "semantic")


def _entries(report: Report, kind: str) -> Counter[tuple[str, str]]:
    """Entries of a kind, by what they are about and why, without value numbers; an op in place is the same as its function."""
    out: Counter[tuple[str, str]] = Counter()
    for e in getattr(report, kind):
        out[e.what.replace("_.", "."), _VALUE.sub("%", e.reason)] += e.count
    return out


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
    left_out = {g.name: sum(s.count for s in g.sites) for g in stock.groups}
    for g in spec.groups:
        left_out[g.name] = left_out.get(g.name, 0) - sum(len(e.pairs()) for e in g.edits)
    groups = tuple(g.name for g in spec.groups)
    out = Proof(stock, patched, groups, {"stock": 0, "patched": spec.edges}, skipped=skipped, left_out=left_out)
    if values is None:
        return out
    al = align(pair)
    comparison = compare(al)
    reaches = operands_by_group(stock)
    variants = _variants(spec, al, comparison, pair, make_spec(stock))
    autocast = spec.regime.get("autocast")
    for name, variant in variants.items():
        say(f"replay: {name}", None)
        try:
            with apply(model, variant, allow_stale=True, trial=False) if variant else nullcontext():
                out.summaries[name] = summarise(replay(model, pair, values, autocast=autocast, capture=training), reaches)
        except (PatchError, PatchNotLiveError) as e:  # a variant to compare with may edit what no patch edits
            if name == "patched":
                raise
            say(f"replay: {name}: left out, {e.what}", None)
            continue
        out.edges[name] = variant.edges if variant else 0
    return out


def _variants(spec: PatchSpec, al: Alignment, comparison: Comparison, pair: Pair, whole: PatchSpec) -> dict[str, PatchSpec | None]:
    ends = Ends(pair.capture_t, pair.flow_t)
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
