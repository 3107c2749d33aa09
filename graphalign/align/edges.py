"""Comparing roundings: every training edge against the inference paths that carry the same value to the same place."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from graphalign.align.align import Alignment
from graphalign.align.regions import tail_ops
from graphalign.evaluate.aten import base
from graphalign.ir.dataflow import Dataflow, Ref
from graphalign.ir.graph import components
from graphalign.ir.paths import layer_of

PICKS = frozenset({"where", "masked_fill", "relu", "abs", "maximum", "minimum", "clamp", "clamp_min", "clamp_max"})
"""Ops that give one of their operands' elements in each place, or a constant, monotonically: rounding commutes with them."""
Verdict = Literal["agree", "keep", "round", "undetermined", "conflicting", "unpatchable", "unplaced"]


@dataclass(frozen=True)
class Path:
    """One way from a partner of the producer to a partner of the consumer on the inference side."""

    producer: int
    consumer: int
    roundings: tuple[str, ...]
    """Of the producer's value."""
    inner: tuple[str, ...] = ()
    """Of values in between that have no training partner."""
    via: tuple[str, ...] = ()
    """Buffers passed through."""


@dataclass(frozen=True)
class Finding:
    """What was found out about one training edge."""

    consumer: int
    slot: int
    producer: int
    training: tuple[str, ...]
    inference: tuple[str, ...] | None
    verdict: Verdict
    reason: str = ""
    paths: tuple[Path, ...] = ()


@dataclass
class Comparison:
    """All edges of the training graph, judged; and what each op without a partner is."""

    findings: list[Finding] = field(default_factory=list)
    interior: dict[tuple[str, int], str] = field(default_factory=dict)
    """(side, op) to why it exists on one side only."""
    leftover: dict[tuple[str, int], str] = field(default_factory=dict)
    """(side, op) to why it could not be placed."""


def compare(al: Alignment) -> Comparison:
    """Judge every edge of the training graph up to the last GEMM."""
    return _Comparer(al).run()


