"""Cutting the training graph into regions: at anchors, at residual sums, at sources."""

from __future__ import annotations

from dataclasses import dataclass, field

import networkx as nx

from graphalign.evaluate.aten import base
from graphalign.ir.dataflow import Dataflow, Op, Operand


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
    consumers = flow.consumers()
    adds = {op.id for op in flow.ops if op.kind == "op" and base(op.target) in ("add", "sub") and len(op.operands) == 2}
    return adds, {i for i in adds if len(consumers.get(i, ())) == 1 and consumers[i][0][0] in adds}


def _partial_sums(flow: Dataflow, sums: frozenset[int]) -> frozenset[int]:
    _, inner = _adds(flow)
    found: set[int] = set()
    todo = list(sums)
    while todo:
        more = [r.producer for operand in flow.ops[todo.pop()].operands for r in operand if r.producer in inner]
        found.update(more)
        todo += more
    return frozenset(found)


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
    seen: set[tuple[int, bool]] = set()
    todo = [(s, False) for s in start]
    while todo:
        i, crossed = todo.pop()
        if (i, crossed) in seen or i < floor:
            continue
        seen.add((i, crossed))
        op = flow.ops[i]
        if i in goal and crossed:
            return True
        crossed = crossed or op.kind == "anchor"
        todo += [(r.producer, crossed) for operand in op.operands for r in operand]
    return False


def cut(flow: Dataflow) -> Regions:
    """Regions of the training graph: what stays connected once anchors, residual sums and sources are cut."""
    sums = residual_sums(flow)
    tail = tail_ops(flow)
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(op.id for op in flow.ops if op.kind == "op")
    readers: dict[int, set[int]] = {}
    for op in flow.ops:
        if op.kind != "op":
            continue
        for operand in op.operands:
            for ref in operand:
                p = flow.ops[ref.producer]
                if p.kind == "op" and p.id not in sums:
                    graph.add_edge(p.id, op.id)
    region = {i: n for n, component in enumerate(sorted(nx.connected_components(graph), key=min)) for i in component}
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


def tail_ops(flow: Dataflow) -> frozenset[int]:
    """Ops from the last GEMM to the logits: the final anchor that the output reads, and everything behind it."""
    tail: set[int] = set()
    todo = [op for op in flow.ops if op.kind == "output"]
    seen: set[int] = set()
    while todo:
        op = todo.pop()
        if op.id in seen:
            continue
        seen.add(op.id)
        tail.add(op.id)
        if op.kind == "anchor":
            continue
        todo += [flow.ops[r.producer] for operand in op.operands for r in operand if flow.ops[r.producer].kind in ("op", "anchor")]
    return frozenset(tail)


def describe(op: Op) -> str:
    """An op in a few words: where and what."""
    return f"{op.module or op.where}: {op.target} ({op.name})"
