"""From two captures to an alignment: which inference ops hold each training op's value, region by region."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from graphalign.align.composite import fold, rename
from graphalign.align.join import Join, chance_rate
from graphalign.align.regions import Regions, cut
from graphalign.align.tables import TableMatch, snap
from graphalign.errors import AlignmentError, BadInputError
from graphalign.evaluate import run_inference, run_training, trace_inference, trace_training
from graphalign.evaluate.opaque import load_opaque_ops
from graphalign.evaluate.returns import unwrap
from graphalign.evaluate.values import Arithmetic, Val
from graphalign.ir.dataflow import Dataflow, Op
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph
from graphalign.ir.verify import verify_inference, verify_training

Progress = Callable[[str, float | None], None]
SEED = 20240917
PARTS = 8
"""A kernel may hold no less than this part of a residual sum (a row maximum of it is not the sum)."""


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
    parted: dict[tuple[int, int], str] = field(default_factory=dict)
    """Training anchor operand (op, slot) whose elements the inference operand does not hold, with the reason."""
    rescaled: dict[int, float] = field(default_factory=dict)
    """Attention anchors whose query the trainer multiplies by a constant that the engine multiplies the scores by."""
    chance: float = 0.0
    """Measured share of unrelated values that match something in a region."""
    compared: int = 0
    arrays: int = 0


@dataclass
class Pair:
    """Two captures, traced, with everything an evaluation needs."""

    capture_i: InferenceGraph
    capture_t: TrainingGraph
    inference: trace_inference.Tracer
    training: trace_training.Tracer
    flow_i: Dataflow
    flow_t: Dataflow
    regions: Regions
    unfolded: dict[str, str] = field(default_factory=dict)
    """Modules that the engine runs as one op and that are no single anchor on the training side, with the reason."""

    def arithmetic(self, seed: int, *, rounds: bool = False, per_layer: bool = False, shift: int = 0) -> Arithmetic:
        """Values for one evaluation; positions are taken from the rows that the engine's tables record."""
        tokens = self.capture_t.header.tokens
        positions = choose_positions(self.capture_i, tokens, shift)
        vocabulary = min(
            (i.value.shape[0] for i in self.capture_t.inputs if i.kind == "parameter" and len(i.value.shape) == 2 and "embed" in i.name),
            default=64,
        )
        ids = tuple((7 + 13 * shift + 11 * t) % vocabulary for t in range(tokens))
        return Arithmetic(seed, positions, ids, rounds=rounds, per_layer=per_layer)


def prepare(inference: InferenceGraph, training: TrainingGraph, rules: Path) -> Pair:
    """Trace both captures and cut the training graph into regions.

    Raises:
        BadInputError: the captures are of different models.
    """
    verify_inference(inference)
    verify_training(training)
    check_same_model(inference, training)
    inference = rename(inference, training)
    training = _learned_buffers(inference, training)
    known = load_opaque_ops(rules)
    inference = unwrap(inference, known)
    ti = trace_inference.Tracer(inference, known)
    flow_i = ti.run()
    folded = fold(training, flow_i)
    tt = trace_training.Tracer(folded.capture)
    flow_t = tt.run()
    return Pair(inference, folded.capture, ti, tt, flow_i, flow_t, cut(flow_t), folded.failed)


def _learned_buffers(inference: InferenceGraph, training: TrainingGraph) -> TrainingGraph:
    """Buffers that checkpoints fill (and the engine therefore lists as learned) are parameters on both sides."""
    filled = {s.checkpoint for p in inference.parameters if p.learned for s in p.segments}
    inputs = tuple(i.model_copy(update={"kind": "parameter"}) if i.kind == "buffer" and i.name in filled else i for i in training.inputs)
    return training if inputs == training.inputs else training.model_copy(update={"inputs": inputs})


def check_same_model(inference: InferenceGraph, training: TrainingGraph) -> None:
    """Refuse captures whose headers name different models."""
    a, b = inference.header.model, training.header.model
    for key in ("architecture", "layers", "max_position_embeddings"):
        if a.get(key) and b.get(key) and a[key] != b[key]:
            raise BadInputError(
                f"these captures are of different models: {key} is {a[key]} in inference and {b[key]} in training",
                hint="capture both sides from the same model folder, with the same --layers",
            )


