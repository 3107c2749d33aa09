"""Composite anchors whose inside was not compared: they are joined because the same module owns them, and taken for equal."""

from __future__ import annotations

from graphalign.align.align import Alignment
from graphalign.ir.dataflow import Op

ASSUMED = "assumed equal: joined by owner, its inside was not compared"


def assumed_anchors(al: Alignment, differing: frozenset[int] = frozenset()) -> dict[int, str]:
    """The matched composite anchors of the trainer that nothing is known about, with the reason.

    Args:
        al: the alignment.
        differing: anchors that are known to compute different functions.
    """
    return {op.id: ASSUMED for op in al.training.ops if is_composite(op) and op.id in al.partners and op.id not in differing}


def is_composite(op: Op) -> bool:
    """Whether an op stands for a whole subgraph on the other side."""
    return op.kind == "anchor" and op.target == "composite"
