"""Fused training ops are taken apart where one edge into them stands for reads that the engine rounds differently.

A LayerNorm is one op of the trainer. The engine may read its input unrounded for the mean and rounded for the rest: a contradiction as an
edge into the op, and one site as edges into its steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count

from graphalign.align.align import Alignment, Progress, align
from graphalign.align.edges import Comparison, compare
from graphalign.align.pair import Pair, shards_of
from graphalign.align.regions import cut
from graphalign.dataflow import trace_training
from graphalign.evaluate.parts import Fused, Made, take_apart
from graphalign.ir.args import references
from graphalign.ir.training import Node, TrainingGraph, Value

WIDE = "float32"
"""Format in which a fused op computes."""


@dataclass(frozen=True)
class Compared:
    """An alignment and its judged edges, of a pair in which ops may have been taken apart."""

    pair: Pair
    alignment: Alignment
    comparison: Comparison


def compare_pair(pair: Pair, progress: Progress | None = None) -> Compared:
    """Align two captures and judge every edge, as finely as the engine's roundings ask for.

    Raises:
        AlignmentError: nothing matched at all.
    """
    found = _compare(pair, progress)
    mixed = {f.consumer for f in found.comparison.findings if f.verdict in ("conflicting", "undetermined")}
    # ops that read the same as one of these are taken apart too: their steps hold the same values
    sources = {r.producer for i in mixed for o in pair.flow_t.ops[i].operands for r in o if pair.flow_t.ops[r.producer].kind != "parameter"}
    beside = {op.id for op in pair.flow_t.ops if op.kind == "op" and any(r.producer in sources for o in op.operands for r in o)}
    finer = taken_apart(pair, mixed | beside) if taken_apart(pair, mixed) is not None else None
    return found if finer is None else _compare(finer, progress)


def _compare(pair: Pair, progress: Progress | None) -> Compared:
    al = align(pair, progress)
    if al.parted:  # not because layers share values?
        again = align(pair, progress, layers=pair.checked)
        al = again if len(again.parted) < len(al.parted) else al
    return Compared(pair, al, compare(al))


def taken_apart(pair: Pair, ops: Iterable[int]) -> Pair | None:
    """The pair with some training ops taken apart; None if none of them can be.

    Args:
        pair: both captures, traced.
        ops: indices of training ops; others than fused ones stay as they are.
    """
    capture, steps = pair.capture_t, dict(pair.steps)
    read = {v for n in capture.nodes for a in (*n.args, *n.kwargs.values()) for v in references(a, "v")} | set(capture.outputs)
    fused: dict[int, Fused] = {}
    for i in ops:
        n = pair.flow_t.ops[i].detail.get("node")
        if pair.flow_t.ops[i].kind != "op" or n is None or capture.nodes[n].kwargs:
            continue
        node = capture.nodes[n]
        others = {o.id for o in node.outputs[1:] if o is not None}
        found = take_apart(node.op, node.args, lambda a: isinstance(a, dict) and "v" in a)
        if found is not None and node.outputs[0] is not None and others.isdisjoint(read):
            fused[n] = found
    if not fused:
        return None
    values = {i.value.id: i.value for i in capture.inputs} | {o.id: o for n in capture.nodes for o in n.outputs if o is not None}
    fresh = count(max(values) + 1)
    nodes: list[Node] = []
    for n, node in enumerate(capture.nodes):
        if n in fused:
            writer = _Writer(node, fused[n], values, fresh)
            nodes += writer.write()
            steps |= writer.steps
        else:
            nodes.append(node)
    finer = capture.model_copy(update={"nodes": tuple(nodes)})
    return _traced(pair, finer, steps)


def _traced(pair: Pair, capture: TrainingGraph, steps: dict[int, Made]) -> Pair:
    tracer = trace_training.Tracer(capture, steps=steps)
    flow = tracer.run()
    shards = shards_of(pair.capture_i, pair.flow_i, capture, flow)
    regions = cut(flow, pair.flow_i)
    return replace(pair, capture_t=capture, training=tracer, flow_t=flow, regions=regions, shards=shards, steps=steps)


class _Writer:
    """Writes one op's steps as nodes of a capture."""

    def __init__(self, node: Node, fused: Fused, values: dict[int, Value], fresh: count[int]) -> None:
        self.node, self.fused, self.values, self.fresh = node, fused, values, fresh
        self.made: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.steps: dict[int, Made] = {}
        """By value id, what the steps make."""

    def write(self) -> list[Node]:
        out = self.node.outputs[0]
        assert out is not None
        operands = [self.values[v] for a in self.node.args for v in references(a, "v")]
        for name, value in zip(self.fused.operands, operands, strict=True):
            self.made[name] = self._cast(value, WIDE) if value.dtype not in (WIDE, "float64") else value
        for step in self.fused.steps:
            args = tuple({"v": self.made[a].id} if isinstance(a, str) else a for a in step.args)
            read = [self.made[a].shape for a in step.args if isinstance(a, str)]
            reduced = next((a for a in step.args if isinstance(a, list)), [])
            shape = _reduced(read[0], reduced) if reduced else max(read, key=_size)
            value = Value(id=next(self.fresh), dtype=self.made[self.fused.operands[0]].dtype, shape=shape)
            self._add(step.op, args, value)
            self.made[step.name] = value
            self.steps[value.id] = Made(self.node.op, step.name, step is self.fused.steps[-1])
        self._add("aten._to_copy.default", ({"v": value.id},), out, {"dtype": {"dtype": out.dtype}})
        return self.nodes

    def _cast(self, value: Value, dtype: str) -> Value:
        cast = Value(id=next(self.fresh), dtype=dtype, shape=value.shape)
        self._add("aten._to_copy.default", ({"v": value.id},), cast, {"dtype": {"dtype": dtype}})
        return cast

    def _add(self, op: str, args: tuple[object, ...], out: Value, kwargs: dict[str, object] | None = None) -> None:
        self.nodes.append(Node(op=op, args=args, kwargs=kwargs or {}, outputs=(out,), module=self.node.module, source=self.node.source))


def _reduced(shape: tuple[int, ...], dims: list[int]) -> tuple[int, ...]:
    gone = {d % len(shape) for d in dims}
    return tuple(1 if d in gone else n for d, n in enumerate(shape))


def _size(shape: tuple[int, ...]) -> tuple[int, int]:
    return len(shape), sum(shape)