def choose_positions(inference: InferenceGraph, tokens: int, shift: int) -> tuple[int, ...]:
    """`tokens` positions spread over the whole range, all of them recorded rows of the engine's tables.

    Tables of fewer rows (a scalar multiplier) are not indexed by position. `shift` picks another set, for the check.
    """
    rows: set[int] | None = None
    for t in inference.tables:
        if len(t.rows) >= tokens:
            both = set(t.rows) if rows is None else rows & set(t.rows)
            rows = both if len(both) >= tokens else rows
    available = sorted(rows or [])
    if len(available) < tokens:
        top = int(inference.header.model.get("max_position_embeddings") or 2048)
        available = sorted({min(top - 1, i) for i in range(tokens * 4)} | {top - 1})
    usable = available[shift : len(available)] if len(available) - shift >= tokens else available
    picked = [usable[round(i * (len(usable) - 1) / max(tokens - 1, 1))] for i in range(tokens)]
    return tuple(picked)


def align(pair: Pair, progress: Progress | None = None, *, per_layer: bool = False) -> Alignment:
    """Propose the alignment by values.

    Args:
        pair: both captures.
        progress: called with (stage, fraction).
        per_layer: give every layer values of its own. Slower; without it equal layers share values, which may cancel where one
            region reads two layers (`x - g0 + g1`).

    Raises:
        AlignmentError: nothing matched at all.
    """
    say = progress or (lambda stage, fraction: None)
    flow_i, flow_t, regions = pair.flow_i, pair.flow_t, pair.regions
    arithmetic = pair.arithmetic(SEED, per_layer=per_layer)
    say("evaluate", 0.0)
    native = run_training.native_constants(pair.capture_t, pair.training, arithmetic)
    computed = run_inference.computed_tables(pair.capture_i, pair.inference, arithmetic)
    snapped, matches = snap(pair.capture_i, pair.training, native, arithmetic.positions, computed)
    sums = _Sums(arithmetic, regions)
    run_t = run_training.Run(pair.capture_t, pair.training, arithmetic, snapped=snapped, replace=sums.on_training).run()
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
    out.partners = {k: tuple(dict.fromkeys(v)) for k, v in partners.items() if v}
    reverse: dict[int, list[int]] = defaultdict(list)
    for t, held in out.partners.items():
        for i in held:
            reverse[i].append(t)
    out.reverse = {k: tuple(v) for k, v in reverse.items()}
    _match_operands(out, run_t, run_i, join)
    ids = {run_t.values[op.id].id for op in flow_t.ops if op.kind == "op" and op.id in run_t.values}
    out.chance = chance_rate([join.keys[i] for i in ids if i in join.keys])
    out.compared, out.arrays = join.compared, len(join.keys)
    say("align", 1.0)
    paired = sum(1 for op in flow_t.ops if op.kind == "op" and op.id in out.partners)
    if not paired:
        raise AlignmentError(
            "not one operation of the training graph was found in the inference graph",
            where=f"{len(flow_t.ops)} training ops, {len(flow_i.ops)} inference ops",
            hint="check that both captures are of the same model; `graphalign show` prints them",
        )
    return out


class _Sums:
    """Gives every aligned residual sum one fresh value on both sides."""

    def __init__(self, arithmetic: Arithmetic, regions: Regions) -> None:
        self.arithmetic, self.regions = arithmetic, regions
        self.exact: dict[tuple[int, int], list[tuple[torch.Tensor, Val]]] = {}
        self.ops: dict[int, list[int]] = defaultdict(list)
        """Identity of the fresh value to the training sums that have it."""

    def on_training(self, op: Op, val: Val) -> Val:
        if op.id not in self.regions.sums:
            return val
        ordinal = sum(1 for s in self.regions.sums if s < op.id) % 2
        fresh = self.arithmetic.fresh(f"{op.module}|{op.source}|{ordinal}", tuple(val.data.shape))
        known = self.exact.setdefault(_signature(val.data), [])
        if not any(f.id == fresh.id and torch.equal(d, val.data) for d, f in known):
            known.append((val.data, fresh))
        self.ops[fresh.id].append(op.id)
        return fresh

    def on_inference(self, val: Val) -> Val:
        n, digest = _signature(val.data)
        for near in (digest - 1, digest, digest + 1):
            for exact, fresh in self.exact.get((n, near), ()):
                if val.id == fresh.id:
                    return val
                mapped = _transfer(val.data, exact, fresh.data)
                if mapped is not None:
                    return self._known(mapped, fresh)
        for known in self.exact.values():
            for exact, fresh in known:
                if exact.numel() // PARTS <= n < exact.numel() and (mapped := _transfer(val.data, exact, fresh.data)) is not None:
                    return self._known(mapped, fresh)
        return val

    def _known(self, mapped: torch.Tensor, fresh: Val) -> Val:
        """`mapped`, elements of `fresh` in another layout, with one identity per layout."""
        if mapped.shape == fresh.data.shape and torch.equal(mapped, fresh.data):
            return fresh
        key = ("transferred", fresh.id, tuple(mapped.shape), hash(mapped.numpy().tobytes()))
        known = self.arithmetic.intern(key) or self.arithmetic.put(key, mapped)
        self.ops.setdefault(known.id, self.ops[fresh.id])
        return known


