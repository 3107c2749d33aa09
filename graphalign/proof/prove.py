"""The proof of a patch: capture the patched model again, and replay its regions on the engine's real values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from torch import nn

from graphalign.align.align import Alignment, Pair, prepare
from graphalign.align.edges import Comparison
from graphalign.align.finer import compare_pair
from graphalign.align.positions import range_notes
from graphalign.drift.snapshot import of_spec
from graphalign.errors import PatchError, PatchNotLiveError
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph
from graphalign.patch.make import make_spec
from graphalign.patch.spec import PatchSpec
from graphalign.proof.formats import changed_formats
from graphalign.proof.replay import replay
from graphalign.proof.values import EngineValues
from graphalign.proof.variants import everything_fp32, negated
from graphalign.proof.verdict import FP32, NEGATED, OTHERS, PATCHED, STOCK, WHOLE, Proof, without
from graphalign.rewrite.apply import apply
from graphalign.sites.ends import Ends
from graphalign.sites.find import diff
from graphalign.sites.report import Report

Progress = Callable[[str, float | None], None]


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
    formats = tuple(changed_formats(training, again))
    out = Proof(stock, patched, spec, {STOCK: 0, PATCHED: spec.edges}, skipped=skipped, formats=formats)
    out.notes = range_notes(pair.capture_t, pair.training, pair.arithmetic(0).positions, inference)
    if values is None:
        return out
    found = compare_pair(pair)
    pair, al, comparison = found.pair, found.alignment, found.comparison
    variants = _variants(spec, al, comparison, pair, stock)
    autocast = spec.regime.get("autocast")
    for name, variant in variants.items():
        say(f"replay: {name}", None)
        try:
            with apply(model, variant, allow_stale=True, trial=False) if variant else nullcontext():
                out.scores[name] = replay(model, pair, values, autocast=autocast, capture=training)
        except (PatchError, PatchNotLiveError) as e:  # a variant to compare with may edit what no patch edits
            if name == PATCHED:
                raise
            out.missing[name] = e.what
            continue
        out.edges[name] = variant.edges if variant else 0
    return out


def _variants(spec: PatchSpec, al: Alignment, comparison: Comparison, pair: Pair, stock: Report) -> dict[str, PatchSpec | None]:
    """What to replay. Beside a partial patch also the whole one, with and without its edits: alone it need not bring regions nearer."""
    ends = Ends(pair.capture_t, pair.flow_t)
    out: dict[str, PatchSpec | None] = {STOCK: None, PATCHED: spec}
    if not stock.semantic:  # else there is no map
        whole, mine = make_spec(stock), of_spec(spec).edges.keys()
        if of_spec(whole).edges.keys() - mine:
            out |= {WHOLE: whole, OTHERS: without(whole, mine)}
    out[NEGATED] = negated(spec, al, comparison, ends)
    out[FP32] = everything_fp32(spec, al, comparison, ends)
    return out
