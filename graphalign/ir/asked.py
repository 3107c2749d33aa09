"""Where the trainer's Python asks for a number that depends on positions: Transformers picks some rotary frequencies by the longest."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from graphalign.ir.args import references
from graphalign.ir.training import Input, Node

ASKS = frozenset({"_local_scalar_dense", "is_nonzero", "item", "equal"})
"""ATen ops that hand a tensor's content to Python."""


def is_positions(given: Input) -> bool:
    """Whether an input is the positions of the tokens."""
    return given.kind == "input" and "position" in given.name


def questions(inputs: Sequence[Input], nodes: Sequence[Node]) -> dict[int, set[int]]:
    """Nodes that ask for what depends on positions, each with all nodes that lead to what it asks for; by index."""
    asking = [n for n, node in enumerate(nodes) if node.op.removeprefix("aten.").split(".")[0] in ASKS]
    if not asking:
        return {}
    made: dict[int, int] = {}
    graph: nx.DiGraph[int] = nx.DiGraph()
    for n, node in enumerate(nodes):
        graph.add_node(n)
        graph.add_edges_from((made[v], n) for a in (*node.args, *node.kwargs.values()) for v in references(a, "v") if v in made)
        made.update((o.id, n) for o in node.outputs if o is not None)
    positions = {i.value.id for i in inputs if is_positions(i)}
    reading = {n for n, node in enumerate(nodes) for v in references(node.args, "v") if v in positions}
    above = {n: nx.ancestors(graph, n) for n in asking}
    return {n: before for n, before in above.items() if (before | {n}) & reading}
