"""Cutting the training graph into regions: at anchors, at residual sums, at sources."""

from __future__ import annotations

from dataclasses import dataclass, field

import networkx as nx

from graphalign.evaluate.aten import base
from graphalign.ir.dataflow import Dataflow, Op


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


def residual_sums(flow: Dataflow) -> frozenset[int]:
    """Additions of two activations of which one was computed, through an anchor, from what the other one carries.

    That is the residual stream, found by its shape in the graph: a path around an anchor that joins the path through it.
    """
    found: set[int] = set()
    for op in flow.ops:
        if op.kind != "op" or base(op.target) not in ("add", "sub") or len(op.operands) != 2:
            continue
        heads = [{r.producer for r in operand} for operand in op.operands]
        if any(_reaches_through_anchor(flow, heads[i], heads[1 - i]) for i in (0, 1)):
            found.add(op.id)
    return frozenset(found)


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
    return Regions(sums, region, {k: frozenset(v) for k, v in readers.items()}, outputs, tail)


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
