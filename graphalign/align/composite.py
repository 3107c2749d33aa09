"""Composite anchors: an op of the engine that is a whole module's subgraph in the trainer (fused experts).

The training capture is rewritten before it is traced: the subgraph becomes one node, `graphalign.composite`, with the
operands that the engine's op has. What is inside is not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphalign.align.accumulate import summed_in
from graphalign.align.core import trim
from graphalign.align.latent import attends, latent
from graphalign.align.nodes import values_read, viewed
from graphalign.align.routed import routed
from graphalign.evaluate.aten import TRANSPARENT, base
from graphalign.ir.dataflow import LOW_PRECISION, Dataflow, Op
from graphalign.ir.inference import InferenceGraph, Parameter, Segment
from graphalign.ir.training import Node, TrainingGraph, Value

OP = "graphalign.composite"


@dataclass(frozen=True)
class Folded:
    """The training capture with composite nodes, and why a module could not be folded."""

    capture: TrainingGraph
    failed: dict[str, str]
    """Module path to the reason."""


def fold(capture: TrainingGraph, inference: Dataflow) -> Folded:
    """Make one node of every module that the engine runs as one op.

    Args:
        capture: the training capture.
        inference: the traced inference side; its composite anchors name the modules in `detail["owner"]`.
    """
    composites = [op for op in inference.ops if op.kind == "anchor" and op.target == "composite"]
    owners = {str(op.detail["owner"]): len(op.operands) if op.detail.get("own") or op.detail.get("whole") else 0 for op in composites}
    own = {str(op.detail["owner"]): op for op in composites if op.detail.get("own") or op.detail.get("routed")}
    if not owners:
        return Folded(capture, {})
    failed: dict[str, str] = {}
    of_module: dict[str, list[int]] = {}
    there = {node.module for node in capture.nodes}
    attending = {node.module for node in capture.nodes if attends(node)}
    places = {owner: _place(own[owner], there, attending) if owner in own else owner for owner in owners}
    for n, node in enumerate(capture.nodes):
        for owner, place in places.items():
            if node.module == place or (owner not in own and node.module.startswith(place + ".")):
                of_module.setdefault(owner, []).append(n)
                break
    readers: dict[int, list[int]] = {}
    values: dict[int, Value] = {i.value.id: i.value for i in capture.inputs}
    for n, node in enumerate(capture.nodes):
        values.update((o.id, o) for o in node.outputs if o is not None)
        for v in values_read(node):
            readers.setdefault(v, []).append(n)
    replaced: dict[int, Node] = {}
    dropped: set[int] = set()
    parameters = {i.value.id for i in capture.inputs if i.kind == "parameter"}
    for node in capture.nodes:  # and their casts and views
        if base(node.op) in TRANSPARENT and (reads := values_read(node)) and all(v in parameters for v in reads):
            parameters.update(o.id for o in node.outputs if o is not None)
    for owner in owners:
        inside = of_module.get(owner)
        kind = own[owner].detail if owner in own else {}
        if not inside and not kind.get("routed"):
            failed[places[owner]] = "the trainer has no such module"
            continue
        if kind.get("latent") or kind.get("routed"):
            found = (
                latent(capture, inside or [], parameters, readers)
                if kind.get("latent")
                else routed(capture, places[owner], _router(inference, own[owner]), parameters, readers)
            )
            if isinstance(found, str):
                failed[places[owner]] = found
                continue
            node, inside = found
            replaced[inside[-1]] = node.model_copy(update={"module": places[owner], "kwargs": {**node.kwargs, "owner": owner}})
            dropped.update(inside[:-1])
            continue
        assert inside is not None
        if owner in own:
            inside = _own(capture, trim(capture, _own(capture, inside), parameters, inference, own[owner]))
        inside = _without_upcasts(capture, inside, readers)
        made = _composite(capture, owner, inside, readers, values, parameters, owners[owner], places[owner] if owner in own else "")
        if isinstance(made, str) and not owners[owner]:  # the checkpoint names no module of experts only: a router lies beside them
            parts: dict[str, list[int]] = {}
            for n in inside:
                below = capture.nodes[n].module.removeprefix(owner).split(".")
                parts.setdefault(below[1] if len(below) > 1 else "", []).append(n)
            tried = [(part, _composite(capture, owner, part, readers, values, parameters, 0)) for name, part in parts.items() if name]
            fits = [(part, node) for part, node in tried if isinstance(node, Node)]
            if len(fits) == 1:
                inside, made = fits[0]
        if isinstance(made, str):
            failed[places[owner]] = made
            continue
        replaced[inside[-1]] = made
        dropped.update(inside[:-1])
    nodes = tuple(replaced.get(n, node) for n, node in enumerate(capture.nodes) if n not in dropped)
    return Folded(capture.model_copy(update={"nodes": nodes}), failed)


def _composite(
    capture: TrainingGraph,
    owner: str,
    inside: list[int],
    readers: dict[int, list[int]],
    values: dict[int, Value],
    parameters: set[int],
    operands: int,
    own: str = "",
) -> Node | str:
    """One node for a module's nodes. Or why not.

    Experts read hidden states, routing weights and expert numbers; a layer, or its own core, reads `operands` activations. One value comes
    out. For a core, `own` is the module that it is part of.
    """
    if not inside:
        return "the module computes nothing of its own"
    members = set(inside)
    produced = {o.id for n in inside for o in capture.nodes[n].outputs if o is not None}
    read = list(dict.fromkeys(v for n in inside for v in values_read(capture.nodes[n]) if v not in produced and v not in parameters))
    left = [v for v in sorted(produced) if v in capture.outputs or any(n not in members for n in readers.get(v, ()))]
    if len(left) != 1:
        return f"{len(left)} of its values are read outside"
    if any(n < inside[-1] for n in readers.get(left[0], ()) if n not in members):
        return "its result is read before it ends"
    done = {"outputs": (values[left[0]],), "module": own or owner, "source": capture.nodes[inside[-1]].source}
    if operands:
        if len(read) != operands and own:  # pieces of one projection are that projection
            views = {o.id: x for x in capture.nodes if x.module == capture.nodes[inside[-1]].module and base(x.op) in TRANSPARENT
                     for o in x.outputs if o is not None}  # fmt: skip
            read = list(dict.fromkeys(viewed(v, views) for v in read))
        if len(read) != operands:
            return f"{'its own forward' if own else 'it'} reads {len(read)} activations, the engine's op {operands}"
        return Node(op=OP, args=tuple({"v": v} for v in read), kwargs={"own": True, "owner": owner} if own else {}, **done)
    numbers = [v for v in read if values[v].dtype.startswith("int")]
    ids = numbers[0] if numbers else None
    size = _numel(values[ids]) if ids is not None else 0
    weights = [v for v in read if ids is not None and v != ids and not values[v].dtype.startswith("int") and _numel(values[v]) == size]
    hidden = [v for v in read if v not in numbers and v not in weights and _numel(values[v]) > 1]
    if ids is None or len(numbers) != 1 or len(weights) != 1 or len(hidden) != 1:
        return f"it reads {len(hidden)} activations, {len(weights)} routing weights and {len(numbers)} integer tensors, not one of each"
    sums = summed_in([capture.nodes[n] for n in inside], values[left[0]])
    return Node(op=OP, args=({"v": hidden[0]}, {"v": weights[0]}, {"v": ids}), kwargs={"routing": [1, 2], "sums": sums}, **done)


def _place(op: Op, modules: set[str], attending: set[str]) -> str:
    """The trainer's module that an op of the engine is in: named by the engine as the op's layer or module, or by what they hold."""
    named = [str(p) for p in op.detail["places"]]
    if op.detail.get("latent"):
        return next((p for name in named for p in (name, name.rpartition(".")[0]) if p in attending), named[0])
    if op.detail.get("routed"):
        return next((p for p in named if any(m == p or m.startswith(f"{p}.") for m in modules)), named[0])
    return next((p for p in named if p in modules), named[0])


def _router(inference: Dataflow, op: Op) -> str:
    """The parameter that an op's router logits are computed with, empty if they are no GEMM's result."""
    names = {name for r in op.operands[1] for name in inference.ops[r.producer].key[1:-1] if inference.ops[r.producer].target == "gemm"}
    return str(names.pop()) if len(names) == 1 else ""


def _own(capture: TrainingGraph, inside: list[int]) -> list[int]:
    """What a forward computes itself: not the views of what it is given, nor those of what its submodules return."""
    produced: set[int] = set()
    kept: list[int] = []
    for n in inside:
        node = capture.nodes[n]
        if base(node.op) not in TRANSPARENT or any(v in produced for v in values_read(node)):
            kept.append(n)
            produced.update(o.id for o in node.outputs if o is not None)
    return kept


def _without_upcasts(capture: TrainingGraph, inside: list[int], readers: dict[int, list[int]]) -> list[int]:
    """Without the exact casts to FP32 at a module's end: its result is what they read, with the rounding that they would hide."""
    members = set(inside)
    made = {o.id: o.dtype for n in inside for o in capture.nodes[n].outputs if o is not None}
    for n in reversed(inside):
        node = capture.nodes[n]
        if base(node.op) != "_to_copy" or made.get((values_read(node) or [-1])[0]) not in LOW_PRECISION:
            continue
        if all(o is not None and o.dtype == "float32" and not members.intersection(readers.get(o.id, ())) for o in node.outputs):
            members.discard(n)
    return [n for n in inside if n in members]


