"""A recurrent or state-space core within a trainer's module: what of its own forward the engine's op is.

Some modules multiply the projected states before the core, or gate its result behind it, where others leave both to submodules.
Which of these the engine's op includes shows in the engine's graph: what it reads, and who else reads that.
"""

from __future__ import annotations

from graphalign.align.nodes import values_read
from graphalign.evaluate.aten import TRANSPARENT, base, is_pointwise
from graphalign.ir.dataflow import Dataflow, Op
from graphalign.ir.training import Node, TrainingGraph


def trim(capture: TrainingGraph, inside: list[int], parameters: set[int], engine: Dataflow, op: Op) -> list[int]:
    """The nodes of the core.

    A pointwise step that joins the core's result with something that is no part of it (a gate) is behind the core, if the engine reads the
    core's operand elsewhere too. A pointwise step through which all of the operand goes is before it, if the engine computes its operand.

    Args:
        capture: the training capture.
        inside: what the module's own forward computes, ascending.
        parameters: values that are parameters, or casts and views of them.
        engine: the traced inference side.
        op: the engine's op.
    """
    made = {r.producer for operand in op.operands for r in operand}
    if any(c != op.id for p in made for c, _ in engine.readers.get(p, ())):
        inside = _without_gate(capture, inside, parameters)
    if len(op.operands) == 1 and any(engine.ops[p].kind == "op" for p in made):
        inside = _without_factor(capture, inside, parameters)
    return inside


def _outputs(node: Node) -> list[int]:
    return [o.id for o in node.outputs if o is not None]


def _without_gate(capture: TrainingGraph, inside: list[int], parameters: set[int]) -> list[int]:
    mixed: dict[int, bool] = {}
    """Values of the module to whether tokens or channels were mixed on the way to them."""
    for n in inside:
        node = capture.nodes[n]
        mixes = base(node.op) not in TRANSPARENT and not is_pointwise(node.op)
        mixed.update((o, mixes or any(mixed.get(v, False) for v in values_read(node))) for o in _outputs(node))
    at, end = len(inside) - 1, len(inside)
    while at >= 0:
        node = capture.nodes[inside[at]]
        reads = [v for v in dict.fromkeys(values_read(node)) if v not in parameters]
        core = [v for v in reads if mixed.get(v)]
        if len(core) != 1 or (base(node.op) not in TRANSPARENT and not is_pointwise(node.op)):
            break
        if len(reads) > 1:  # a gate
            end = at
        below = next((k for k in range(at - 1, -1, -1) if core[0] in _outputs(capture.nodes[inside[k]])), -1)
        if end == at:
            end = below + 1
        at = below
    if end == len(inside) or not end:
        return inside
    readers: dict[int, set[int]] = {}
    for n, node in enumerate(capture.nodes):
        for v in values_read(node):
            readers.setdefault(v, set()).add(n)
    needed = set(_outputs(capture.nodes[inside[end - 1]]))
    kept: set[int] = set()
    for n in reversed(inside[:end]):
        outs = _outputs(capture.nodes[n])
        # and what nobody reads: the last state, without a cache to keep it in
        if needed & set(outs) or all(readers.get(v, set()) <= kept for v in outs):
            kept.add(n)
            needed.update(values_read(capture.nodes[n]))
    return sorted(kept)


def _without_factor(capture: TrainingGraph, inside: list[int], parameters: set[int]) -> list[int]:
    given = {i.value.id for i in capture.inputs}
    while True:
        produced = {o for n in inside for o in _outputs(capture.nodes[n])}
        first = next(
            (n for n in inside if is_pointwise(capture.nodes[n].op) and not produced & set(values_read(capture.nodes[n]))
             and any(v not in parameters and v not in given for v in values_read(capture.nodes[n]))), None)  # fmt: skip
        if first is None:
            return inside
        read = [v for v in values_read(capture.nodes[first]) if v not in parameters and v not in given]
        others = {v for n in inside if n != first for v in values_read(capture.nodes[n])} - produced - parameters - given
        if len(read) != 1 or others:
            return inside
        inside = [n for n in inside if n != first]
