"""The independent check: run both sides with their roundings and compare what the anchors read.

It takes nothing from the proposal but its edits. There is no join here: operands are compared by anchor, in the anchor's own layout,
element by element, with signs, on other random values, other tokens and other positions, and without shared residual sums:
both sides run from the embedding to the last anchor, the training side with the proposed edits, the inference side as captured.
Orders of elements within heads and scaled experts are found again, from these values (`align.heads`).

What it shares with the proposal (`align.shared` says so to users): the reading of both captures (which op is which anchor, what an opaque
op means), the evaluation of single ops, and the matching of tables (`tables.snap`), done anew at other positions.
Every layer has values of its own; in deep models layers take turns, and the residual stream comes back to what it was
(`evaluate.values`). What is equal is evaluated once, because equal values are recognised, not because layers are assumed to be equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphalign.align.behind import Behind
from graphalign.align.heads import head_order, scale
from graphalign.align.pair import Pair
from graphalign.align.tables import snap
from graphalign.dataflow.identity import anchor_name
from graphalign.evaluate import run_inference, run_training
from graphalign.evaluate.run_training import Edits
from graphalign.evaluate.table_rows import rows_read
from graphalign.evaluate.values import round_to
from graphalign.ir.dataflow import Op

CHECK_SEED = 77003
EXACT = 0.9999
"""Share of an operand's elements that must be equal; float64 noise may flip a tie, nothing else may differ."""
QUERY_KEY = 2
"""An attention's first operands, of which products are taken."""
FAR = 2.0**-3
"""Distance that roundings to BF16 (2⁻⁹ each) do not reach, relative to an element and the operand's root mean square."""


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
        self.arithmetic = replace(pair.arithmetic(CHECK_SEED, rounds=True, layers=pair.checked, shift=1), factors={})
        self.native = run_training.native_constants(pair.capture_t, pair.training, self.arithmetic)
        computed = run_inference.computed_tables(pair.capture_i, pair.inference, self.arithmetic)
        positions, read = self.arithmetic.positions, rows_read(pair.capture_i, pair.inference, self.arithmetic).rows
        self.snapped, _ = snap(pair.capture_i, pair.training, self.native, positions, computed, read=read, unrounded=True)
        self.inference = run_inference.Run(pair.capture_i, pair.inference, self.arithmetic).run()
        self.partner = self._anchors()
        self.orders: dict[int, tuple[int, ...]] = {}
        """Attention anchors to the trainer's element for each of the engine's, within heads; from `settle`."""

    def settle(self, stock: run_training.Run) -> run_training.Run:
        """Find orders of heads' elements and scaled experts from an evaluation without edits; returns one that knows them."""
        factors: dict[str, float] = {}
        for op in self.pair.flow_t.ops:
            if op.kind != "anchor":
                continue
            if op.target == "attention":
                sides = [self._raw(op, slot, stock) for slot in range(min(QUERY_KEY, len(op.operands)))]
                if len(sides) == QUERY_KEY and (order := _head_order(sides)) is not None:
                    self.orders[op.id] = order
            elif (slot := op.detail.get("routing", (None,))[0]) is not None and (found := self._raw(op, slot, stock)) is not None:
                factor = scale(self.pair.capture_t, self.pair.flow_t, op, *found)
                if factor is not None:
                    factors[anchor_name(op.key)] = factor
                    self.partner[op.id, slot] = self.partner[op.id, slot] * factor
        if not factors:
            return stock
        self.arithmetic = replace(self.arithmetic, factors=factors)
        return self.run(Edits(), keep=False)

    def _raw(self, op: Op, slot: int, run: run_training.Run) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A training operand, the rank's part of it, and the engine's, as they are."""
        a, b = run.operands.get((op.id, slot)), self.partner.get((op.id, slot))
        if a is None or b is None:
            return None
        own = self.arithmetic.shards.operand(op, slot, a)
        return own, unpadded(op, own, b)

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

    def run(self, edits: Edits, *, keep: bool = True) -> run_training.Run:
        """The training side with edits; without `keep`, its values are forgotten with it."""
        values = self.arithmetic if keep else self.arithmetic.aside()
        pair = self.pair
        return run_training.Run(pair.capture_t, pair.training, values, self.snapped, edits=edits, native=self.native).run()

    def agreement(self, run: run_training.Run) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], str]]:
        """Share of equal elements per anchor operand, and why an operand could not be compared."""
        shares: dict[tuple[int, int], float] = {}
        missing: dict[tuple[int, int], str] = {}
        known: dict[object, float | None] = {}  # equal operands are the same tensors, which `run` keeps alive
        for op in self.pair.flow_t.ops:
            if op.kind != "anchor":
                continue
            for slot in range(len(op.operands)):
                key = (op.id, slot)
                a, b = run.operands.get(key), self.partner.get(key)
                if a is None or b is None:
                    missing[key] = "no counterpart on the inference side" if b is None else "could not be evaluated"
                    continue
                both = (op.target == "attention", place(a), place(b), slot, self.orders.get(op.id), self.arithmetic.shards.reads(op))
                if both not in known:
                    known[both] = equal_share(*self.sides(op, slot, a, b))
                share = known[both]
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
                a, b = self.sides(op, key[1], run.operands[key], self.partner[key])
                b = b.reshape(-1)
                near = (a - b).abs() <= FAR * (b.abs() + b.square().mean().sqrt())
                out[key] = 1.0 - float(near.double().mean())
        return out

    def sides(self, op: Op, slot: int, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A training operand and the engine's, element by element: flat, of the trainer's the part that the engine's rank has."""
        own = self.arithmetic.shards.operand(op, slot, a)
        if slot < QUERY_KEY and (order := self.orders.get(op.id)) is not None:
            own = own[..., list(order)]
        return in_layout(op, own), unpadded(op, own, b)

    def name(self, key: tuple[int, int]) -> str:
        """An operand's name for people."""
        op = self.pair.flow_t.ops[key[0]]
        return f"{op.target if op.target == 'logprobs' else op.module or op.name}[{key[1]}]"


