"""The formats in which GEMMs and attention read their operands, in two captures of one trainer: a patch changes none of them."""

from __future__ import annotations

from collections import defaultdict

from graphalign.dataflow.trace_training import QUERY_KEY_VALUE
from graphalign.evaluate.aten import ATTENTIONS, MATMULS, base
from graphalign.ir.args import references
from graphalign.ir.training import TrainingGraph

Formats = dict[tuple[str, str], set[tuple[str, ...]]]
"""(module, op) to the formats of its tensor operands, one tuple for each different call."""


def read_formats(capture: TrainingGraph) -> Formats:
    """What the GEMMs and attention calls of a capture read."""
    dtype = {i.value.id: i.value.dtype for i in capture.inputs} | {o.id: o.dtype for n in capture.nodes for o in n.outputs if o is not None}
    found: Formats = defaultdict(set)
    for node in capture.nodes:
        name = base(node.op)
        values = [*references(node.args, "v"), *(v for a in node.kwargs.values() for v in references(a, "v"))]
        if name in ATTENTIONS or node.op == "graphalign.attention":  # as a function in the stock model, as its kernel in a patched one
            name, values = "attention", values[:QUERY_KEY_VALUE]
        if name in MATMULS or name == "attention":
            found[node.module, name].add(tuple(dtype.get(v, "?") for v in values))
    return dict(found)


def changed_formats(stock: TrainingGraph, patched: TrainingGraph) -> list[str]:
    """In words, one line for every module and op whose operands have other formats in the patched model."""
    before, after = read_formats(stock), read_formats(patched)
    out = []
    for (module, op), formats in after.items():
        if new := formats - before.get((module, op), set()):
            was = " or ".join(f"({', '.join(f)})" for f in sorted(before.get((module, op), set()))) or "not called"
            out.append(f"{op} in {module} reads ({', '.join(sorted(new)[0])}), in the stock model {was}")
    return out
