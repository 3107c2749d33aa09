"""Training ops of one value: which of the engine's ops that hold it is which.

`(x - mean)` is computed once for the variance and once for the result. The value join gives both of them all of the engine's copies,
which may read `x` differently. What a copy is used for tells them apart.
"""

from __future__ import annotations

import networkx as nx

from graphalign.ir.dataflow import Dataflow


def tell_apart(flow_t: Dataflow, flow_i: Dataflow, partners: dict[int, list[int]]) -> None:
    """Take from each of several ops of one value, in place, the partners that are used for what the others are used for, and it is not.

    A use is an aligned reader behind an op, through ops without a partner. A partner with a use that no training op has stays with all.

    Args:
        flow_t, flow_i: both sides.
        partners: training op to the inference ops that hold its value.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for t, several in partners.items():
        if len(found := tuple(dict.fromkeys(several))) > 1 and flow_t.ops[t].kind == "op":
            groups.setdefault(found, []).append(t)
    # what is told apart tells what it reads apart, so the last ones first, and again until nothing changes
    twins = sorted(((group, found) for found, group in groups.items() if len(group) > 1), reverse=True)
    changed = bool(twins)
    while changed:
        changed = False
        held = {t: set(found) for t, found in partners.items() if found}
        uses_t, uses_i = _Uses(flow_t, frozenset(held)), _Uses(flow_i, frozenset().union(*held.values()))
        for group, found in twins:
            used = {i: uses_i.of(i) for i in found}
            wanted = {t: {i for use in uses_t.of(t) for i in held.get(use, ())} for t in group}
            mine = {t: {i for i, uses in used.items() if uses & wanted[t]} for t in group}
            taken = set().union(*mine.values())
            for t in group:
                left = [i for i in partners[t] if i in mine[t] or i not in taken]
                changed |= len(left) < len(partners[t])
                partners[t], held[t] = left, set(left)


class _Uses:
    """The first readers behind an op that are aligned."""

    def __init__(self, flow: Dataflow, aligned: frozenset[int]) -> None:
        self.aligned = aligned
        self.graph = flow.graph
        self.between = nx.DiGraph(self.graph.subgraph(set(self.graph) - aligned))

    def of(self, op: int) -> set[int]:
        if op not in self.graph:
            return set()
        first = set(self.graph.successors(op))
        behind = {n for f in first - self.aligned for n in (f, *nx.descendants(self.between, f))}
        return (first | {c for n in behind for c in self.graph.successors(n)}) & self.aligned
