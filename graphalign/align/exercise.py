"""Making clamps fire: which ops took one side only, and what to multiply the chosen inputs by so that they take both.

A clamp that never fires is the identity, so the value join sees neither it nor its limit. Values are made to pass a limit by scaling
the outputs of the anchors (and residual sums) that it is computed from, the same on both sides. What no scale reaches is listed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import networkx as nx
import torch

from graphalign.align.regions import Regions
from graphalign.dataflow.identity import anchor_name
from graphalign.evaluate import run_inference, run_training
from graphalign.evaluate.aten import base
from graphalign.evaluate.picks import COMPARISONS, MASKS, Pick, chosen, number, of_node
from graphalign.ir.args import references
from graphalign.ir.dataflow import Dataflow, Op
from graphalign.ir.paths import role_of

MOST = 4
"""Evaluations with scaled inputs, at most: each costs as much as the alignment."""
BEYOND = 2.0
"""The median magnitude of what is compared with a limit, in limits, so that many elements pass it and many do not."""
Key = tuple[str, int]
"""(side, op)"""


@dataclass(frozen=True)
class Dormant:
    """An op that took one side only."""

    pick: Pick
    names: frozenset[str]
    """Roles of the anchors and residual sums that its operand is computed from."""


def sum_name(op: Op, ordinal: int) -> str:
    """The name that the shared value of an aligned residual sum hangs on; the sums of a layer alternate."""
    return f"{op.module}|{op.source}|{ordinal % 2}"


def find_dormant(
    run_t: run_training.Run, run_i: run_inference.Run, flows: tuple[Dataflow, Dataflow], regions: Regions, partners: dict[int, list[int]]
) -> dict[Key, Dormant]:
    """Ops of both sides (training first in `flows`) that took one side only in an evaluation."""
    flow_t, flow_i = flows
    ordinal = {s: n for n, s in enumerate(sorted(regions.sums))}
    named = {s: role_of(sum_name(flow_t.ops[s], n)) for s, n in ordinal.items()}
    held = {i: named[s] for s in ordinal for i in partners.get(s, ())}
    out: dict[Key, Dormant] = {}
    above_t, above_i = _graph(flow_t, set(named)), _graph(flow_i, set(held))
    for op in flow_t.ops:
        if op.kind == "op" and (pick := _training(run_t, op)) is not None:
            out["training", op.id] = Dormant(pick, _names(flow_t, above_t, op.id, named))
    for op in flow_i.ops:
        val = run_i.values.get(op.id) if op.kind == "op" else None
        if val is not None and (pick := run_i.picks.get(val.id)) is not None:
            out["inference", op.id] = Dormant(pick, _names(flow_i, above_i, op.id, held))
    return out


def scalings(dormant: dict[Key, Dormant]) -> list[dict[str, float]]:
    """Scales of anchors for further evaluations, as few as can be: names to factors."""
    wanted = Counter(
        (d.names, float(f"{BEYOND * abs(d.pick.limit) / d.pick.size:.3g}"))
        for d in dormant.values()
        if d.pick.limit and d.pick.size and d.names and abs(d.pick.limit) < float("inf")
    )
    runs: list[dict[str, float]] = []
    for (names, factor), _ in wanted.most_common():
        fitting = next((r for r in runs if all(r.get(n, factor) == factor for n in names)), None)
        if fitting is None:
            if len(runs) == MOST:
                break
            runs.append(fitting := {})
        fitting.update(dict.fromkeys(names, factor))
    return runs


def only_here(dormant: dict[Key, Dormant], regions: dict[int, int], region_of: dict[int, frozenset[int]]) -> dict[Key, Pick]:
    """Dormant ops without a dormant op of the same limit on the other side, in their region."""

    def places(side: str, op: int) -> frozenset[int]:
        return frozenset([regions[op]] if op in regions else ()) if side == "training" else region_of.get(op, frozenset())

    seen = {(side, r, d.pick.limit) for (side, op), d in dormant.items() if d.pick.limit is not None for r in places(side, op)}
    other = {"training": "inference", "inference": "training"}
    return {
        (side, op): d.pick for (side, op), d in dormant.items() if not any((other[side], r, d.pick.limit) in seen for r in places(side, op))
    }


def _training(run: run_training.Run, op: Op) -> Pick | None:
    node = run.capture.nodes[op.detail["node"]]
    val = run.values.get(op.id)
    if val is None:
        return None
    read = [v for _, v in run.tracer.op_slots(op.detail["node"])]
    if base(node.op) in ("where", "masked_fill"):
        mask = next((v for v in references(node.args, "v") if v in run.env and run.env[v].data.dtype == torch.bool), None)
        if mask is None or mask in run.constants:
            return None
        return chosen(run.env[mask].data, _compared(run, mask))
    data = [run.env[v].data for v in read if v in run.env]
    return of_node(node, data, val.data) if len(data) == len(read) else None


def _compared(run: run_training.Run, mask: int) -> tuple[float | None, float]:
    """The number that a condition compares with, and the median magnitude of what it compares."""
    seen = mask
    while (n := run.node_of.get(seen, -1)) >= 0:
        node = run.capture.nodes[n]
        read = list(references(node.args, "v"))
        if base(node.op) in COMPARISONS and read and read[0] in run.env:
            limit = number(node.args[1]) if len(node.args) > 1 else None
            size = run.env[read[0]].data.double().abs().median()
            return limit, float(size)
        if base(node.op) not in MASKS | {"expand", "view", "unsqueeze"} or not read:
            break
        seen = read[0]
    return None, 0.0


def _graph(flow: Dataflow, sums: set[int]) -> nx.DiGraph[int]:
    """The ops' dependencies, cut at anchors and residual sums."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(flow.ops)))
    graph.add_edges_from(
        (r.producer, op.id) for op in flow.ops if op.kind == "op" and op.id not in sums for operand in op.operands for r in operand
    )
    return graph


def _names(flow: Dataflow, graph: nx.DiGraph[int], op: int, sums: dict[int, str]) -> frozenset[str]:
    found = set()
    for i in nx.ancestors(graph, op):
        x = flow.ops[i]
        if i in sums:
            found.add(sums[i])
        elif x.kind == "anchor" and x.target == "gemm":
            found.update(role_of(anchor_name(("gemm", c, x.key[-1]))) for c in x.key[1:-1])
        elif x.kind == "anchor":
            found.add(role_of(anchor_name(x.key)))
    return frozenset(found)
