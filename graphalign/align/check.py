"""The independent check: run both sides with their roundings and compare what the anchors read.

It shares no code with the proposal. There is no join here: operands are compared by anchor, in the anchor's own layout,
element by element, with signs, on other random values, other tokens and other positions, every layer with values of its
own, no shared residual sums. The training side runs with the proposed edits; the inference side as captured.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphalign.align.align import Pair
from graphalign.align.tables import snap
from graphalign.evaluate import run_inference, run_training
from graphalign.evaluate.run_training import Edits
from graphalign.evaluate.values import round_to
from graphalign.ir.args import references
from graphalign.ir.dataflow import Op

CHECK_SEED = 77003
EXACT = 0.9999
"""Share of an operand's elements that must be equal; float64 noise may flip a tie, nothing else may differ."""
FAR = 2.0**-3
"""Distance that roundings to BF16 (2⁻⁹ each) do not reach, relative to an element and the operand's root mean square."""
HORIZON = 2
"""A site's effect is followed across this many residual sums."""


@dataclass(frozen=True)
class Edit:
    """One proposed change: an operand read unrounded, or rounded to a format."""

    consumer: int
    slot: int
    kind: str
    """`keep` or `round`."""
    format: str = ""


@dataclass
class Confirmation:
    """What leaving one edit out does."""

    changed: tuple[str, ...]
    """Anchor operands that stop agreeing with the engine."""
    predicted: tuple[str, ...]
    """Anchor operands that must."""
    share: float
    """Share of their elements that differ."""
    exact: bool = False
    """The operand is the same with and without its roundings (a selection, a product with a power of two): no site, and no failure."""

    @property
    def ok(self) -> bool:
        """Predicted operands change and no others. One of several may stay the same: a square's mean hides small changes."""
        return bool(self.changed) and set(self.changed) <= set(self.predicted)


@dataclass
class Check:
    """Agreement of anchor operands: share of equal elements, by (training op, slot)."""

    stock: dict[tuple[int, int], float] = field(default_factory=dict)
    patched: dict[tuple[int, int], float] = field(default_factory=dict)
    confirmations: dict[tuple[int, int], Confirmation] = field(default_factory=dict)
    uncompared: dict[tuple[int, int], str] = field(default_factory=dict)
    far: dict[tuple[int, int], float] = field(default_factory=dict)
    """With the edits, the share of elements that are further from the engine's than roundings can take them."""


