"""Experts with their routing: the engine's op reads hidden states and router logits, and chooses the experts itself.

Or it multiplies the hidden states with the router's weight too: then it has the hidden states in place of the logits.
"""

from __future__ import annotations

from graphalign.align.nodes import values_read, viewed
from graphalign.evaluate.aten import MATMULS, TRANSPARENT, VIEWS, base
from graphalign.ir.training import Node, TrainingGraph, Value


def routed(
    capture: TrainingGraph, owner: str, router: str, parameters: set[int], readers: dict[int, list[int]]
) -> tuple[Node, list[int]] | str:
    """One node for all from a router's logits to the experts' result. Or why not.

    Args:
        capture: the training capture.
        owner: the experts' module; its parent holds the router.
        router: the parameter that the logits are computed with; empty if the op does that itself.
        parameters: values that are parameters, or casts and views of them.
        readers: value id to the nodes that read it.

    Returns:
        The node, with operands hidden states and logits (or hidden states again); and the nodes that it stands for, ascending.
    """
    nodes, parent = capture.nodes, owner.rpartition(".")[0]
    names = {i.value.id: i.name for i in capture.inputs if i.kind == "parameter"}
    origin = {o.id: n for n, node in enumerate(nodes) for o in node.outputs if o is not None}

    def weight(v: int) -> str:
        while v not in names and v in parameters and v in origin and (up := values_read(nodes[origin[v]])):
            v = up[0]
        return names.get(v, "")

    experts = [n for n, x in enumerate(nodes) if x.module == owner or x.module.startswith(f"{owner}.")]
    around = [n for n, x in enumerate(nodes) if x.module == parent or x.module.startswith(f"{parent}.")]
    if router:
        gemm = next((n for n, x in enumerate(nodes) if base(x.op) in MATMULS and router in {weight(v) for v in values_read(x)}), None)
    else:
        gemm = _chooses(nodes, around, set(experts))
    if gemm is None or not around:
        return f"the trainer multiplies nothing with {router or 'a parameter'} in {parent}"
    end = (experts or around)[-1]
    if gemm > end:
        return "the trainer's router is behind its experts"
    logits = nodes[gemm].outputs[0]
    assert logits is not None
    inside = {*experts} if router else {*experts, gemm}
    below = {logits.id}
    for n in around:
        node = nodes[n]
        if gemm < n <= end and not below.isdisjoint(values_read(node)):
            inside.add(n)
            below.update(o.id for o in node.outputs if o is not None)
    produced: dict[int, Value] = {o.id: o for n in inside for o in nodes[n].outputs if o is not None}
    left = [
        v for v in produced if v in capture.outputs or any(r not in inside and not _dead(r, nodes, readers) for r in readers.get(v, ()))
    ]
    read = list(dict.fromkeys(v for n in sorted(inside) for v in values_read(nodes[n]) if v not in produced and v not in parameters))
    view = {o.id: x for x in nodes if base(x.op) in VIEWS for o in x.outputs if o is not None}
    read = list(dict.fromkeys(viewed(v, view) for v in read if not _constant(v, nodes, origin)))
    hidden = [v for v in read if v != viewed(logits.id, view)]
    if len(left) != 1 or len(hidden) != 1:
        return f"{len(left)} of its values are read outside, and it reads {len(hidden)} activations besides the router's logits"
    second = logits.id if router else hidden[0]
    last = max(inside)
    return Node(op="graphalign.composite", args=({"v": hidden[0]}, {"v": second}), kwargs={}, outputs=(produced[left[0]],), module=owner,
                source=nodes[last].source), sorted(inside)  # fmt: skip


def _chooses(nodes: tuple[Node, ...], around: list[int], experts: set[int]) -> int | None:
    """The first product beside the experts that they depend on: the router's."""
    for start in around:
        if start in experts or base(nodes[start].op) not in MATMULS:
            continue
        below = {o.id for o in nodes[start].outputs if o is not None}
        for n in around:
            if n > start and not below.isdisjoint(values_read(nodes[n])):
                if n in experts:
                    return start
                below.update(o.id for o in nodes[n].outputs if o is not None)
    return None


def _dead(n: int, nodes: tuple[Node, ...], readers: dict[int, list[int]]) -> bool:
    """Whether nobody reads what a layout op shows (router logits returned for nobody)."""
    return base(nodes[n].op) in TRANSPARENT and not any(readers.get(o.id) for o in nodes[n].outputs if o is not None)


def _constant(value: int, nodes: tuple[Node, ...], origin: dict[int, int]) -> bool:
    """Whether a value is made of nothing."""
    return value in origin and not values_read(nodes[origin[value]])
