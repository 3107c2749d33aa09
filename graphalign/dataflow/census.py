"""The structure of a capture as counts and sets, without names: what may be compared across versions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphalign.dataflow import trace_inference, trace_training
from graphalign.dataflow.declared import DECLARED
from graphalign.dataflow.opaque import load_opaque_ops
from graphalign.dataflow.returns import unwrap
from graphalign.ir.dataflow import Dataflow, Op
from graphalign.ir.inference import InferenceGraph, Kernel
from graphalign.ir.paths import layer_of, pattern_of
from graphalign.ir.training import TrainingGraph

Layer = int | None
_KERNEL_NAME = re.compile(r"^(op|buf|arg|cpp_fused|triton_|extern_kernels|kernel)\w*\d*")


@dataclass
class Census:
    """One capture."""

    ops: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(target, module pattern) to count; recomputed copies count each."""
    edges: dict[tuple[str, str, int], dict[Layer, frozenset[tuple[str, ...]]]] = field(default_factory=dict)
    """(producer, consumer, operand) to the roundings on the way, per layer of the consumer."""
    kernels: Counter[str] = field(default_factory=Counter)
    """What a generated kernel computes, in words, to count."""
    attention: dict[str, dict[str, Any]] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    calls: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Extern op to the argument names it is called with."""
    opaque: frozenset[str] = frozenset()
    """Extern ops that no rule describes, or whose rule says opaque."""
    declared: frozenset[str] = frozenset()
    """Extern ops that are compared as their rules declare."""


def module_of(where: str) -> str:
    """Module pattern at the head of a place as sites files write it, empty where there is only a kernel's name."""
    head = where.split(" ")[0] if where else ""
    return "" if not head or _KERNEL_NAME.match(head) or head.startswith("(") else pattern_of(head)


def of_inference(graph: InferenceGraph, rules: Path) -> Census:
    """Ops, edges and kernels of what the engine executes.

    Raises:
        CaptureFileError: the capture is inconsistent.
        BadInputError: the rules cannot be read.
    """
    known = load_opaque_ops(rules)
    calls = {n.op: tuple(a for a, _ in n.args) for g in graph.graphs for k in g.kernels for n in k.nodes if n.kind == "extern" and n.op}
    graph = unwrap(graph, known)
    out = _of_flow(trace_inference.Tracer(graph, known).run())
    for g in graph.graphs:
        for kernel in g.kernels:
            if kernel.kind != DECLARED and (words := _kernel(graph, kernel)):
                out.kernels[words] += 1
    out.attention = {a.layer: a.model_dump(exclude={"layer"}) for a in graph.attention}
    out.parameters = {
        p.name: f"{p.dtype} {list(p.shape)} from {', '.join(s.checkpoint for s in p.segments) or 'nothing'}" for p in graph.parameters
    }
    out.calls = {op: names for op, names in calls.items() if not op.startswith("inductor.")}
    out.declared = frozenset(k.generated for g in graph.graphs for k in g.kernels if k.kind == DECLARED)
    out.opaque = frozenset(n.op for g in graph.graphs for k in g.kernels for n in k.nodes if n.kind == "extern" and _is_opaque(n.op, known))
    return out


def _is_opaque(op: str, known: dict[str, Any]) -> bool:
    if not op or op.startswith(("inductor.", "aten.", "prims.")):
        return False
    return op not in known or known[op].kind == "opaque"


def of_training(graph: TrainingGraph) -> Census:
    """Ops and edges of what the trainer executes."""
    return _of_flow(trace_training.Tracer(graph).run())


def _of_flow(flow: Dataflow) -> Census:
    out = Census()
    edges: dict[tuple[str, str, int], dict[Layer, set[tuple[str, ...]]]] = {}
    for op in flow.ops:
        if op.kind in ("op", "anchor"):
            out.ops[op.target, pattern_of(op.module)] += 1
        for slot, operand in enumerate(op.operands):
            for ref in operand:
                p = flow.ops[ref.producer]
                if p.kind != "input":
                    key = (_label(p), _label(op), slot)
                    edges.setdefault(key, {}).setdefault(layer_of(op.module), set()).add(ref.roundings)
    out.edges = {k: {layer: frozenset(r) for layer, r in v.items()} for k, v in edges.items()}
    return out


def _label(op: Op) -> str:
    if op.kind in ("parameter", "input"):
        return f"{op.kind} {pattern_of(op.target)}"
    if op.kind == "output":
        return "output"
    return f"{op.target} in {pattern_of(op.module)}" if op.module else op.target


def _kernel(graph: InferenceGraph, kernel: Kernel) -> str:
    """A loop kernel in words: modules, and ops in order; empty for extern calls, which are ops of their own."""
    parts, modules = [], []
    for node in kernel.nodes:
        if node.kind == "loop" and (body := graph.bodies.get(node.body or "")) is not None:
            blocks = [body.ops, *body.subblocks.values()]
            parts.append(" ".join(_words(op for block in blocks for op in block)))
            modules.append(pattern_of(node.module))
    where = ", ".join(dict.fromkeys(m for m in modules if m))
    return f"[{' | '.join(sorted(p or 'copy' for p in parts))}]" + (f" of {where}" if where else "") if parts else ""


_PLUMBING = trace_inference.TRANSPARENT | trace_inference.INDEX_OPS | {"output", "ops", "store_reduction"}


def _words(ops: Iterable[tuple[Any, ...]]) -> list[str]:
    found: Counter[str] = Counter()
    for op in ops:
        target = str(op[1])
        if target not in _PLUMBING and not target.startswith(("masked_subblock", "set_indirect", "scan_")):
            found[target] += 1
    return [f"{n}×{t}" if n > 1 else t for t, n in sorted(found.items())]
