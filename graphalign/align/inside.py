"""What composite anchors compute: the engine's recorded results against the trainer's subgraph on the same inputs and weights.

Both are compared with the trainer's subgraph in FP64. The trainer's own distance from that is what rounding does; the engine's may be a few
times as much, because its kernel rounds elsewhere. What is farther away is another function.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from graphalign.align.align import Alignment
from graphalign.align.anchors import Difference
from graphalign.align.pair import Pair
from graphalign.errors import UnsupportedOpError
from graphalign.evaluate.subgraph import Subgraph
from graphalign.ir import drawn
from graphalign.ir.args import references
from graphalign.ir.dataflow import Op
from graphalign.ir.inference import Composite
from graphalign.ir.paths import in_layer, unit_of

FACTOR = 4.0
"""How many times the trainer's own rounding the engine's may be."""
FLOOR = 0.01
"""Relative distance that is never called another function: the engine may round where the trainer does not."""


@dataclass(frozen=True)
class Distance:
    """How far both sides are from the trainer's function in exact arithmetic, for inputs of one scale: |x - exact| / |exact|."""

    scale: float
    engine: float
    trainer: float

    @property
    def alike(self) -> bool:
        """Whether rounding explains the engine's."""
        return self.engine <= max(FACTOR * self.trainer, FLOOR)


@dataclass
class Inside:
    """What is known about composite anchors, by training op."""

    equal: dict[int, tuple[Distance, ...]] = field(default_factory=dict)
    differing: dict[int, tuple[Distance, ...]] = field(default_factory=dict)
    assumed: dict[int, str] = field(default_factory=dict)
    """Why nothing is known."""

    def differences(self) -> list[Difference]:
        """The anchors that compute another function."""
        return [Difference(op, "function", f"it is another function inside: {words(found)}") for op, found in self.differing.items()]


Done = dict[tuple[int, str], tuple[Distance, ...]]
"""What was measured for an engine's record (its number in the capture) and a trainer's subgraph: layers are alike."""


class Unknown(Exception):
    """Nothing can be said about an anchor."""


def compare_inside(pair: Pair, al: Alignment) -> Inside:
    """Compare the inside of every matched composite anchor, as far as the engine recorded it."""
    out = Inside()
    done: Done = {}
    for op in al.training.ops:
        if op.kind != "anchor" or op.target != "composite" or op.id not in al.partners:
            continue
        try:
            found = _distances(pair, al, done, op, [al.inference.ops[i] for i in al.partners[op.id]])
        except (Unknown, UnsupportedOpError) as e:
            out.assumed[op.id] = str(e).splitlines()[0]
            continue
        except (RuntimeError, TypeError, IndexError, KeyError) as e:  # a strange subgraph must not cost the rest of the result
            out.assumed[op.id] = f"its subgraph could not be evaluated: {type(e).__name__}: {e}".splitlines()[0][:200]
            continue
        (out.equal if all(d.alike for d in found) else out.differing)[op.id] = found
    return out


def words(distances: tuple[Distance, ...]) -> str:
    """What was measured, for people."""
    worst = max(distances, key=lambda d: d.engine / max(d.trainer, FLOOR / FACTOR))
    if math.isinf(worst.engine):
        return f"run on the same inputs with the same weights, only the engine's result is finite (inputs of size {worst.scale:g})"
    return (
        f"run on the same inputs with the same weights, the engine's result differs from the trainer's by {worst.engine:.1%} "
        f"where the trainer's rounding explains {worst.trainer:.1%} (inputs of size {worst.scale:g})"
    )