class Checker:
    """Evaluates both sides once, then the training side under edits."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.arithmetic = pair.arithmetic(CHECK_SEED, rounds=True, per_layer=True, shift=1)
        native = run_training.native_constants(pair.capture_t, pair.training, self.arithmetic)
        computed = run_inference.computed_tables(pair.capture_i, pair.inference, self.arithmetic)
        self.snapped, _ = snap(pair.capture_i, pair.training, native, self.arithmetic.positions, computed)
        self.inference = run_inference.Run(pair.capture_i, pair.inference, self.arithmetic).run()
        self.partner = self._anchors()

    def _anchors(self) -> dict[tuple[int, int], torch.Tensor]:
        """Training anchor operands to what the engine's anchor reads, flat, in the anchor's layout."""
        by_key: dict[Any, list[Op]] = {}
        outputs = []
        for op in self.pair.flow_i.ops:
            if op.kind == "anchor" and op.target == "gemm":
                for checkpoint in op.key[1:-1]:
                    by_key.setdefault(("gemm", checkpoint, op.key[-1]), []).append(op)
            elif op.kind == "anchor":
                by_key.setdefault(op.key, []).append(op)
            elif op.kind == "output":
                outputs.append(op)
        found: dict[tuple[int, int], torch.Tensor] = {}
        for op in self.pair.flow_t.ops:
            if op.kind != "anchor":
                continue
            partners = by_key.get(op.key, [])
            if not partners and op.id in self.pair.regions.tail and len(outputs) == 1:
                partners = outputs
            for slot in range(len(op.operands)):
                for p in partners[:1]:
                    data = self.inference.operands.get((p.id, slot if p.kind == "anchor" else 0))
                    if data is not None:
                        found[op.id, slot] = data.reshape(-1)
        return found

    def run(self, edits: Edits) -> run_training.Run:
        """The training side with edits."""
        return run_training.Run(self.pair.capture_t, self.pair.training, self.arithmetic, snapped=self.snapped, edits=edits).run()

    def agreement(self, run: run_training.Run) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], str]]:
        """Share of equal elements per anchor operand, and why an operand could not be compared."""
        shares: dict[tuple[int, int], float] = {}
        missing: dict[tuple[int, int], str] = {}
        for op in self.pair.flow_t.ops:
            if op.kind != "anchor":
                continue
            for slot in range(len(op.operands)):
                key = (op.id, slot)
                a, b = run.operands.get(key), self.partner.get(key)
                if a is None or b is None:
                    missing[key] = "no counterpart on the inference side" if b is None else "could not be evaluated"
                    continue
                share = equal_share(in_layout(op, a), b)
                if share is None:
                    missing[key] = f"sizes differ: {a.numel()} and {b.numel()}"
                else:
                    shares[key] = share
        return shares, missing

    def far(self, run: run_training.Run, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], float]:
        """Share of elements of GEMM and attention operands that no rounding explains: wrong signs, another order."""
        out: dict[tuple[int, int], float] = {}
        for key in keys:
            op = self.pair.flow_t.ops[key[0]]
            if op.target in ("gemm", "attention"):
                a, b = in_layout(op, run.operands[key]), self.partner[key].reshape(-1)
                near = (a - b).abs() <= FAR * (b.abs() + b.square().mean().sqrt())
                out[key] = 1.0 - float(near.double().mean())
        return out

    def name(self, key: tuple[int, int]) -> str:
        """An operand's name for people."""
        op = self.pair.flow_t.ops[key[0]]
        return f"{op.module or op.name}[{key[1]}]"


def in_layout(op: Op, data: torch.Tensor) -> torch.Tensor:
    """A training operand, flat, token-major: attention operands come as [1, heads, tokens, size]."""
    if op.target == "attention" and data.dim() == 4:
        data = data.transpose(1, 2)
    return data.reshape(-1)


