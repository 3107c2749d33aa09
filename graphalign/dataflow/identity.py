"""What an anchor is called, the same on both sides: by checkpoint names, by the anchors above it, by its module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from graphalign.ir.dataflow import Op, Operand
from graphalign.ir.graph import met


def anchor_name(key: tuple[Any, ...]) -> str:
    """The name an anchor's random output hangs on: kind, checkpoint names, occurrence."""
    return "|".join(str(k) for k in key)


def owner_of(checkpoints: list[str]) -> str:
    """The module that holds some checkpoint tensors: their longest common path, without a tensor's own name."""
    paths = [c.split(".") for c in checkpoints]
    common = []
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common[:-1] if common and len(common) == min(len(p) for p in paths) else common)


def nearest_anchors(ops: Sequence[Op], operands: Iterable[Operand]) -> tuple[str, ...]:
    """Names of the anchors first met on the way up from `operands`, sorted.

    A merged GEMM stands for all its checkpoint tensors, so the name is the same whether or not a side merges them.
    """
    starts = [r.producer for o in operands for r in o]
    above = met(starts, lambda i: [r.producer for o in ops[i].operands for r in o] if ops[i].kind == "op" else (), len(ops))
    anchors = [op for i in above if (op := ops[i]).kind == "anchor"]
    return tuple(sorted({str(k) for op in anchors for k in (op.key[1:-1] if op.target == "gemm" else (op.key,))}))
