"""GEMMs without a namesake: one that reads what a GEMM of the other side reads is that GEMM, with another weight.

A head that is tied on one side only multiplies by `embed_tokens.weight` here and by `lm_head.weight` there. Names decide who is whose
partner, so both are left over, although both read the last hidden state. If the other side has a parameter of either name too, the two
are not one parameter that was renamed, and the difference is one of meaning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from graphalign.ir.dataflow import Dataflow, Op

Reads = Callable[[Op, Op], bool]
"""Whether a training GEMM and an inference GEMM read the same elements."""


def other_weights(
    training: Dataflow, inference: Dataflow, partners: Mapping[int, Any], names: tuple[set[str], set[str]], reads: Reads
) -> dict[int, tuple[int, str]]:
    """Training GEMMs that stand where a GEMM of the engine with another weight stands.

    Args:
        training, inference: the dataflows.
        partners: training op to its inference ops, so far.
        names: parameters that each side has, by checkpoint name: the trainer's, the engine's.
        reads: whether two GEMMs read the same elements.

    Returns:
        Training op to the engine's op and, in words, what the two multiply by.
    """
    mine, theirs = names
    own = [op for op in training.ops if op.kind == "anchor" and (op.target == "gemm" or op.detail.get("made_of"))]
    taken = {(i, str(op.key[1])) for op in own for i in partners.get(op.id, ()) if op.target == "gemm"}
    lost = [op for op in own if not partners.get(op.id)]
    free: dict[int, list[str]] = defaultdict(list)
    for op in inference.ops if lost else ():
        if op.kind == "anchor" and op.target == "gemm" and op.key[1] != "unknown":
            for name in op.key[1:-1]:
                if (op.id, name) not in taken:
                    free[op.id].append(str(name))
    found: dict[int, tuple[int, str]] = {}
    for op in lost:
        made = op.detail.get("made_of", ())
        weights = made or (str(op.key[1]),)
        what = f"a matrix that it makes of {' and '.join(weights)}" if made else weights[0]
        for i, left in free.items():
            different = [n for n in left if (made or n not in weights) and (theirs.intersection(weights) or n in mine)]
            if different and reads(op, inference.ops[i]):
                found[op.id] = i, f"the trainer multiplies by {what}, the engine by {' or '.join(different)}"
                break
    return found