def _numel(value: Value) -> int:
    n = 1
    for s in value.shape:
        n *= s
    return n


def rename(inference: InferenceGraph, training: TrainingGraph) -> InferenceGraph:
    """Checkpoint names as the trainer has them, where the trainer's module tree renames a checkpoint's prefix.

    Some Transformers 5 models load `block_sparse_moe.gate.weight` into `mlp.gate.weight`. A prefix is renamed if one unmatched
    parameter of the trainer, and only one, differs from an unmatched checkpoint name in the middle of its path alone.
    """
    mine = {i.name for i in training.inputs if i.kind in ("parameter", "buffer")}
    theirs = {s.checkpoint for p in inference.parameters for s in p.segments}
    lost_mine, lost_theirs = sorted(mine - theirs), sorted(theirs - mine)
    if not lost_mine or not lost_theirs:
        return inference
    prefixes: dict[str, set[str]] = {}
    for name in lost_theirs:
        fits = [x for other in lost_mine if (x := _moved(name, other)) is not None]
        if len(fits) == 1:
            prefixes.setdefault(fits[0][0], set()).add(fits[0][1])
    moves = sorted(((a, next(iter(b))) for a, b in prefixes.items() if len(b) == 1), key=lambda x: -len(x[0]))

    def new(name: str) -> str:
        if name in mine:
            return name
        return next((b + name[len(a) :] for a, b in moves if name == a or name.startswith(a + ".")), name)

    def moved(p: Parameter) -> Parameter:
        segments = tuple(Segment(**{**s.model_dump(), "checkpoint": new(s.checkpoint)}) for s in p.segments)
        return p if segments == p.segments else p.model_copy(update={"segments": segments})

    return inference.model_copy(update={"parameters": tuple(moved(p) for p in inference.parameters)}) if moves else inference


def _moved(a: str, b: str) -> tuple[str, str] | None:
    """The prefixes by which two names differ if they begin and end alike, else None."""
    x, y = a.split("."), b.split(".")
    if x[0] != y[0]:  # another name of the whole model
        return (x[0], y[0]) if x[1:] == y[1:] and len(x) > 1 else None
    head = 0
    while head < min(len(x), len(y)) and x[head] == y[head]:
        head += 1
    tail = 0
    while tail < min(len(x), len(y)) - head and x[-1 - tail] == y[-1 - tail]:
        tail += 1
    middle_x, middle_y = x[head : len(x) - tail], y[head : len(y) - tail]
    if not tail or not head or any(t.isdigit() for t in middle_x + middle_y):
        return None
    if bool(middle_x) != bool(middle_y) and any(t.isdigit() for t in x[:head]):  # a level more or less, within a layer
        return a, b
    if tail < 2 or not middle_x:
        return None
    return ".".join(x[: len(x) - tail]), ".".join(y[: len(y) - tail])
