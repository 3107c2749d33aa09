"""Random numbers of a trainer in training mode: dropout is taken out of its graph, and named.

A dropout changes values, so the trainer computes another function than the engine; its roundings can be compared all the same, as if it
kept everything. CUDA has one op for it (`native_dropout`), other devices draw a mask and multiply by it (torch 2.13).
"""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from graphalign.align.nodes import values_read
from graphalign.evaluate.aten import base
from graphalign.ir.args import references
from graphalign.ir.training import Node, TrainingGraph

DROPOUT = frozenset({"native_dropout", "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"})
RANDOM = frozenset(
    {"bernoulli", "uniform", "normal", "exponential", "random", "rand", "randn", "rand_like", "randn_like", "randint", "multinomial",
     "cauchy", "geometric", "log_normal", "rrelu_with_noise", "randperm", "poisson", "binomial"}
)  # fmt: skip
"""Ops that draw numbers, by name without the mark of in-place ops."""
_SHAPES = frozenset({"empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros", "new_ones"})
"""Ops that read only the shape of a tensor."""


@dataclass(frozen=True)
class Drawn:
    """A place where the trainer's values depend on random numbers."""

    value: int
    """What it makes."""
    node: Node
    what: str
    """`dropout`, `random numbers`."""
    reason: str


def take_out(capture: TrainingGraph) -> tuple[TrainingGraph, tuple[Drawn, ...]]:
    """The capture with every dropout as if it kept everything, and the places where random numbers reach what the model returns."""
    if not any(base(n.op) in DROPOUT | RANDOM for n in capture.nodes):
        return capture, ()
    origin = {o.id: n for n in capture.nodes for o in n.outputs if o is not None}
    nodes: list[Node] = []
    found: list[Drawn] = []
    for node in capture.nodes:
        kept, share = _dropout(node, origin)
        out = node.outputs[0] if node.outputs else None
        if kept is None or out is None:
            nodes.append(node)
            continue
        if share:
            words = f"the trainer drops {share:.3g} of these values at random (training mode); the engine drops none"
            found.append(Drawn(out.id, node, "dropout", words))
        nodes.append(node.model_copy(update={"op": "aten.clone.default", "args": ({"v": kept},), "kwargs": {}, "outputs": (out,)}))
    changed = capture.model_copy(update={"nodes": tuple(nodes)})
    graph = nx.DiGraph()
    graph.add_nodes_from(capture.outputs)
    for node in nodes:
        read = [] if base(node.op) in _SHAPES else values_read(node)
        graph.add_edges_from((v, o.id) for v in read for o in node.outputs if o is not None)
    live = set(capture.outputs).union(*(nx.ancestors(graph, v) for v in capture.outputs))
    for node in nodes:
        out = node.outputs[0] if node.outputs else None
        if base(node.op) in RANDOM and out is not None and out.id in live:
            words = f"the trainer's values depend on random numbers here ({node.op}); the engine draws none"
            found.append(Drawn(out.id, node, "random numbers", words))
    return changed, tuple(d for d in found if d.value in live)


def _dropout(node: Node, origin: dict[int, Node]) -> tuple[int | None, float]:
    """The value that a node hands on if nothing is dropped, and the share that is; None for any other node."""
    read = list(references(node.args, "v"))
    if base(node.op) in DROPOUT:
        share, train = (*node.args[1:], None, None)[:2]
        return read[0], float(share) if isinstance(share, int | float) and train is not False else 0.0
    if base(node.op) != "mul" or len(read) != 2:
        return None, 0.0
    for value, mask in ((read[0], read[1]), (read[1], read[0])):
        if (share := _drops(mask, origin)) is not None:
            return value, share
    return None, 0.0


def _drops(mask: int, origin: dict[int, Node]) -> float | None:
    """The share that a dropout's mask hides: drawn, and divided by the share that stays."""
    scaled = origin.get(mask)
    if scaled is None or base(scaled.op) != "div" or len(scaled.args) < 2:
        return None
    drawn = origin.get(next(iter(references(scaled.args, "v")), -1))
    if drawn is None or base(drawn.op) != "bernoulli" or len(drawn.args) < 2:
        return None
    kept = drawn.args[1]
    return 1.0 - kept if isinstance(kept, int | float) and kept == scaled.args[1] else None
