"""What the check takes into account between the sides, found from its own values and the trainer's graph, not from the proposal.

Heads' elements in another order: engines reorder the rows of checkpoints' projections so that rotary embeddings can take another
layout (interleaved pairs, or halves). The products of query and key are the same if both are reordered alike.
Scaled experts: the trainer multiplies the routing weights by a constant, the engine the experts' result.
"""

from __future__ import annotations

import torch

from graphalign.align.nodes import HEADS_FIRST
from graphalign.evaluate.aten import base
from graphalign.ir.dataflow import Dataflow, Op
from graphalign.ir.training import TrainingGraph

NEAR = 2.0**-3
"""Distance that roundings to BF16 do not reach, relative to a vector's norm."""


def head_order(query: torch.Tensor, key: torch.Tensor, engine_query: torch.Tensor, engine_key: torch.Tensor) -> tuple[int, ...] | None:
    """The one order of the elements within heads that brings both the query and the key to the engine's.

    Every element of a head is a vector over all tokens and heads, with signs; each of the engine's must be near to one of the
    trainer's, and no two to the same. Roundings are allowed for: it is the check's business to compare to the last bit.

    Args:
        query: the trainer's, [1, heads, tokens, size].
        key: the same.
        engine_query: the engine's, [tokens, heads x size].
        engine_key: the same.

    Returns:
        The trainer's element for each of the engine's; None if they are in the same order, or in none.
    """
    orders = {_order(query, engine_query), _order(key, engine_key)}
    order = orders.pop()
    return None if orders or order is None or order == tuple(range(len(order))) else order


def _order(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[int, ...] | None:
    if mine.dim() != HEADS_FIRST or mine.numel() != theirs.numel() or not mine.numel():
        return None
    size = mine.shape[-1]
    a, b = mine.transpose(1, 2).reshape(-1, size), theirs.reshape(-1, size)
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return None
    if _all_near(a, b):
        return tuple(range(size))
    order = torch.cdist(b.T.contiguous(), a.T.contiguous(), compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
    found = tuple(int(i) for i in order)
    return found if len(set(found)) == size and _all_near(a[:, order], b) else None


def _all_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a - b).norm(dim=0) <= NEAR * b.norm(dim=0)).all())


def scale(training: TrainingGraph, flow: Dataflow, op: Op, mine: torch.Tensor, theirs: torch.Tensor) -> float | None:
    """The constant by which the trainer multiplies an anchor's routing weights and the engine does not.

    It must stand in the trainer's graph, where the routing weights are made, and the two sides' values must say the same.

    Args:
        training: the trainer's capture.
        flow: the same, traced.
        op: the anchor, with routing weights.
        mine: the trainer's routing weights.
        theirs: the engine's, in the same layout.

    Returns:
        None if there is no such constant.
    """
    a, b = mine.reshape(-1), theirs.reshape(-1)
    if a.numel() != b.numel() or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()) or not bool(b.any()):
        return None
    written = {n for r in op.operands[op.detail["routing"][0]] for n in _constants(training, flow.ops[r.producer])}
    fits = [n for n in written if n != 1.0 and float((a - n * b).norm()) <= NEAR * float(a.norm())]
    return fits[0] if len(fits) == 1 else None


def _constants(training: TrainingGraph, op: Op) -> list[float]:
    """Numbers that an op multiplies with, as they are written in its call."""
    node = op.detail.get("node") if op.kind == "op" else None
    if node is None or base(training.nodes[node].op) not in ("mul", "div"):
        return []
    found = [float(a) for a in training.nodes[node].args if isinstance(a, int | float) and not isinstance(a, bool) and a]
    return [1.0 / n for n in found] if base(training.nodes[node].op) == "div" else found