def _head_order(sides: list[tuple[torch.Tensor, torch.Tensor] | None]) -> tuple[int, ...] | None:
    query, key = sides
    return None if query is None or key is None else head_order(query[0], key[0], query[1], key[1])


def in_layout(op: Op, data: torch.Tensor) -> torch.Tensor:
    """A training operand, flat, token-major: attention operands come as [1, heads, tokens, size]."""
    if op.target == "attention" and data.dim() == 4:
        data = data.transpose(1, 2)
    return data.reshape(-1)


def unpadded(op: Op, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The engine's operand `b` without the zeros that fill its heads up, where those of the trainer's, `a`, are smaller."""
    if op.target != "attention" or a.dim() != 4 or b.numel() <= a.numel() or b.numel() % (a.shape[1] * a.shape[2]):
        return b
    heads, size = b.reshape(a.shape[2], a.shape[1], -1), a.shape[3]
    return b if bool(heads[..., size:].any()) else heads[..., :size].reshape(-1)


def place(data: torch.Tensor) -> tuple[object, ...]:
    """Where a tensor lies: an identity, for as long as it lives."""
    return data.data_ptr(), tuple(data.shape), data.stride()


def equal_share(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Share of equal elements (to 2⁻⁴⁰, for operands that are not rounded), or None if the sizes differ."""
    if a.numel() != b.numel() or not a.numel():
        return None
    if torch.equal(a, b):
        return 1.0
    return int(((a - b).abs() <= 2.0**-40 * b.abs()).sum()) / a.numel()


def check(pair: Pair, edits: Iterable[Edit]) -> Check:
    """Check proposed edits: together they must reproduce the engine's operands, and each must be needed.

    Returns:
        Agreement without and with the edits, and a confirmation per edit, keyed (consumer, slot).
    """
    edits = list(edits)
    checker = Checker(pair)
    out = Check()
    out.stock, _ = checker.agreement(checker.settle(checker.run(Edits(), keep=False)))
    everything = as_edits(edits)
    base = checker.run(everything)
    out.patched, out.uncompared = checker.agreement(base)
    out.far = checker.far(base, [k for k, share in out.patched.items() if share < EXACT])
    known: dict[object, Effect] = {}
    for edit in edits:
        out.confirmations[edit.consumer, edit.slot] = _confirm(checker, base, everything, edit, known)
    return out


def as_edits(edits: Iterable[Edit]) -> Edits:
    """Edits in the form that the evaluator takes."""
    edits = list(edits)
    return Edits(
        frozenset((e.consumer, e.slot) for e in edits if e.kind == "keep"),
        {(e.consumer, e.slot): e.format for e in edits if e.kind == "round"},
    )


@dataclass(frozen=True)
class Effect:
    """What leaving an edit out does, without names: the same for all edits whose surroundings are the same."""

    shares: tuple[tuple[float | None, float | None], ...]
    """For every operand reached: share of elements that equal the engine's, without and with the edit."""
    exact: bool
    """See `Confirmation.exact`; only looked at where nothing changes."""


def _confirm(checker: Checker, base: run_training.Run, everything: Edits, edit: Edit, known: dict[object, Effect]) -> Confirmation:
    """Leave one edit out, and see which of the engine's operands are no longer reproduced."""
    at = (edit.consumer, edit.slot)
    without = Edits(everything.keep - {at}, {k: v for k, v in everything.round.items() if k != at})
    behind = Behind(base, without, edit.consumer, checker.pair.regions.sums)
    reached = [k for k in behind.reached if k in checker.partner and k in base.operands]
    key: object = at
    if base.arithmetic.share:
        ends = tuple((behind.place_of(k), place(checker.partner[k]), place(base.operands[k])) for k in reached)
        key = (edit.kind, edit.format, edit.slot, behind.signature(edit.slot), ends)
    effect = known.get(key)
    if effect is None:
        effect = known[key] = _effect(checker, base, edit, behind, reached)
    changed, different, total = [], 0.0, 0
    for k, (share, with_it) in zip(reached, effect.shares, strict=True):
        if share is not None and with_it is not None and share < with_it:
            changed.append(checker.name(k))
            n = checker.partner[k].numel()
            different += (1 - share) * n
            total += n
    predicted = tuple(checker.name(k) for k in reached)
    return Confirmation(tuple(changed), predicted, different / total if total else 0.0, not changed and effect.exact)


def _effect(checker: Checker, base: run_training.Run, edit: Edit, behind: Behind, reached: list[tuple[int, int]]) -> Effect:
    redo = behind.evaluate()
    shares: list[tuple[float | None, float | None]] = []
    for key in reached:
        op, b = checker.pair.flow_t.ops[key[0]], checker.partner[key]
        a = redo.operands.get(key)
        share = equal_share(*checker.sides(op, key[1], a, b)) if a is not None else None
        shares.append((share, equal_share(*checker.sides(op, key[1], base.operands[key], b))))
    changes = any(a is not None and b is not None and a < b for a, b in shares)
    return Effect(tuple(shares), not changes and _is_exact(base, edit))


def _is_exact(base: run_training.Run, edit: Edit) -> bool:
    """Whether an operand's roundings change none of its elements."""
    tracer = base.tracer
    read = [v for v in tracer.operand_values(tracer.ops[edit.consumer].detail["node"]) if tracer.edges(v)]
    if edit.slot >= len(read):
        return False
    a, b = base.value(read[edit.slot]).data, base.unrounded(read[edit.slot]).data
    if edit.kind == "round":
        b = round_to(a, edit.format)
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)  # NaN: what other ranks hold