def _signature(data: torch.Tensor) -> tuple[int, int]:
    """Size and the sum of magnitudes, to 2⁻³⁰: equal for arrays that hold the same elements in any layout."""
    total = float(data.abs().sum()) if data.numel() else 0.0
    if not 0 < total < float("inf"):
        return data.numel(), 0
    import math

    return data.numel(), round(math.log(total) * 2**30)


def _transfer(data: torch.Tensor, exact: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor | None:
    """`fresh` in the layout of `data`, if `data` holds elements of `exact`, all of them or some; else None."""
    a, b = data.reshape(-1), exact.reshape(-1)
    tolerance = 2.0**-40
    if len(a) == len(b) and bool(((a - b).abs() <= tolerance * b.abs()).all()):
        return fresh.reshape(data.shape)
    y, j = b.sort()
    if len(a) == len(b):
        x, i = a.sort()
        if not bool(((x - y).abs() <= tolerance * y.abs()).all()):
            return None
        out = torch.empty_like(a)
        out[i] = fresh.reshape(-1)[j]
        return out.view(data.shape)
    for some in (a[:16], a):
        above = torch.searchsorted(y, some).clamp(max=len(y) - 1)
        below = (above - 1).clamp(min=0)
        near = torch.where((some - y[below]).abs() < (some - y[above]).abs(), below, above)
        if not bool(((some - y[near]).abs() <= tolerance * y[near].abs()).all()):
            return None
    return fresh.reshape(-1)[j[near]].view(data.shape)


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


def _assign(out: Alignment, run_i: run_inference.Run, sums: _Sums, partners: dict[int, list[int]], regions: Regions) -> None:
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
    for t, region in regions.region.items():
        if t in regions.sums or t not in run_t.values:
            continue
        val = run_t.values[t]
        if not val.data.is_floating_point():
            continue
        join.key(val.id, val.data)
        candidates: dict[int, list[int]] = defaultdict(list)
        for i in members.get(region, ()):
            x = run_i.values.get(i)
            if x is not None and i not in held_sums and x.data.is_floating_point():
                join.key(x.id, x.data)
                candidates[x.id].append(i)
        held = join.partners(val.id, dict(candidates))
        parts = {i for i in held if not join.inside(val.id, run_i.values[i].id)}
        partners[t] += [i for i in held if i not in parts or not _computed_from(out.inference, i, set(held) - {i})]


def _computed_from(flow: Dataflow, op: int, goal: set[int]) -> bool:
    """Whether an op depends on one of `goal` through ops: a row maximum is made of its operand's elements, but is another value."""
    if not goal:
        return False
    floor = min(goal)
    seen: set[int] = set()
    todo = [r.producer for operand in flow.ops[op].operands for r in operand]
    while todo:
        i = todo.pop()
        if i in goal:
            return True
        if i < floor or i in seen or flow.ops[i].kind != "op":
            continue
        seen.add(i)
        todo += [r.producer for operand in flow.ops[i].operands for r in operand]
    return False


def _match_operands(out: Alignment, run_t: run_training.Run, run_i: run_inference.Run, join: Join) -> None:
    """Matched anchors' operands: do the inference operands hold the training operands' elements?"""
    flow_t, flow_i = out.training, out.inference
    final = [op for op in flow_i.ops if op.kind == "output"]
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
            if hit is not None:
                out.outputs.append(((op.id, slot), hit))
            elif pairs and a is not None:
                out.parted[op.id, slot] = "its elements are not in the inference operand"
            elif a is None:
                out.parted[op.id, slot] = "it could not be evaluated"
            else:
                out.parted[op.id, slot] = "no inference op matches this anchor"


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
