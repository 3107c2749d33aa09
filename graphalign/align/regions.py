"""Cutting the training graph into regions: at anchors, at residual sums, at sources."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphalign.dataflow.identity import anchor_name
from graphalign.evaluate.aten import base
from graphalign.ir.dataflow import Dataflow, Op, Operand
from graphalign.ir.graph import components, met


@dataclass(frozen=True)
class Regions:
    """Where each training op belongs."""

    sums: frozenset[int]
    """Op indices of residual sums."""
    region: dict[int, int]
    """Op index to region number (kind `op` only)."""
    readers: dict[int, frozenset[int]]
    """Source or sum (op index) to the regions that read it."""
    outputs: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Region to the (anchor or output op, slot) operands it feeds."""
    tail: frozenset[int] = frozenset()
    """Ops behind the last hidden state: lm_head and what follows, outside the engine's compiled graph."""
    partial: frozenset[int] = frozenset()
    """Partial sums of residual sums of three and more terms."""


def residual_sums(flow: Dataflow) -> frozenset[int]:
    """Additions of two activations of which one was computed, through an anchor, from what the other one carries.

    That is the residual stream, found by its shape in the graph: a path around an anchor that joins the path through it.
    Of a sum of several terms (`residual + attention + mlp`) only the whole is one: its partial sums are read by nothing
    else, and the other side may add the terms in another order.
    """
    adds, inner = _adds(flow)
    found: set[int] = set()
    for i in sorted(adds - inner):
        heads = [{r.producer for r in operand} for operand in _leaves(flow, i, inner)]
        if any(_reaches_through_anchor(flow, a, b) for a in heads for b in heads if a is not b):
            found.add(i)
    return frozenset(found)


def _adds(flow: Dataflow) -> tuple[set[int], set[int]]:
    """Additions of two values, and those of them that nothing but another addition reads."""
    consumers = flow.readers
    adds = {op.id for op in flow.ops if op.kind == "op" and base(op.target) in ("add", "sub") and len(op.operands) == 2}
    return adds, {i for i in adds if len(consumers.get(i, ())) == 1 and consumers[i][0][0] in adds}


def _partial_sums(flow: Dataflow, sums: frozenset[int]) -> frozenset[int]:
    _, inner = _adds(flow)
    return frozenset(met(sums, lambda i: inner.intersection(flow.graph.pred[i]), len(flow.ops))) & inner


def _leaves(flow: Dataflow, op: int, inner: set[int]) -> list[Operand]:
    """The terms of a sum: its operands, those of its partial sums in their place."""
    out: list[Operand] = []
    for operand in flow.ops[op].operands:
        if len(operand) == 1 and operand[0].producer in inner:
            out += _leaves(flow, operand[0].producer, inner)
        else:
            out.append(operand)
    return out


def _reaches_through_anchor(flow: Dataflow, start: set[int], goal: set[int]) -> bool:
    """Whether walking up from `start` meets `goal` behind at least one anchor."""
    goal = {g for g in goal if flow.ops[g].kind in ("op", "parameter", "anchor")}
    if not goal:
        return False
    floor = min(goal)
    crossed = (i for i in flow.above(start, lambda i: i > floor) if flow.ops[i].kind == "anchor")
    return any(i in goal for i in flow.above((p for i in crossed for p in flow.graph.pred[i]), lambda i: i > floor))


def stream_terms(flow: Dataflow, regions: Regions) -> dict[str, tuple[int, int]]:
    """Anchors whose outputs are added to the residual stream as they are, or times constants.

    Returns:
        An anchor's name to the ordinal of the sum along the stream and the term's number in it.
    """
    _, inner = _adds(flow)
    terms: dict[int, tuple[int, int]] = {}
    for ordinal, s in enumerate(sorted(regions.sums)):
        number = 0
        for operand in _leaves(flow, s, inner):
            at = _sole_producer(operand)
            while at is not None and flow.ops[at].kind == "op" and at not in regions.sums and len(flow.ops[at].operands) == 1:
                at = _sole_producer(flow.ops[at].operands[0])
            if at is not None and flow.ops[at].kind == "anchor" and at not in terms:
                terms[at] = ordinal, number
                number += 1
    return {anchor_name(flow.ops[i].key): term for i, term in terms.items()}


def _sole_producer(operand: Operand) -> int | None:
    producers = {r.producer for r in operand}
    return producers.pop() if len(producers) == 1 else None


def cut(flow: Dataflow, engine: Dataflow | None = None) -> Regions:
    """Regions of the training graph: what stays connected once anchors, residual sums and sources are cut.

    Args:
        flow: the training graph.
        engine: the inference graph; if it ends in log-probabilities or has the last GEMM too, its tail was captured and is compared
            like any other region.
    """
    sums = residual_sums(flow)
    tail = tail_ops(flow)
    if engine is not None and (any(op.target == "logprobs" for op in engine.ops) or _has_last_gemm(flow, tail, engine)):
        tail = frozenset()
    inside = [op.id for op in flow.ops if op.kind == "op"]
    kept = ((p, c) for p, c in flow.graph.edges() if flow.is_op(p) and flow.is_op(c) and p not in sums)
    region = {i: n for n, members in enumerate(components(inside, kept)) for i in members}
    readers: dict[int, set[int]] = {}
    outputs: dict[int, list[tuple[int, int]]] = {}
    for op in flow.ops:
        for slot, operand in enumerate(op.operands):
            for ref in operand:
                p = flow.ops[ref.producer]
                if op.kind == "op" and (p.kind != "op" or p.id in sums):
                    readers.setdefault(p.id, set()).add(region[op.id])
                if op.kind in ("anchor", "output") and p.kind == "op":
                    outputs.setdefault(region[p.id], []).append((op.id, slot))
    return Regions(sums, region, {k: frozenset(v) for k, v in readers.items()}, outputs, tail, _partial_sums(flow, sums))


def _has_last_gemm(flow: Dataflow, tail: frozenset[int], engine: Dataflow) -> bool:
    theirs = {("gemm", name, op.key[-1]) for op in engine.ops if op.kind == "anchor" and op.target == "gemm" for name in op.key[1:-1]}
    return any(flow.ops[i].kind == "anchor" and flow.ops[i].key in theirs for i in tail)


def tail_ops(flow: Dataflow) -> frozenset[int]:
    """Ops from the last GEMM to the logits: the final anchor that the output reads, and everything behind it."""
    outputs = [op.id for op in flow.ops if op.kind == "output"]
    above = flow.above(outputs, lambda i: flow.ops[i].kind != "anchor" or flow.ops[i].target == "logprobs")
    return frozenset(i for i in above if flow.ops[i].kind in ("op", "anchor", "output"))


def describe(op: Op) -> str:
    """An op in a few words: where and what."""
    return f"{op.module or op.where}: {op.target} ({op.name})"