def equal_share(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Share of equal elements (to 2⁻⁴⁰, for operands that are not rounded), or None if the sizes differ."""
    if a.numel() != b.numel() or not a.numel():
        return None
    return float(((a - b).abs() <= 2.0**-40 * b.abs()).double().mean())


def check(pair: Pair, edits: Iterable[Edit]) -> Check:
    """Check proposed edits: together they must reproduce the engine's operands, and each must be needed.

    Returns:
        Agreement without and with the edits, and a confirmation per edit, keyed (consumer, slot).
    """
    edits = list(edits)
    checker = Checker(pair)
    out = Check()
    out.stock, _ = checker.agreement(checker.run(Edits()))
    everything = as_edits(edits)
    base = checker.run(everything)
    out.patched, out.uncompared = checker.agreement(base)
    out.far = checker.far(base, [k for k, share in out.patched.items() if share < EXACT])
    for edit in edits:
        out.confirmations[edit.consumer, edit.slot] = _confirm(checker, base, everything, edit)
    return out


def as_edits(edits: Iterable[Edit]) -> Edits:
    """Edits in the form that the evaluator takes."""
    edits = list(edits)
    return Edits(
        frozenset((e.consumer, e.slot) for e in edits if e.kind == "keep"),
        {(e.consumer, e.slot): e.format for e in edits if e.kind == "round"},
    )


def _confirm(checker: Checker, base: run_training.Run, everything: Edits, edit: Edit) -> Confirmation:
    """Leave one edit out, and see which of the engine's operands are no longer reproduced."""
    at = (edit.consumer, edit.slot)
    without = Edits(everything.keep - {at}, {k: v for k, v in everything.round.items() if k != at})
    redo = Redo.start(base, without, edit.consumer, checker.pair.regions.sums)
    changed, predicted, different, total = [], [], 0.0, 0
    for key in redo.reached:
        b = checker.partner.get(key)
        if b is None or key not in base.operands:
            continue
        predicted.append(checker.name(key))
        a = redo.operands.get(key)
        op = checker.pair.flow_t.ops[key[0]]
        share = equal_share(in_layout(op, a), b) if a is not None else None
        with_it = equal_share(in_layout(op, base.operands[key]), b)
        if share is not None and with_it is not None and share < with_it:
            changed.append(checker.name(key))
            different += (1 - share) * b.numel()
            total += b.numel()
    exact = not changed and _is_exact(base, edit)
    return Confirmation(tuple(changed), tuple(predicted), different / total if total else 0.0, exact)


def _is_exact(base: run_training.Run, edit: Edit) -> bool:
    """Whether an operand's roundings change none of its elements."""
    tracer = base.tracer
    node = base.capture.nodes[tracer.ops[edit.consumer].detail["node"]]
    read = [v for v in tracer.operand_values(node) if tracer.edges(v)]
    if edit.slot >= len(read):
        return False
    a, b = base.value(read[edit.slot]).data, base._unrounded(read[edit.slot])
    if edit.kind == "round":
        b = round_to(a, edit.format)
    return a.shape == b.shape and torch.equal(a, b)


class Redo(run_training.Run):
    """Re-evaluates only what depends on one consumer, over a finished run."""

    reached: list[tuple[int, int]]
    """Anchor operands that the graph says are affected, within the horizon."""

    @classmethod
    def start(cls, base: run_training.Run, edits: Edits, consumer: int, sums: frozenset[int]) -> Redo:
        """Evaluate again from `consumer` on, with other edits; `sums` are the residual sums, which end the horizon."""
        self = cls(base.capture, base.tracer, base.arithmetic, base.snapped, None, edits)
        self.native, self.node_of = base.native, base.node_of
        nodes, ops = base.capture.nodes, base.tracer.ops
        first = ops[consumer].detail.get("node", 0)
        affected: set[int] = set()
        todo: list[int] = []
        self.reached = []
        sums_crossed = 0
        queue, queued = [first], {first}
        while queue:
            n = heapq.heappop(queue)
            op = base.tracer.op_of_node.get(n)
            if op is not None and ops[op].kind == "anchor":
                if n == first:
                    self.reached += [
                        (consumer, s) for s in range(len(ops[op].operands)) if base.edits.touches((op, s)) != edits.touches((op, s))
                    ]
                else:
                    self.reached += self._slots(base, ops[op], affected)
                todo.append(n)
                continue
            if op is not None and op in sums:
                sums_crossed += 1
                if sums_crossed > HORIZON:
                    break
            todo.append(n)
            for o in nodes[n].outputs:
                if o is not None:
                    affected.add(o.id)
                    for reader in base.tracer.readers().get(o.id, ()):
                        if reader not in queued:
                            queued.add(reader)
                            heapq.heappush(queue, reader)
        self.env = _Overlay(base.env, affected)
        self.values = dict(base.values)
        for n in todo:
            op = base.tracer.op_of_node.get(n)
            if op is None:
                continue
            node = nodes[n]
            if ops[op].kind == "anchor":
                self._record_operands(ops[op], node)
            else:
                self._compute(ops[op], node, [o.id for o in node.outputs if o is not None])
        return self

    @staticmethod
    def _slots(base: run_training.Run, op: Op, affected: set[int]) -> list[tuple[int, int]]:
        node = base.capture.nodes[op.detail["node"]]
        out, slot = [], 0
        for v in references(node.args, "v"):
            if slot < len(op.operands) and base.tracer.refs.get(v) == op.operands[slot]:
                if v in affected:
                    out.append((op.id, slot))
                slot += 1
        return out


class _Overlay(dict[int, Any]):
    """Values of a finished run, without those that depend on a changed op."""

    def __init__(self, base: Mapping[int, Any], affected: set[int]) -> None:
        super().__init__()
        self.base, self.affected = base, affected

    def __contains__(self, v: object) -> bool:
        return super().__contains__(v) or (v in self.base and v not in self.affected)

    def __missing__(self, v: int) -> Any:
        if v in self.affected:
            raise KeyError(v)
        return self.base[v]
