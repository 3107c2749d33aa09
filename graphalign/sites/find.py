"""The diff: two captures in, sites out. Nothing becomes a site before it was checked."""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphalign.align.accumulate import differing_sums
from graphalign.align.align import Alignment, Pair, Progress, prepare
from graphalign.align.anchors import Anchors, compare_anchors
from graphalign.align.check import EXACT, Check, Confirmation, Edit, check
from graphalign.align.edges import Comparison, Finding
from graphalign.align.finer import compare_pair
from graphalign.align.inside import Inside, compare_inside
from graphalign.align.positions import range_notes
from graphalign.evaluate.aten import FACTORIES, base
from graphalign.ir.collector import paused
from graphalign.ir.dataflow import Op
from graphalign.ir.drawing import Drawing
from graphalign.ir.inference import TAIL, UNLOWERED, InferenceGraph
from graphalign.ir.training import TrainingGraph
from graphalign.rules import rules_dir
from graphalign.sites.assumed import assumed_anchors, compared_anchors, old_masks, uncompared, unexercised, unrotated
from graphalign.sites.divergence import Divergence, Parting, explained, find_misplaced, find_partings, find_random, label
from graphalign.sites.ends import Ends, layer_of, pattern_of
from graphalign.sites.groups import Namer, load_group_rules
from graphalign.sites.names import name_notes
from graphalign.sites.nodes import statuses
from graphalign.sites.report import Entry, Evidence, Group, Report, Site

Draw = Callable[[Alignment, Ends, Iterable[Finding], dict[tuple[int, int, int], str], Iterable[Parting]], Drawing]
"""Prepares what `render` draws, see `pictures.choose.draw`."""
FEW = 8
"""Elements of a value whose rounding need not show in every layer: it is a site if it shows in one, and their graphs agree."""


@paused()
def diff(
    inference: InferenceGraph, training: TrainingGraph, *, rules: Path | None = None, progress: Progress | None = None,
    draw: Draw | None = None,
) -> Report:  # fmt: skip
    """Find every place where a rounding moved.

    Args:
        inference: the engine's compiled graph, as captured; of several compile ranges the decode range is compared.
        training: the eager graph, as captured.
        rules: folder of rules; the packaged ones if None.
        progress: called with (stage, fraction).
        draw: prepares diagrams; None: the report has none.

    Raises:
        BadInputError: the captures are of different models or cannot be read.
        AlignmentError: nothing could be aligned at all.
    """
    folder = rules_dir(rules)
    started = time.perf_counter()
    return diff_pair(prepare(inference, training, folder), folder, progress, started, draw)


def diff_pair(pair: Pair, rules: Path, progress: Progress | None = None, started: float | None = None, draw: Draw | None = None) -> Report:
    """The same for captures that are traced already; `started` is when that began, for the seconds in the report."""
    say = progress or (lambda stage, fraction: None)
    started = time.perf_counter() if started is None else started
    found = compare_pair(pair, progress)
    pair, al, comparison = found.pair, found.alignment, found.comparison
    aligned = time.perf_counter()
    say("check", 0.0)
    inside = compare_inside(pair, al)
    anchors = compare_anchors(pair, al)
    differences = anchors.differences + inside.differences()
    divergence = find_partings(al, comparison, differences, pair.unfolded, pair.capture_i.header.permuted)
    divergence = find_random(al.training.ops, pair.training.refs, pair.drawn, divergence)
    comparison.findings = [_withdrawn(f) if f.consumer in divergence.behind else f for f in comparison.findings]
    proposed = [f for f in comparison.findings if f.verdict in ("keep", "round")]
    # a table that is rounded outside the layers is no site, but the others are checked as if it were not rounded; so are scaled experts
    assumed = [f for f in comparison.findings if f.verdict == "unpatchable" and al.training.ops[f.producer].kind == "table"]
    scaled = [f for f in comparison.findings if f.verdict == "unpatchable" and f.producer in al.scaled]
    result = check(pair, [*map(_edit, proposed), *map(_assume, assumed), *(Edit(f.consumer, f.slot, "keep") for f in scaled)])
    exact = {at for at, c in result.confirmations.items() if c.exact}
    comparison.findings = [_harmless(f) if (f.consumer, f.slot) in exact else f for f in comparison.findings]
    unjudged = {(f.consumer, f.slot) for f in comparison.findings if f.verdict not in ("agree", "keep", "round")}
    divergence = find_misplaced(al, result, divergence, lambda key: explained(al, key, unjudged))
    comparison.findings = [_withdrawn(f) if f.consumer in divergence.behind else f for f in comparison.findings]
    checked = time.perf_counter()
    say("check", 1.0)
    say("report", 0.0)
    report = _Builder(pair, al, comparison, result, Namer(al, load_group_rules(rules)), divergence, inside, anchors).build(
        {"align": aligned - started, "check": checked - aligned}, len(assumed), draw
    )
    say("report", 1.0)
    return report


