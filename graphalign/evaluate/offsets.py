"""How far behind a position the engine reads a table: LongRoPE's holds the rows for short contexts, then those for long ones."""

from __future__ import annotations

from collections import defaultdict

from graphalign.ir.args import references
from graphalign.ir.inference import Body, InferenceGraph


def table_offsets(capture: InferenceGraph) -> dict[str, tuple[int, ...]]:
    """By table, the numbers that loops which load it add to an index they read with, ascending; only tables that have some.

    Numbers beyond a table's height wrap negative indices, and are not counted.
    """
    heights = {t.name: t.shape[0] for t in capture.tables if t.shape}
    added = {name: _added(body) for name, body in capture.bodies.items()}
    found: dict[str, set[int]] = defaultdict(set)
    for graph in capture.graphs:
        tables = {i.name: i.source for i in graph.inputs if i.source in heights}
        for node in (node for kernel in graph.kernels for node in kernel.nodes if node.body):
            for table in {tables[b] for b in node.buffers if b in tables}:
                found[table] |= {n for n in added.get(node.body or "", ()) if n < heights[table]}
    return {table: tuple(sorted(numbers)) for table, numbers in found.items() if numbers}


def _added(body: Body) -> frozenset[int]:
    """Positive numbers that a body adds to something, if it reads at an index that it computed."""
    blocks = [body.ops, *body.subblocks.values()]
    ops = [op for block in blocks for op in block]
    if not any(str(target).startswith("set_indirect") for _, target, _, _ in ops):
        return frozenset()
    numbers = {name: args[0] for name, target, args, _ in ops if target == "constant" and type(args[0]) is int}
    read = {n for _, target, args, _ in ops if target == "add" for a in args for n in references(a, "n")}
    return frozenset(numbers[n] for n in read & set(numbers) if numbers[n] > 0)
