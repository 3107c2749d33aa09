"""Which rows of its tables the engine reads for given positions: found by running the arithmetic of its indices.

LongRoPE's table holds the rows for short contexts, then those for long ones, and is read at position + 4096 (vLLM 0.32).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import networkx as nx
import torch

from graphalign.dataflow.trace_inference import Tracer
from graphalign.evaluate.run_inference import Run
from graphalign.evaluate.values import Arithmetic
from graphalign.ir.inference import Graph, InferenceGraph

WAYS = 8
"""Most ways from tokens to rows of one table that are told apart."""


@dataclass
class Reads:
    """What is read of the tables in one evaluation."""

    rows: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Table to the ways in which it is read, each a row for every token; tables that are not read token by token are not listed."""
    unrecorded: set[int] = field(default_factory=set)
    """Tokens for which a row is read that the capture does not hold."""


def rows_read(capture: InferenceGraph, tracer: Tracer, arithmetic: Arithmetic) -> Reads:
    """Which rows of which recorded tables the engine's loops read at the positions of `arithmetic`."""
    out = Reads()
    nodes = {(g, name) for g, graph in enumerate(capture.graphs) for name in _index_nodes(graph, {t.name for t in capture.tables})}
    if not nodes:
        return out
    run = Run(capture, tracer, arithmetic, only=nodes, reads=defaultdict(list)).run()
    tokens = arithmetic.tokens
    for table in capture.tables:
        held = set(table.rows)
        ways: dict[tuple[int, ...], None] = {}
        for rows, lanes in (run.reads or {}).get(run.memory.table_key(table.name), ()):
            found = _by_token(rows, lanes, tokens)
            ways |= dict.fromkeys(found)
            out.unrecorded |= {n for way in found for n, row in enumerate(way) if row not in held}
        if 0 < len(ways) <= WAYS:
            out.rows[table.name] = tuple(ways)
    return out


def recorded_positions(capture: InferenceGraph, tracer: Tracer, arithmetic: Arithmetic, positions: list[int], tokens: int) -> list[int]:
    """Those of some positions at which the engine reads recorded rows only.

    Args:
        positions: ascending.
        tokens: how many are evaluated at a time; a graph may be compiled for exactly so many.
    """
    kept: set[int] = set()
    for start in range(0, len(positions), tokens):
        part = tuple(positions[max(min(start, len(positions) - tokens), 0) :][:tokens])
        unrecorded = rows_read(capture, tracer, replace(arithmetic, positions=part)).unrecorded
        kept |= {p for n, p in enumerate(part) if n not in unrecorded}
    return sorted(kept)


def _index_nodes(graph: Graph, tables: set[str]) -> set[str]:
    """Loops that read a table, and those that make the integers which they read it at."""
    inputs = {i.name for i in graph.inputs if i.source in tables}
    integers = {b.name for b in graph.buffers if (b.dtype or "").startswith(("int", "uint", "bool"))}
    made: nx.DiGraph[str] = nx.DiGraph()
    reading: set[str] = set()
    for node in (n for kernel in graph.kernels for n in kernel.nodes if n.kind == "loop"):
        key = f"loop {node.name}"
        made.add_node(key)
        made.add_edges_from((b, key) for b in set(node.buffers) & integers)
        made.add_edges_from((key, b) for b in set(node.outputs) & integers)
        if inputs & set(node.buffers):
            reading.add(key)
    needed = reading | {x for key in reading for x in nx.ancestors(made, key)}
    return {x.removeprefix("loop ") for x in needed if x.startswith("loop ")}


def _by_token(rows: torch.Tensor, lanes: torch.Tensor, tokens: int) -> list[tuple[int, ...]]:
    """Rows read in a loop as functions of the token; empty if they are none.

    Args:
        rows: one for each of the loop's lanes.
        lanes: of the same shape, those that read; the others are masked out.
    """
    best: list[tuple[int, ...]] = []
    for d, extent in enumerate(rows.shape):
        if not extent or extent % tokens:
            continue
        # a dimension may hold tokens and their elements, one after the other
        by_token = torch.where(lanes, rows, -1).movedim(d, 0).reshape(tokens, -1)
        columns = by_token[:, (by_token >= 0).all(0)].unique(dim=1)
        if columns.shape[1] and (not best or columns.shape[1] < len(best)):
            best = [tuple(column) for column in columns.T.tolist()]
    return best