def _withdrawn(f: Finding) -> Finding:
    """A finding behind a divergence: no site."""
    if f.verdict not in ("keep", "round"):
        return f
    return replace(f, verdict="unplaced", reason="it is behind a place where the sides part")


def _harmless(f: Finding) -> Finding:
    """A finding whose roundings change no element."""
    return replace(f, verdict="agree", reason="the value is exact in this format already") if f.verdict in ("keep", "round") else f


def _assume(f: Finding) -> Edit:
    """What would make an unpatchable table's reader agree with the engine's."""
    return Edit(f.consumer, f.slot, "keep") if f.training or not f.inference else Edit(f.consumer, f.slot, "round", f.inference[-1])


def _edit(f: Finding) -> Edit:
    return Edit(f.consumer, f.slot, f.verdict, f.inference[-1] if f.inference else "")


class _Builder:
    def __init__(
        self,
        pair: Pair,
        al: Alignment,
        comparison: Comparison,
        result: Check,
        namer: Namer,
        divergence: Divergence,
        inside: Inside,
        anchors: Anchors,
    ) -> None:
        self.pair, self.al, self.comparison, self.check, self.namer = pair, al, comparison, result, namer
        self.divergence = divergence
        self.inference, self.training = pair.capture_i, pair.capture_t
        self.t, self.i = al.training, al.inference
        self.ends = Ends(self.training, al.training)
        self.assumed, self.compared = assumed_anchors(inside), compared_anchors(inside)
        self.unexercised = unexercised(al)
        self.anchors = anchors
        self.refused: list[tuple[Finding, str]] = []
        self.site_of: dict[tuple[int, int, int], str] = {}
        """(consumer, slot, producer) to the site it is."""

    def build(self, seconds: dict[str, float], assumed: int = 0, draw: Draw | None = None) -> Report:
        """The report."""
        groups = self._groups()
        semantic = self._partings(self.divergence.semantic)
        header = self.inference.header
        return Report(
            target={**header.target, "simulated": header.simulated},
            regime=self.training.header.regime,
            # the engine's environment may have another Transformers than the trainer's, which is the one that is patched
            versions={**self.training.header.versions, **{k: v for k, v in header.versions.items() if k != "transformers"}},
            model={
                **self.training.header.model,
                "engine_config_digest": header.model.get("config_digest"),
                "weights": header.model.get("weights"),
                "engine_class": header.model.get("engine_class"),
                **({"own_dtype": header.model["own_dtype"]} if header.model.get("own_dtype") else {}),
            },
            compile=header.compile,
            simulated=header.simulated,
            groups=groups,
            interior=self._entries([(s, i, why) for (s, i), why in self.comparison.interior.items()]),
            leftovers=self._leftovers(),
            undetermined=self._findings("undetermined") + self._refused() + self._unexplained(),
            conflicting=self._findings("conflicting"),
            unpatchable=self._findings("unpatchable") + self._entries([("training", i, why) for i, why in self._sums()]),
            semantic=semantic,
            assumed=self._entries([("training", i, why) for i, why in self.assumed.items()]),
            unexercised=self._entries([(side, i, why) for (side, i), why in self.unexercised.items()]),
            tail=self._entries(
                [
                    ("training", i, "behind the engine's compiled graph")
                    for i in sorted(self.al.regions.tail)
                    if self.t.ops[i].kind in ("op", "anchor")
                ]
            ),
            stats=self._stats(groups, seconds, assumed),
            nodes=statuses(self.al, self.comparison, self._where, self.assumed, self._known(), self.unexercised),
            notes=self.pair.ranges
            + tuple(header.notes)
            + tuple(self.training.header.notes)
            + self.i.notes
            + self._table_notes()
            + range_notes(self.training, self.pair.training, self.pair.arithmetic(0).positions, self.inference)
            + name_notes(self.al, self.inference, self.training)
            + old_masks(self.anchors.old),
            uncompared=uncompared(self.al, self.anchors.unknown, tail=any(g.name == TAIL for g in self.inference.graphs)),
            unrotated=unrotated(self.t),
            drawing=draw(self.al, self.ends, self.comparison.findings, self.site_of, self.divergence.semantic) if draw else None,
        )

    # -- sites ----------------------------------------------------------------------------------------------------------

    def _groups(self) -> tuple[Group, ...]:
        same: dict[tuple[Any, ...], list[Finding]] = defaultdict(list)
        unseen: list[tuple[tuple[Any, ...], Finding, str]] = []
        for f in self.comparison.findings:
            if f.verdict not in ("keep", "round"):
                continue
            confirmation = self.check.confirmations.get((f.consumer, f.slot))
            p, c = self.ends.end(f.producer), self.ends.end(f.consumer, f.slot)
            here, there = layer_of(self.t.ops[f.consumer].module), layer_of(self.t.ops[f.producer].module)
            distance = here - there if here is not None and there is not None else None
            key = self.namer.name(f), f.verdict, p, c, f.training, f.inference, distance
            if confirmation is not None and confirmation.ok:
                same[key].append(f)
            else:
                unseen.append((key, f, _why_refused(confirmation, bool(self.divergence.semantic or self.divergence.opaque))))
        for key, f, why in unseen:  # one number, as of an activation's learned slope, may round to itself in some layers
            if key in same and self._elements(f.producer) <= FEW:
                same[key].append(f)
            else:
                self.refused.append((f, why))
        named: dict[str, list[Site]] = defaultdict(list)
        for (name, kind, p, c, training, inference, _), findings in same.items():
            shares = [self.check.confirmations[f.consumer, f.slot] for f in findings]
            findings.sort(key=lambda f: layer_of(self.t.ops[f.consumer].module) or 0)
            layers = tuple(n for f in findings if (n := layer_of(self.t.ops[f.consumer].module)) is not None)
            producers = tuple(n for f in findings if (n := layer_of(self.t.ops[f.producer].module)) is not None)
            site = Site(
                id=f"{name}.{len(named[name]) + 1}",
                kind=kind,
                producer=p,
                consumer=c,
                training=training,
                inference=inference,
                layers=layers,
                producer_layers=producers,
                evidence=self._evidence(findings),
                effect=sum(s.share for s in shares) / len(shares),
                reaches=tuple(dict.fromkeys(pattern_of(r) for s in shares for r in s.changed)),
                count=len(findings),
            )
            named[name].append(site)
            self.site_of.update({(f.consumer, f.slot, f.producer): site.id for f in findings})
        out = []
        for name, sites in sorted(named.items()):
            kinds = {s.kind for s in sites}
            layers = tuple(sorted({n for s in sites for n in s.layers}))
            out.append(Group(name=name, kind=kinds.pop() if len(kinds) == 1 else "mixed", layers=layers, sites=tuple(sites)))
        return tuple(out)

    def _elements(self, producer: int) -> int:
        """How many elements a training op makes."""
        node = self.t.ops[producer].detail.get("node")
        outputs = self.training.nodes[node].outputs if node is not None else ()
        return math.prod(outputs[0].shape) if outputs and outputs[0] is not None else FEW + 1

    def _evidence(self, findings: list[Finding]) -> tuple[Evidence, ...]:
        out: dict[tuple[str, ...], Evidence] = {}
        for f in findings:
            for p in f.paths:
                producer, consumer = self.i.ops[p.producer], self.i.ops[p.consumer]
                kernel = consumer.where or consumer.name
                pattern = (re.sub(r"_\d+$", "", kernel), producer.target, consumer.target)
                out.setdefault(
                    pattern,
                    Evidence(
                        layer=layer_of(self.t.ops[f.consumer].module),
                        kernel=kernel,
                        producer=producer.name,
                        consumer=consumer.name,
                        buffers=p.via,
                    ),
                )
        return tuple(list(out.values())[:4])

    # -- everything else ----------------------------------------------------------------------------------------------------

    def _where(self, side: str, op: Op) -> str:
        if side == "inference":
            return f"{op.where or op.name}" + (f" ({op.source})" if op.source else "")
        s = self.ends.source(op)
        return f"{pattern_of(op.module or op.target)}" + (f" ({s.file}:{s.line} {s.text})" if s else "")

    def _entries(self, items: list[tuple[str, int, str]]) -> tuple[Entry, ...]:
        """Equal entries of different layers become one."""
        grouped: dict[tuple[str, str, str, str], list[Op]] = defaultdict(list)
        for side, i, why in items:
            op = (self.t if side == "training" else self.i).ops[i]
            where = self._where(side, op) if side == "training" else pattern_of(op.module)
            grouped[side, op.target, where, why].append(op)
        return tuple(
            Entry(side=side, what=what, where=where, reason=why, count=len(ops), names=tuple(o.name for o in ops[:8]), layers=_layers(ops))
            for (side, what, where, why), ops in grouped.items()
        )

    def _finding_entries(self, findings: list[tuple[Finding, str]]) -> tuple[Entry, ...]:
        grouped: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
        for f, why in findings:
            p, c = self.t.ops[f.producer], self.t.ops[f.consumer]
            what = f"{label(p)} → {label(c)}[{f.slot}]"
            grouped[what, f"{self._where('training', p)} → {self._where('training', c)}", why].append(f)
        return tuple(
            Entry(
                side="both",
                what=what,
                where=where,
                reason=why,
                count=len(fs),
                names=tuple(self.t.ops[f.consumer].name for f in fs[:8]),
                layers=_layers([self.t.ops[f.consumer] for f in fs]),
            )
            for (what, where, why), fs in grouped.items()
        )

    def _findings(self, verdict: str) -> tuple[Entry, ...]:
        return self._finding_entries([(f, f.reason) for f in self.comparison.findings if f.verdict == verdict])

    def _sums(self) -> list[tuple[int, str]]:
        return differing_sums(self.t, self.i, self.al.partners)

    def _refused(self) -> tuple[Entry, ...]:
        return self._finding_entries([(f, f"proposed as {f.verdict}, but {why}") for f, why in self.refused])

    def _unplaced(self) -> tuple[Entry, ...]:
        """Edges whose ends have no partner although the ops themselves are not listed."""
        listed = {i for side, i in self.comparison.leftover if side == "training"} | set(self.divergence.inside)
        found = [
            (f, f.reason)
            for f in self.comparison.findings
            if f.verdict == "unplaced" and f.consumer not in listed and f.producer not in listed
        ]
        return self._finding_entries(found)

    def _unexplained(self) -> tuple[Entry, ...]:
        """Anchor operands that the sites' edits do not reproduce."""
        parted = set(self.al.parted)
        bad = {
            (f.consumer, f.slot)
            for f in self.comparison.findings
            if f.verdict in ("conflicting", "unpatchable", "undetermined", "unplaced")
        }
        bad |= {(f.consumer, f.slot) for f, _ in self.refused}
        out = []
        for key, share in self.check.patched.items():
            if share < EXACT and key not in parted and key[0] not in self.divergence.behind and not explained(self.al, key, bad):
                out.append(self._operand(key, f"with all sites applied {1 - share:.2%} of its elements still differ from the engine's"))
        for key, why in self.check.uncompared.items():
            if key not in parted and key[0] not in self.divergence.inside:
                out.append(self._operand(key, f"not checked: {why}"))
        return tuple(out)

    def _operand(self, key: tuple[int, int], reason: str) -> Entry:
        """An entry about one anchor operand."""
        op = self.t.ops[key[0]]
        what, where = f"operand {key[1]} of {op.target}", self._where("training", op)
        return Entry(side="both", what=what, where=where, names=(op.name,), layers=_layers([op]), reason=reason)

    def _leftovers(self) -> tuple[Entry, ...]:
        """What could not be placed. What the engine runs as an opaque op is one entry per module."""
        inside = self.divergence.inside
        rest = [(s, i, why) for (s, i), why in self.comparison.leftover.items() if s != "training" or i not in inside]
        modules: dict[tuple[str, str, str], list[Op]] = defaultdict(list)
        for i, target in inside.items():
            op = self.t.ops[i]
            modules[pattern_of(op.module), target, self._why_opaque(op)].append(op)
        return (
            self._entries(rest)
            + tuple(
                Entry(
                    side="training",
                    what=f"{target} of the engine",
                    where=module,
                    layers=_layers(ops),
                    count=len(ops),
                    names=tuple(o.name for o in ops[:8]),
                    reason=why,
                )
                for (module, target, why), ops in modules.items()
            )
            + self._partings(tuple(p for p in self.divergence.opaque if p.op.id not in inside))
            + self._unplaced()
        )

    def _why_opaque(self, op: Op) -> str:
        for module, why in self.pair.unfolded.items():
            if op.module == module or op.module.startswith(module + "."):
                return f"the engine runs {pattern_of(module)} as one op, and the trainer's module cannot be taken as one: {why}"
        return "opaque: the engine runs this module's ops as one, which no rule in rules/ops describes"

    def _partings(self, partings: tuple[Parting, ...]) -> tuple[Entry, ...]:
        """Equal partings of different layers become one entry."""
        grouped: dict[tuple[str, str], list[Parting]] = defaultdict(list)
        for p in partings:
            grouped[p.what, self._where("training", p.op)].append(p)
        return tuple(
            Entry(
                side="both",
                what=what,
                where=where,
                reason=same[0].reason,
                count=len({p.op.id for p in same}),
                names=tuple(dict.fromkeys(p.op.name for p in same))[:8],
                layers=_layers([p.op for p in same]),
            )
            for (what, where), same in grouped.items()
        )

    def _table_notes(self) -> tuple[str, ...]:
        return tuple(
            f"table {self.t.ops[m.op].name} differs from every table of the engine (best: {m.worst:.1f} units in the last place)"
            for m in self.al.tables
            if not m.name and m.op not in self.al.inlined and base(self.t.ops[m.op].target) not in FACTORIES
        )

    def _known(self) -> dict[int, str]:
        """What is said of an anchor besides what it is."""
        return {**self.compared, **{op: f"not compared: {why}" for op, why in self.anchors.unknown.items()}}

    # -- numbers and nodes -----------------------------------------------------------------------------------------------------

    def _stats(self, groups: tuple[Group, ...], seconds: dict[str, float], assumed: int) -> dict[str, Any]:
        verdicts = Counter(f.verdict for f in self.comparison.findings)
        stock, patched = list(self.check.stock.values()), list(self.check.patched.values())
        ops_t = [o for o in self.t.ops if o.kind == "op" and o.id not in self.al.regions.tail]
        unlowered = sum(kernel.kind == UNLOWERED for graph in self.inference.graphs for kernel in graph.kernels)
        return {
            "training_ops": len(ops_t),
            "training_paired": sum(1 for o in ops_t if o.id in self.al.partners),
            "inference_ops": sum(1 for o in self.i.ops if o.kind == "op"),
            "inference_paired": len([i for i in self.al.reverse if self.i.ops[i].kind == "op"]),
            "anchors": sum(1 for o in self.t.ops if o.kind == "anchor" and o.id in self.al.partners),
            "edges": len(self.comparison.findings),
            "agree": verdicts["agree"],
            "sites": sum(s.count for g in groups for s in g.sites),
            "chance_match_rate": self.al.chance,
            "arrays_joined": self.al.arrays,
            "check": {
                "operands": len(patched),
                "assumed_tables": assumed,
                "equal_stock": sum(stock) / len(stock) if stock else None,
                "equal_with_sites": sum(patched) / len(patched) if patched else None,
                "lowest_with_sites": min(patched) if patched else None,
            },
            **({"unlowered": unlowered} if unlowered else {}),
            "seconds": {k: round(v, 3) for k, v in seconds.items()},
        }


def _layers(ops: list[Op]) -> tuple[int, ...]:
    return tuple(sorted({n for o in ops if (n := layer_of(o.module)) is not None}))


def _why_refused(confirmation: Confirmation | None, parted: bool) -> str:
    if confirmation is None or not confirmation.predicted:
        return "no anchor operand behind it could be compared"
    why = "leaving it out changes nothing the engine's anchors read"
    return f"{why}, as far as that shows in a model whose sides part elsewhere" if parted else why
