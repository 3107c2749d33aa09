"""From two captures to an alignment: which inference ops hold each training op's value, region by region."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from graphalign.align.exercise import Dormant, Key, find_dormant, scalings
from graphalign.align.join import Join, chance_rate
from graphalign.align.near import Near, near_misses
from graphalign.align.pair import Pair, check_same_model, prepare
from graphalign.align.regions import Regions
from graphalign.align.strangers import other_weights
from graphalign.align.sums import Sums
from graphalign.align.tables import TableMatch, as_real, snap
from graphalign.align.twins import tell_apart
from graphalign.dataflow.identity import anchor_name
from graphalign.errors import AlignmentError
from graphalign.evaluate import run_inference, run_training
from graphalign.evaluate.table_rows import rows_read
from graphalign.evaluate.values import Layers
from graphalign.ir.dataflow import Dataflow, Op

__all__ = ["Alignment", "Pair", "Progress", "align", "check_same_model", "prepare"]

Progress = Callable[[str, float | None], None]
SEED = 20240917
CLOSE = 2.0**-40
Order = tuple[int, torch.Tensor]
"""The axis of tokens, and each token's elements in ascending order of value, as places."""


class Why(enum.StrEnum):
    """Why an operand of one of the trainer's anchors has no partner, in words."""

    SCALED_OUTSIDE = "it is a multiple of what the engine's compiled graph returns; whether the engine scales it too is not in this capture"
    OTHER_VALUES = "its elements are not in the inference operand"
    NOT_EVALUATED = "it could not be evaluated"
    NO_ANCHOR = "no inference op matches this anchor"


