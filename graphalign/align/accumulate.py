"""In which format experts' results are added up: inside an anchor, so it is compared as a parameter is, and no patch reaches it."""

from __future__ import annotations

from graphalign.evaluate.aten import MATMULS, TRANSPARENT, base
from graphalign.ir.args import references
from graphalign.ir.dataflow import LOW_PRECISION, Dataflow
from graphalign.ir.training import Node, Value

ADDS = frozenset({"index_add", "index_add_", "scatter_add", "scatter_add_", "index_put", "index_put_", "add", "add_"})
"""Ops that add into a tensor, element by element: every addition is rounded to its format."""
REDUCES = frozenset({"sum", "mean"}) | MATMULS
"""Ops whose kernels add in FP32 and round once."""


def summed_in(nodes: list[Node], result: Value) -> str:
    """The format of the additions that a result ends with, behind casts and views; empty if it ends with something else.

    Args:
        nodes: the subgraph, in execution order.
        result: the value that it gives.
    """
    made = {o.id: (n, o) for n in nodes for o in n.outputs if o is not None}
    value = result.id
    while value in made:
        node, out = made[value]
        name = base(node.op)
        if name in ADDS:
            return out.dtype
        if name in REDUCES:
            return "float32" if out.dtype in LOW_PRECISION else out.dtype
        reads = [*references(node.args, "v")]
        if name not in TRANSPARENT or not reads:
            return ""
        value = reads[0]
    return ""


def differing_sums(training: Dataflow, inference: Dataflow, partners: dict[int, tuple[int, ...]]) -> list[tuple[int, str]]:
    """Training anchors whose results are added up in another format than their partners', with the reason."""
    found = []
    for op in training.ops:
        mine = str(op.detail.get("sums") or "")
        for i in partners.get(op.id, ())[:1] if op.kind == "anchor" and mine else ():
            theirs = str(inference.ops[i].detail.get("sums") or "")
            if theirs and theirs != mine:
                found.append((op.id, f"inside it, the trainer adds up the experts' results in {mine}, the engine's kernel in {theirs}"))
    return found