def _distances(pair: Pair, al: Alignment, done: Done, op: Op, partners: list[Op]) -> tuple[Distance, ...]:
    if not pair.capture_i.composites:
        raise Unknown("the engine's capture holds no results of it")
    record = _record(pair, partners)
    node = pair.capture_t.nodes[op.detail["node"]]
    out = node.outputs[0]
    assert out is not None
    whole = pair.whole
    operands = list(references(node.args, "v"))
    if len(operands) != len(record.inputs):
        raise Unknown(f"the engine's op was run on {len(record.inputs)} inputs, the trainer's module reads {len(operands)}")
    shapes = {i.value.id: i.value for i in whole.inputs}
    shapes |= {o.id: o for n in whole.nodes for o in n.outputs if o is not None}
    found = []
    known = dict(record.weights)

    def weights(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        at = _as_drawn(in_layer(name, str(record.layer)), known)
        if known.get(at) != shape:
            raise Unknown(f"the engine was not given the trainer's parameter {name}")
        if at not in held:
            held[at] = drawn.weight(at, shape)
        return held[at]

    held: dict[str, torch.Tensor] = {}
    for n, scale in enumerate(record.scales):
        given = {}
        for slot, (v, (_, shape, dtype)) in enumerate(zip(operands, record.inputs, strict=True)):
            if torch.Size(shape).numel() != torch.Size(shapes[v].shape).numel():
                raise Unknown(f"the engine's input {slot} has the shape {list(shape)}, the trainer's {list(shapes[v].shape)}")
            data = _input(record, slot, shape, dtype, scale)
            given[v] = _arranged(al, op, slot, data, shapes[v].shape) if op.detail.get("own") else data.reshape(shapes[v].shape)
        if n == 0:
            same = Subgraph(whole, given, weights, native=True).signature(out.id)
            order = [x.tolist() for x in given.values()] if op.detail.get("own") else ""
            key = pair.capture_i.composites.index(record), f"{same} {order}"
            if key in done:
                return done[key]
        engine = _numbers(record, n)
        exact, own = (Subgraph(whole, given, weights, native=native).value(out.id).double().reshape(-1) for native in (False, True))
        if exact.numel() != engine.numel():
            raise Unknown(f"the engine's result has {engine.numel()} elements, the trainer's {exact.numel()}")
        size = float(exact.norm())
        if not bool(torch.isfinite(engine).all()) or size == 0:
            raise Unknown(f"results for inputs of size {scale:g} are zero or not finite")
        if not math.isfinite(size):
            found.append(Distance(scale, math.inf, 0.0))
            continue
        found.append(Distance(scale, float((engine - exact).norm()) / size, float((own - exact).norm()) / size))
    if not found:
        raise Unknown("the engine's capture holds no results of it")
    done[key] = tuple(found)
    return done[key]


def _arranged(al: Alignment, op: Op, slot: int, data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """An input of the engine's core as the trainer's has it, by which elements correspond.

    Args:
        al: the alignment.
        op: the trainer's anchor.
        slot: its operand.
        data: of the engine's shape.
        shape: the trainer's.
    """
    if (op.id, slot) not in al.arranged:
        raise Unknown(f"which elements of its operand {slot} correspond is not known")
    (axis, mine), (other, theirs) = al.arranged[op.id, slot]
    rows = data.movedim(other, 0).reshape(len(theirs), -1) if other < data.dim() and data.shape[other] == len(theirs) else data[:0]
    moved = (shape[axis], *shape[:axis], *shape[axis + 1 :])
    if rows.shape != theirs.shape or torch.Size(moved).numel() != mine.numel():
        raise Unknown(f"the engine's input {slot} has the shape {list(data.shape)}, the trainer's {list(shape)}")
    return torch.empty_like(rows).scatter_(1, mine, rows.gather(1, theirs)).reshape(moved).movedim(0, axis)


def _as_drawn(name: str, known: Mapping[str, tuple[int, ...]]) -> str:
    """The drawn parameter that a trainer's is: of its name, or the only one that is called so but for a module around it.

    The engine copies one of the owners that are alike; in a model with two kinds of layers (Zamba 2) the other kind's may be deeper inside.
    """
    if name in known:
        return name
    own = name.removeprefix(unit_of(name))
    fits = [k for k in known if (x := k.removeprefix(unit_of(k))) and (own.endswith(x) or x.endswith(own))]
    return fits[0] if len(fits) == 1 else name


def _record(pair: Pair, partners: list[Op]) -> Composite:
    for op in partners:
        for record in pair.capture_i.composites:
            if op.detail.get("module") in record.alike:
                if record.failed:
                    raise Unknown(record.failed)
                return record
    raise Unknown("the engine's capture holds no results of it")


def _input(record: Composite, slot: int, shape: tuple[int, ...], dtype: str, scale: float) -> torch.Tensor:
    numbers = [s for _, s, d in record.inputs if d.startswith("int")]
    if dtype.startswith("int"):
        return drawn.expert_numbers(shape, record.experts)
    return drawn.routing_weights(shape) if shape in numbers else drawn.activation(slot, shape, scale)


def _numbers(record: Composite, n: int) -> torch.Tensor:
    try:
        data = np.frombuffer(base64.b64decode(record.results[n], validate=True), dtype="<f4")
    except (ValueError, IndexError):
        raise Unknown("its result in the engine's capture cannot be read") from None
    return torch.from_numpy(data.astype(np.float64))
