"""What became of every op of both sides, for `graphalign why`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from graphalign.align.align import Alignment
from graphalign.align.edges import Comparison, Finding, text
from graphalign.ir.dataflow import Op
from graphalign.sites.ends import layer_of
from graphalign.sites.report import NodeStatus

Where = Callable[[str, Op], str]
"""(side, op) to its place, in words."""
PARTNERS = 12
"""Partners listed per op."""
EDGES = 6
"""Operand edges listed per op."""


def statuses(
    al: Alignment,
    comparison: Comparison,
    where: Where,
    assumed: dict[int, str],
    compared: dict[int, str],
    unexercised: dict[tuple[str, int], str],
) -> tuple[NodeStatus, ...]:
    """One status per op, training side first, in execution order.

    Args:
        al: the alignment.
        comparison: judged edges.
        where: says where an op is.
        assumed: composite anchors of the trainer that are taken for equal, with the reason.
        compared: those whose inside was compared, with what was measured.
        unexercised: (side, op) of clamps and the like that took one side only, with which.
    """
    by_consumer: dict[int, list[Finding]] = defaultdict(list)
    for f in comparison.findings:
        by_consumer[f.consumer].append(f)
    out = []
    for op in al.training.ops:
        if op.kind == "output":
            continue
        place = where("training", op).replace("*", str(layer_of(op.module)), 1) if op.module else op.module
        out.append(
            NodeStatus(
                name=op.name,
                side="training",
                target=op.target,
                where=place,
                status=_status(al, comparison, "training", op),
                partners=tuple(al.inference.ops[i].name for i in al.partners.get(op.id, ())[:PARTNERS]),
                reason=compared.get(op.id) or _reason(al, comparison, "training", op),
                edges=tuple(text(al.training, f) for f in by_consumer.get(op.id, ())[:EDGES]),
                assumed=assumed.get(op.id, ""),
                unexercised=unexercised.get(("training", op.id), ""),
                near=_near(al, op) if ("training", op.id) in comparison.leftover else (),
            )
        )
    for op in al.inference.ops:
        if op.kind == "output":
            continue
        out.append(
            NodeStatus(
                name=op.name,
                side="inference",
                target=op.target,
                where=f"{op.module} {where('inference', op)}".strip(),
                status=_status(al, comparison, "inference", op),
                partners=tuple(al.training.ops[i].name for i in al.reverse.get(op.id, ())[:PARTNERS]),
                reason=_reason(al, comparison, "inference", op),
                assumed=next((assumed[t] for t in al.reverse.get(op.id, ()) if t in assumed), ""),
                unexercised=unexercised.get(("inference", op.id), ""),
            )
        )
    return tuple(out)


def _status(al: Alignment, comparison: Comparison, side: str, op: Op) -> Any:
    if op.kind == "anchor":
        return "anchor"
    if op.kind != "op":
        return "source"
    if side == "training" and op.id in al.regions.tail and op.id not in al.partners:
        return "tail"
    if (side, op.id) in comparison.leftover:
        return "leftover"
    if (side, op.id) in comparison.interior:
        return "interior"
    return "paired"


def _near(al: Alignment, op: Op) -> tuple[str, ...]:
    found = ((al.inference.ops[n.op], n) for n in al.near.get(op.id, ()))
    return tuple(f"{other.name} = {other.target} ({other.module}): {n.why}" for other, n in found)


def _reason(al: Alignment, comparison: Comparison, side: str, op: Op) -> str:
    key = (side, op.id)
    return comparison.leftover.get(key) or comparison.interior.get(key) or al.unsupported.get(key) or ""