class _Comparer:
    def __init__(self, al: Alignment) -> None:
        self.al = al
        self.t, self.i = al.training, al.inference
        self.out = Comparison()
        self.operand_match = dict(al.outputs)
        self.tail = al.regions.tail
        self.ending = tail_ops(al.training)
        self.consumers = self.t.readers
        self.consumers_i = self.i.readers
        lonely = {op.id for op in self.t.ops if op.kind == "op" and op.id not in al.partners and op.id not in self.tail}
        self.members = components(lonely, self.t.graph.subgraph(lonely).edges())
        """Training ops without partners, as far as they hang together."""
        self.component = {x: n for n, group in enumerate(self.members) for x in group}
        self.closed = self._closed_components()

    def run(self) -> Comparison:
        for op in self.t.ops:
            if op.kind not in ("op", "anchor") or (op.id in self.tail and op.kind == "op"):
                continue
            if op.target == "logprobs" and not self.al.partners.get(op.id):
                continue  # an inference capture without the tail
            for slot, operand in enumerate(op.operands):
                for ref in dict.fromkeys(operand):
                    self.out.findings.append(self._judge(op.id, slot, ref))
        self._settle_selections()
        self._classify_inference()
        return self.out

    # -- one edge -------------------------------------------------------------------------------------------------------

    def _judge(self, consumer: int, slot: int, ref: Ref) -> Finding:
        producer = ref.producer
        ends = self._ends(consumer, slot)
        starts = set(self.al.partners.get(producer, ()))

        def finding(verdict: Verdict, inference: tuple[str, ...] | None, reason: str = "", paths: list[Path] | None = None) -> Finding:
            return Finding(consumer, slot, producer, ref.roundings, inference, verdict, reason, tuple(paths or ()))

        if consumer in self.al.rescaled and slot == 0:
            why = "the trainer scales the query before its attention, the engine scales the scores inside"
            return finding("unpatchable" if ref.roundings else "agree", None, why)
        if (factor := self.al.scaled.get(producer)) is not None:
            why = "the trainer scales the routing weights, the engine the experts' result, which both round before"
            exact = math.frexp(abs(factor))[0] == 0.5
            return finding("unpatchable" if ref.roundings and not exact else "agree", None, why)
        component = self.component.get(consumer) if self.t.ops[consumer].kind == "op" and not ends else None
        component = component if component is not None else (self.component.get(producer) if not starts else None)
        if component is not None:
            return self._judge_inside(component, consumer, slot, ref)
        if ends and producer in self.al.inlined:
            return finding("agree", (), "the engine has this number in its code, and no rounding changes it")
        if not ends or not starts:
            return finding("unplaced", None, "its ends have no partner on the inference side")
        paths = [p for i, slots in ends for p in self._paths(i, slots, starts)]
        if not paths:
            if not ref.roundings:
                return finding("agree", (), "no path without another aligned value between; neither rounds here")
            return finding("undetermined", None, "the inference side reaches the consumer's value another way")
        inner = tuple(dict.fromkeys(f for p in paths for f in p.inner))
        if inner:
            return finding(
                "undetermined", None, f"the inference side rounds an intermediate without a partner to {', '.join(inner)}", paths
            )
        kinds = {p.roundings for p in paths}
        if len(kinds) > 1:
            return finding(
                "conflicting", None, "copies on the inference side round differently: " + " / ".join(_show(k) for k in sorted(kinds)), paths
            )
        found = kinds.pop()
        return finding(*self._verdict(ref.roundings, found, producer, consumer), paths)

    def _verdict(
        self, training: tuple[str, ...], inference: tuple[str, ...], producer: int, consumer: int
    ) -> tuple[Verdict, tuple[str, ...], str]:
        if training == inference:
            return "agree", inference, ""
        p, c = self.t.ops[producer], self.t.ops[consumer]
        if training and not inference:
            head = p.target == "gemm" and {producer, consumer} <= self.ending  # code behind the model can have FP32 logits
            if p.kind == "anchor" and not head:
                return "unpatchable", inference, f"the engine's {p.target} leaves an unrounded result; the trainer's kernel rounds inside"
            if p.kind == "parameter":
                return "unpatchable", inference, "the engine holds this parameter in a wider format"
            if p.kind == "table" and layer_of(p.module) != layer_of(c.module) and not p.detail.get("outside"):
                return "unpatchable", inference, f"{p.module or 'the model'} rounds this table before the layer that reads it gets it"
            if c.target == "composite":
                return (
                    "unpatchable",
                    inference,
                    "the engine's fused op reads this operand unrounded; the trainer's module rounds inside too",
                )
            if c.kind == "anchor" and c.target != "logprobs" and not (c.target == "gemm" and c.dtype == "float32"):
                return "unpatchable", inference, f"the engine's {c.target} reads an unrounded operand; the trainer's kernel cannot"
            return "keep", inference, ""
        if inference and not training:
            if p.dtype.startswith("complex"):
                return "unpatchable", inference, "the trainer holds these as complex numbers, which have no low-precision format"
            return "round", inference, ""
        return "undetermined", inference, f"both sides round, differently: {_show(training)} and {_show(inference)}"

    def _ends(self, consumer: int, slot: int) -> list[tuple[int, list[int]]]:
        """Partners of a consumer, each with the operand slots to search."""
        op = self.t.ops[consumer]
        if op.kind == "anchor":
            hit = self.operand_match.get((consumer, slot))
            if hit is None and consumer in self.al.rescaled and slot == 0:
                return [(i, [0]) for i in self.al.partners.get(consumer, ())]
            return [(hit[0], [hit[1]])] if hit else []
        return [(i, list(range(len(self.i.ops[i].operands)))) for i in self.al.partners.get(consumer, ())]

    def _paths(self, consumer: int, slots: list[int], starts: set[int]) -> list[Path]:
        """Paths up from an inference op to any of `starts`, through ops that have no training partner.

        By hand: what was rounded on the way is part of where the walk is, so that its nodes are no nodes of the graph.
        """
        found: dict[Path, None] = {}
        todo: list[tuple[Ref, tuple[str, ...], tuple[str, ...]]] = [(r, (), ()) for s in slots for r in self.i.ops[consumer].operands[s]]
        seen: set[tuple[int, tuple[str, ...], tuple[str, ...]]] = set()
        while todo:
            ref, inner, via = todo.pop()
            via = via + tuple(v for v in ref.via if v not in via)
            if ref.producer in starts:
                found[Path(ref.producer, consumer, ref.roundings, inner, via)] = None
                continue
            if (ref.producer, ref.roundings, inner) in seen:
                continue
            seen.add((ref.producer, ref.roundings, inner))
            if self._lonely(ref.producer):
                todo += [(r, inner + ref.roundings, via) for operand in self.i.ops[ref.producer].operands for r in operand]
        return list(found)

    def _settle_selections(self) -> None:
        """Rounding what an op selects from and rounding what it selected are the same, if every reader gets the latter."""
        leaving: dict[int, list[Finding]] = {}
        for f in self.out.findings:
            leaving.setdefault(f.producer, []).append(f)
        why = "it is only selected here, and rounded to the same format right behind"

        def settled(f: Finding) -> bool:
            behind = leaving.get(f.consumer, ())
            agreed = all(g.verdict == "agree" and g.training == g.inference == f.training for g in behind)
            return f.verdict == "keep" and base(self.t.ops[f.consumer].target) in PICKS and bool(behind) and agreed

        self.out.findings = [replace(f, verdict="agree", reason=why) if settled(f) else f for f in self.out.findings]

    # -- values without a partner ----------------------------------------------------------------------------------------

    def _closed_components(self) -> list[bool]:
        """Whether each component is closed: everything it feeds is aligned."""
        closed = []
        for group in self.members:
            outs = [(c, s) for x in group for c, s in self.consumers.get(x, ()) if c not in self.component]
            good = bool(outs) and all(self._ends(c, s) for c, s in outs)
            good = good and not any(("training", x) in self.al.unsupported for x in group)
            closed.append(good)
            for x in group:
                why = self.al.unsupported.get(("training", x))
                if good:
                    self.out.interior["training", x] = "a step of the training side only, between aligned values"
                elif why:
                    self.out.leftover["training", x] = why.splitlines()[0]
                elif not outs:
                    self.out.leftover["training", x] = "its result is not used by anything aligned"
                else:
                    self.out.leftover["training", x] = "its value, and what depends on it, is not on the inference side"
        return closed

    def _judge_inside(self, component: int, consumer: int, slot: int, ref: Ref) -> Finding:
        """An edge at or inside a group of training ops without partners: judged by the smallest cut of aligned values around it."""

        def finding(verdict: Verdict, inference: tuple[str, ...] | None, reason: str = "", paths: list[Path] | None = None) -> Finding:
            return Finding(consumer, slot, ref.producer, ref.roundings, inference, verdict, reason, tuple(paths or ()))

        if not self.closed[component]:
            return finding("unplaced", None, "it feeds a value that is not on the inference side")
        group = self.members[component]
        edges = self._cut_edges(group)
        inner = {f for leaving, p in edges for f in p.roundings if leaving}
        starts = set(self.al.partners.get(ref.producer, ()))
        if ref.producer in self.component:
            if inner:
                steps = f"the inference side takes other steps here and rounds one of them to {', '.join(sorted(inner))}"
                if not ref.roundings:  # the trainer rounds nothing, and has no such value that it could round
                    return finding("unpatchable", None, f"{steps}, a value that the trainer does not compute")
                return finding("undetermined", None, steps)
            if not ref.roundings:
                return finding("agree", (), "inside a step of the training side only; neither side rounds here")
            return finding("keep", (), "no rounding between the aligned values around it", [p for _, p in edges][:4])
        entering = [p for leaving, p in edges if not leaving and p.producer in starts]
        kinds = {p.roundings for p in entering}
        if len(kinds) == 1:
            found = kinds.pop()
            return finding(*self._verdict(ref.roundings, found, ref.producer, consumer), entering)
        if not ref.roundings and not kinds:
            return finding("agree", (), "the inference side takes other steps here; neither rounds")
        return finding("undetermined" if not kinds else "conflicting", None, "the inference side takes other steps here", entering)

    def _cut_edges(self, group: list[int]) -> list[tuple[bool, Path]]:
        """Inference edges inside the cut around a group: (leaves an op without partner, edge)."""
        out: dict[tuple[bool, Path], None] = {}
        ends = [e for x in group for c, s in self.consumers.get(x, ()) if c not in self.component for e in self._ends(c, s)]
        for i, slots in ends:
            # by hand, because the order is that of a report's evidence: the last operand first, and in depth
            todo = [(i, r) for s in slots for r in self.i.ops[i].operands[s]]
            seen: set[tuple[int, Ref]] = set()
            while todo:
                at, ref = todo.pop()
                if (at, ref) in seen:
                    continue
                seen.add((at, ref))
                lonely = self._lonely(ref.producer)
                out[lonely, Path(ref.producer, at, ref.roundings, (), ref.via)] = None
                if lonely:
                    todo += [(ref.producer, r) for operand in self.i.ops[ref.producer].operands for r in operand]
        return list(out)

    def _lonely(self, i: int) -> bool:
        """Whether an inference op has no partner."""
        return self.i.is_op(i) and not self.al.reverse.get(i)

    # -- the inference side's own ------------------------------------------------------------------------------------------

    def _classify_inference(self) -> None:
        """Inference ops without partners: interior if all they feed is aligned, else leftover."""
        matched = {pair for _, pair in self.al.outputs}
        fine: dict[int, bool] = {}
        for op in reversed(self.i.ops):
            if op.kind != "op":
                continue
            reads = self.consumers_i.get(op.id, [])
            fine[op.id] = bool(self.al.reverse.get(op.id)) or (
                bool(reads) and all((c, s) in matched if self.i.ops[c].kind != "op" else fine.get(c, False) for c, s in reads)
            )
            if self.al.reverse.get(op.id):
                continue
            why = self.al.unsupported.get(("inference", op.id))
            if fine[op.id] and not why:
                self.out.interior["inference", op.id] = "a step of the inference side only, between aligned values"
            elif why:
                self.out.leftover["inference", op.id] = why.splitlines()[0]
            elif not reads:
                self.out.leftover["inference", op.id] = "its result is not used"
            else:
                self.out.leftover["inference", op.id] = "its value, and what depends on it, is not on the training side"


def _show(roundings: tuple[str, ...]) -> str:
    return " then ".join(roundings) if roundings else "unrounded"


def text(flow: Dataflow, finding: Finding) -> str:
    """One line for a finding."""
    p, c = flow.ops[finding.producer], flow.ops[finding.consumer]
    inference = "?" if finding.inference is None else _show(finding.inference)
    edge = f"{p.module}:{p.target} → {c.module}:{c.target}[{finding.slot}]"
    return f"{finding.verdict:12} {edge}  {_show(finding.training)} | {inference}  {finding.reason}"