@dataclass
class Alignment:
    """What corresponds to what. Indices are op indices of the two dataflows."""

    training: Dataflow
    inference: Dataflow
    regions: Regions
    partners: dict[int, tuple[int, ...]]
    """Training op, source, or sum to the inference ops that hold its value."""
    region_of: dict[int, frozenset[int]]
    """Inference op to the training regions it can belong to."""
    reverse: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Inference op to its training partners."""
    tables: list[TableMatch] = field(default_factory=list)
    outputs: list[tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=list)
    """Matched operands of anchors and outputs: training (op, slot) to inference (op, slot)."""
    unsupported: dict[tuple[str, int], str] = field(default_factory=dict)
    """(side, op) to why it was not evaluated."""
    parted: dict[tuple[int, int], Why] = field(default_factory=dict)
    """Training anchor operand (op, slot) whose elements the inference operand does not hold, with the reason."""
    rescaled: dict[int, float] = field(default_factory=dict)
    """Attention anchors whose query the trainer multiplies by a constant that the engine multiplies the scores by."""
    scaled: dict[int, float] = field(default_factory=dict)
    """Experts whose routing weights the trainer multiplies by a constant that the engine multiplies their result by."""
    arranged: dict[tuple[int, int], tuple[Order, Order]] = field(default_factory=dict)
    """Operands of cores, (op, slot), that hold the same elements on both sides: their order in training and in inference."""
    inlined: set[int] = field(default_factory=set)
    """Tables of one number that every format holds exactly and no table of the engine does: they are in its code, if anywhere."""
    other_weight: dict[int, str] = field(default_factory=dict)
    """GEMMs of the trainer whose partner multiplies by another parameter, with both names in words."""
    dormant: dict[Key, Dormant] = field(default_factory=dict)
    """Ops of either side (clamps, `where`, `max`) that took one side only in every evaluation."""
    near: dict[int, tuple[Near, ...]] = field(default_factory=dict)
    """Training ops without a partner to what comes nearest; see `near`."""
    chance: float = 0.0
    """Measured share of unrelated values that match something in a region."""
    compared: int = 0
    arrays: int = 0


def align(pair: Pair, progress: Progress | None = None, *, layers: Layers = "alike") -> Alignment:
    """Propose the alignment by values.

    Args:
        pair: both captures.
        progress: called with (stage, fraction).
        layers: `own` gives every layer values of its own. Slower; without it equal layers share values, which may cancel where
            one region reads two layers (`x - g0 + g1`).

    Where values part, all is tried again with other values: a mean may happen to be so near zero that its order of summation shows.

    Raises:
        AlignmentError: nothing matched at all.
    """
    out = _scaled(pair, progress, layers, SEED)
    if out.parted:
        again = _scaled(pair, progress, layers, SEED + 1)
        out = again if len(again.parted) < len(out.parted) else out
    return _exercised(pair, out, progress, layers)


def _exercised(pair: Pair, first: Alignment, progress: Progress | None, layers: Layers) -> Alignment:
    """The alignment, tried again on inputs that pass the limits of clamps that never fired; the one whose values part, if any does."""
    for scales in scalings(first.dormant):
        tried = [_align(pair, progress, layers, SEED, scales)]
        if set(tried[0].parted) - set(first.parted):  # twice: see above
            tried.append(_align(pair, progress, layers, SEED + 1, scales))
        parted = [t for t in tried if set(t.parted) - set(first.parted)]
        first.dormant = {k: d for k, d in first.dormant.items() if all(k in t.dormant for t in tried)}
        if len(parted) == 2:
            parted[0].dormant = {k: d for k, d in parted[0].dormant.items() if k in first.dormant}
            first = parted[0]
    return first


def _scaled(pair: Pair, progress: Progress | None, layers: Layers, seed: int) -> Alignment:
    """An alignment that knows which experts are scaled."""
    out = _align(pair, progress, layers, seed)
    found = {anchor_name(out.training.ops[i].key): factor for i, factor in out.scaled.items()}
    if found != pair.factors:
        pair.factors.update(found)
        out = _align(pair, progress, layers, seed)
    return out


def _align(pair: Pair, progress: Progress | None, layers: Layers, seed: int, scales: Mapping[str, float] | None = None) -> Alignment:
    say = progress or (lambda stage, fraction: None)
    flow_i, flow_t, regions = pair.flow_i, pair.flow_t, pair.regions
    arithmetic = pair.arithmetic(seed, layers=layers, scales=scales)
    say("evaluate", 0.0)
    native = run_training.native_constants(pair.capture_t, pair.training, arithmetic)
    computed = run_inference.computed_tables(pair.capture_i, pair.inference, arithmetic)
    read = rows_read(pair.capture_i, pair.inference, arithmetic).rows
    snapped, matches = snap(pair.capture_i, pair.training, native, arithmetic.positions, computed, read=read)
    sums = Sums(arithmetic, regions)
    run_t = run_training.Run(pair.capture_t, pair.training, arithmetic, snapped=snapped, replace=sums.on_training, native=native).run()
    say("evaluate", 0.5)
    run_i = run_inference.Run(pair.capture_i, pair.inference, arithmetic, replace=sums.on_inference).run()
    say("align", 0.0)
    out = Alignment(flow_t, flow_i, regions, {}, {}, tables=matches)
    out.unsupported = {("training", i): why for i, why in run_t.unsupported.items()} | {
        ("inference", i): why for i, why in run_i.unsupported.items()
    }
    partners: dict[int, list[int]] = defaultdict(list)
    _match_sources(flow_t, flow_i, partners, matches)
    join = Join()
    _assign(out, run_i, sums, partners, regions)
    _join_regions(out, run_t, run_i, join, partners, regions)
    tell_apart(flow_t, flow_i, partners)
    _pair_by_place(pair, out, partners, run_t, run_i, join)
    out.dormant = find_dormant(run_t, run_i, (flow_t, flow_i), regions, partners)
    out.partners = {k: tuple(dict.fromkeys(v)) for k, v in partners.items() if v}
    reverse: dict[int, list[int]] = defaultdict(list)
    for t, held in out.partners.items():
        for i in held:
            reverse[i].append(t)
    out.reverse = {k: tuple(v) for k, v in reverse.items()}
    _match_operands(out, run_t, run_i, join)
    for op in flow_t.ops:
        if op.kind == "table" and op.id not in out.partners and (number := native.get(op.key[0])) is not None and number.numel() == 1:
            if torch.equal(number.bfloat16().double(), number.double()):
                out.inlined.add(op.id)
    out.near = near_misses(flow_t, flow_i, out.partners, (run_t.values, run_i.values), (regions.region, out.region_of), join)
    ids = {run_t.values[op.id].id for op in flow_t.ops if op.kind == "op" and op.id in run_t.values}
    out.chance = chance_rate([join.keys[i] for i in ids if i in join.keys])
    out.compared, out.arrays = join.compared, len(join.keys)
    say("align", 1.0)
    kinds = ("op",) if any(op.kind == "op" for op in flow_t.ops) else ("anchor",)  # a model may be nothing but GEMMs
    if not any(op.kind in kinds and op.id in out.partners for op in flow_t.ops):
        raise AlignmentError(
            "not one operation of the training graph was found in the inference graph",
            where=f"{len(flow_t.ops)} training ops, {len(flow_i.ops)} inference ops",
            hint="check that both captures are of the same model; `graphalign show` prints them",
        )
    return out


def _match_sources(flow_t: Dataflow, flow_i: Dataflow, partners: dict[int, list[int]], tables: list[TableMatch]) -> None:
    """Anchors by key, parameters by checkpoint name, tables by content."""
    by_key: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for op in flow_i.ops:
        if op.kind == "anchor" and op.target == "gemm":
            for checkpoint in op.key[1:-1]:
                by_key["gemm", checkpoint, op.key[-1]].append(op.id)
        elif op.kind == "anchor":
            by_key[op.key].append(op.id)
        elif op.kind == "parameter":
            for checkpoint in op.key:
                by_key["parameter", checkpoint].append(op.id)
        elif op.kind == "table":
            by_key["table", op.key[0]].append(op.id)
    found = {m.op: set(m.names) for m in tables if m.name}
    for op in flow_t.ops:
        if op.kind == "anchor":
            partners[op.id] += by_key.get(op.key, [])
        elif op.kind == "parameter":
            partners[op.id] += by_key.get(("parameter", op.key[0]), [])
        elif op.kind == "table" and op.id in found:
            # equal tables of different layers are one table to the value join
            partners[op.id] += [i for (kind, name, *_), ids in by_key.items() if kind == "table" and name in found[op.id] for i in ids]


def _assign(out: Alignment, run_i: run_inference.Run, sums: Sums, partners: dict[int, list[int]], regions: Regions) -> None:
    """Which training regions each inference op can belong to, from what it reads; and which residual sums it holds."""
    holders: dict[int, set[int]] = defaultdict(set)
    for t, held in partners.items():
        for i in held:
            holders[i] |= regions.readers.get(t, frozenset())
    everywhere = frozenset(regions.region.values())
    reach: dict[int, frozenset[int]] = {}
    for op in out.inference.ops:
        if op.kind in ("parameter", "anchor", "table"):
            reach[op.id] = frozenset(holders[op.id]) if op.id in holders else frozenset()
        elif op.kind == "input":
            reach[op.id] = everywhere
        elif op.kind == "op":
            regs: frozenset[int] | None = None
            for operand in op.operands:
                union = frozenset().union(*[reach[r.producer] for r in operand])
                regs = union if regs is None else regs & union
            out.region_of[op.id] = regs or frozenset()
            reach[op.id] = out.region_of[op.id]
            val = run_i.values.get(op.id)
            if val is not None and val.id in sums.ops:
                mine = [s for s in sums.ops[val.id] if regions.region[s] in out.region_of[op.id]]
                for s in mine:
                    partners[s].append(op.id)
                if mine:
                    reach[op.id] = frozenset().union(*[regions.readers.get(s, frozenset()) for s in mine])


def _join_regions(
    out: Alignment, run_t: run_training.Run, run_i: run_inference.Run, join: Join, partners: dict[int, list[int]], regions: Regions
) -> None:
    """Within each region, find each training op's elements among the inference ops'."""
    members: dict[int, list[int]] = defaultdict(list)
    for i, regs in out.region_of.items():
        for r in regs:
            members[r].append(i)
    held_sums = {i for s in regions.sums for i in partners.get(s, [])}
    held_by: dict[int, dict[int, list[int]]] = {}
    for t, region in regions.region.items():
        val = run_t.values.get(t)
        if t in regions.sums or val is None or not (val.data.is_floating_point() or val.data.is_complex()):
            continue
        if region not in held_by:
            held_by[region] = {}
            for i in members.get(region, ()):
                x = run_i.values.get(i)
                if x is not None and i not in held_sums and x.data.is_floating_point():
                    join.key(x.id, x.data)
                    held_by[region].setdefault(x.id, []).append(i)
        join.key(val.id, as_real(val.data))
        found = join.partners(val.id, tuple(held_by[region]))
        held = sorted(i for x in found for i in held_by[region][x])
        parts = {i for i in held if not join.inside(val.id, run_i.values[i].id)}
        partners[t] += [i for i in held if i not in parts or not _computed_from(out.inference, i, set(held) - {i})]


def _pair_by_place(
    pair: Pair, out: Alignment, partners: dict[int, list[int]], run_t: run_training.Run, run_i: run_inference.Run, join: Join
) -> None:
    """GEMMs that no name pairs, by what they read."""
    alive: list[torch.Tensor] = []  # an identity is an address: it must stay taken

    def reads(mine: Op, other: Op) -> bool:
        a, b = run_t.operands.get((mine.id, 0)), run_i.operands.get((other.id, 0))
        if a is None or b is None:
            return False
        a = run_t.arithmetic.shards.operand(mine, 0, a)
        alive.append(a)
        join.key(_data_id(b), b)
        return len(join.key(_data_id(a), a)) > 0 and join.inside(_data_id(a), _data_id(b))

    names = (
        {i.name for i in pair.capture_t.inputs if i.kind in ("parameter", "buffer")},
        {s.checkpoint for p in pair.capture_i.parameters for s in p.segments},
    )
    for t, (i, words) in other_weights(out.training, out.inference, partners, names, reads).items():
        partners[t].append(i)
        out.other_weight[t] = words


def _computed_from(flow: Dataflow, op: int, goal: set[int]) -> bool:
    """Whether an op depends on one of `goal` through ops: a row maximum is made of its operand's elements, but is another value."""
    if not goal:
        return False
    floor = min(goal)
    return any(i in goal for i in flow.above(flow.read_by(op), lambda i: i > floor and flow.is_op(i)))


