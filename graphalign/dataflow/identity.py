"""What an anchor is called, the same on both sides: by checkpoint names, by the anchors above it, by its module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graphalign.ir.dataflow import Op, Operand


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


def nearest_anchors(ops: list[Op], operands: Iterable[Operand]) -> tuple[str, ...]:
    """Names of the anchors first met on the way up from `operands`, sorted.

    A merged GEMM stands for all its checkpoint tensors, so the name is the same whether or not a side merges them.
    """
    found: set[str] = set()
    seen: set[int] = set()
    todo = [r.producer for o in operands for r in o]
    while todo:
        i = todo.pop()
        if i in seen:
            continue
        seen.add(i)
        op = ops[i]
        if op.kind == "anchor":
            found.update(str(k) for k in op.key[1:-1]) if op.target == "gemm" else found.add(str(op.key))
        elif op.kind == "op":
            todo += [r.producer for o in op.operands for r in o]
    return tuple(sorted(found))
