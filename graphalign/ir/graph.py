"""Graphs of networkx, and the one walk over them that stops where it is told to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

import networkx as nx

N = TypeVar("N", bound=Hashable)
_START = object()


def met(starts: Iterable[N], near: Callable[[N], Iterable[N]], most: int) -> Iterator[N]:
    """Nodes met from `starts` on, these included, each once: breadth first, and lazily.

    Args:
        starts: where to begin.
        near: the neighbours to go on to; none where the walk ends.
        most: number of nodes there are.
    """

    def step(node: Any) -> Iterable[N]:
        return starts if node is _START else near(node)

    # the graph is only asked for its size, to stop early, and does not know the start
    return (n for _, n in nx.generic_bfs_edges(nx.null_graph(), _START, step, depth_limit=most + 1))


def components(nodes: Iterable[int], edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """What edges connect, whatever their direction: each component ascending, the one with the lowest node first."""
    graph = nx.Graph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(edges)
    return sorted(sorted(c) for c in nx.connected_components(graph))