def _match_operands(out: Alignment, run_t: run_training.Run, run_i: run_inference.Run, join: Join) -> None:
    """Matched anchors' operands: do the inference operands hold the training operands' elements?"""
    flow_t, flow_i = out.training, out.inference
    final = [op for op in flow_i.ops if op.kind == "output"]
    alive: list[torch.Tensor | None] = []  # an identity is an address: it must stay taken
    for op in flow_t.ops:
        if op.kind != "anchor":
            continue
        partners = out.partners.get(op.id, ())
        if not partners and op.id in out.regions.tail:
            partners = tuple(o.id for o in final)
        for slot in range(len(op.operands)):
            pairs = [
                (i, s) for i in partners for s in ([slot] if flow_i.ops[i].kind == "anchor" else [0]) if s < len(flow_i.ops[i].operands)
            ]
            a = run_t.operands.get((op.id, slot))
            a = a if a is None else run_t.arithmetic.shards.operand(op, slot, a)
            alive.append(a)
            hit = None
            for pair in pairs:
                b = run_i.operands.get(pair)
                if a is None or b is None:
                    continue
                ka = join.key(_data_id(a), a)
                join.key(_data_id(b), b)
                if len(ka) and join.inside(_data_id(a), _data_id(b)):
                    hit = pair
                    break
            if hit is None and slot == 0 and op.target == "attention" and a is not None:
                factor = next((f for p in pairs if (b := run_i.operands.get(p)) is not None and (f := _factor(a, b)) is not None), None)
                if factor is not None:
                    out.rescaled[op.id] = factor
                    continue
            if hit is None and a is not None and slot == op.detail.get("routing", (None,))[0]:
                factor = next((f for p in pairs if (b := run_i.operands.get(p)) is not None and (f := _factor(a, b)) is not None), None)
                if factor is not None:
                    out.scaled[op.id] = factor
                    hit = pairs[0]
            if hit is not None and (op.id, slot) in run_t.arranged and hit in run_i.arranged:
                b = run_i.operands[hit]
                if a is not None and a.shape == b.shape and torch.allclose(a, b, rtol=CLOSE, atol=0.0):
                    out.arranged[op.id, slot] = run_t.arranged[op.id, slot], run_i.arranged[hit]
            if hit is not None:
                out.outputs.append(((op.id, slot), hit))
            elif pairs and a is not None and op.id in out.regions.tail and _multiple(a, run_i.operands.get(pairs[0])):
                out.parted[op.id, slot] = Why.SCALED_OUTSIDE
            elif pairs and a is not None:
                out.parted[op.id, slot] = Why.OTHER_VALUES
            elif a is None:
                out.parted[op.id, slot] = Why.NOT_EVALUATED
            else:
                out.parted[op.id, slot] = Why.NO_ANCHOR


def _multiple(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    return b is not None and _factor(a, b) is not None


def _factor(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """The constant that `b`'s elements must be multiplied by to be `a`'s, in any order; None if there is none."""
    if a.numel() != b.numel() or not a.numel():
        return None
    x, y = a.abs().reshape(-1).sort().values, b.abs().reshape(-1).sort().values
    if float(y[-1]) <= 0 or not bool(torch.isfinite(x).all() and torch.isfinite(y).all()):
        return None
    factor = float(x[-1] / y[-1])
    return factor if bool(((x - factor * y).abs() <= 2.0**-40 * factor * y[-1]).all()) else None


def _data_id(t: torch.Tensor) -> int:
    """An identity for an operand array that no value has (values count up from 0)."""
    return -1 - hash((t.data_ptr(), tuple(t.shape), tuple(t.stride()), t.storage_offset()))
