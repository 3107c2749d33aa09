"""Calls that combine the ranks of a tensor-parallel engine: they hand on what `partial` says they read."""

from __future__ import annotations

from typing import Any

from graphalign.dataflow.held import Held
from graphalign.dataflow.opaque import OpaqueOp
from graphalign.ir.args import references
from graphalign.ir.dataflow import Op
from graphalign.ir.inference import Node


def combine(held: Held, g: int, node: Node, rule: OpaqueOp) -> bool:
    """Trace a call that combines ranks: what it reads is handed on.

    Returns:
        False if it reads something else than a part whose whole is known; it is opaque then.
    """
    args = dict(node.args)
    partial = held.partial
    if rule.kind == "embedding":
        weight = next(iter(references(args.get(rule.weight), "b")), "")
        written = list(references(args.get(rule.out), "b")) or list(node.outputs[:1])
        parameter = held.parameters.get(held.inputs[weight].source) if weight in held.inputs else None
        if parameter is None or not parameter.segments:
            return False
        refs = held.read(g, weight)
        for o in written:
            held.write(o, refs)
            if any(s.shards for s in parameter.segments):
                partial.buffers.add(o)
    else:
        source = next(iter(references(args.get(rule.input), "b")), "")
        refs = held.read(g, source)
        if rule.kind == "reduce":
            if not held.is_part(source):
                return False
            partial.summed.update(r.producer for r in refs)
        elif not _gathers(held, args, [held.ops[r.producer] for r in refs]):
            return False
        for o in node.outputs:
            held.write(o, refs)
    partial.handed_on[g, node.name] = refs
    return True


def _gathers(held: Held, args: dict[str, Any], producers: list[Op]) -> bool:
    """Whether an `all_gather` makes one GEMM's output features whole."""
    op = producers[0] if len(producers) == 1 else None
    if op is None or op.target != "gemm" or args.get("dim") not in (-1, 1) or len(op.detail.get("segments", ())) != 1:
        return False
    op.detail["gathered"] = True
    return True
