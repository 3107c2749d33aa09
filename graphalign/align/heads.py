"""Queries and keys whose heads hold their elements in another order: the products of the two are the same if both are reordered alike.

Engines reorder the rows of checkpoints' projections so that rotary embeddings can take another layout (interleaved pairs, or halves).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphalign.align.nodes import HEADS_FIRST
from graphalign.ir.dataflow import Dataflow

TOLERANCE = 2.0**-38


def head_orders(
    flow: Dataflow,
    partners: Mapping[int, tuple[int, ...]],
    training: Mapping[tuple[int, int], torch.Tensor],
    inference: Mapping[tuple[int, int], torch.Tensor],
) -> dict[int, tuple[int, ...]]:
    """Attention anchors whose query and key are the engine's, but for one order of the elements within heads.

    Args:
        flow: the training graph.
        partners: training op to its partners.
        training: operands of its anchors, by (op, slot): attention's are [1, heads, tokens, size].
        inference: the same of the engine, [tokens, heads x size].

    Returns:
        Training op to the trainer's element for each of the engine's.
    """
    found: dict[int, tuple[int, ...]] = {}
    for op in flow.ops:
        if op.target != "attention" or not partners.get(op.id):
            continue
        orders = [_order(training.get((op.id, s)), inference.get((partners[op.id][0], s))) for s in (0, 1)]
        order = orders[0]
        if order is not None and orders[1] == order and list(order) != sorted(order):
            found[op.id] = order
    return found


def _order(a: torch.Tensor | None, b: torch.Tensor | None) -> tuple[int, ...] | None:
    if a is None or b is None or a.dim() != HEADS_FIRST or a.numel() != b.numel() or not a.numel():
        return None
    size = a.shape[-1]
    mine, theirs = a.transpose(1, 2).reshape(-1, size), b.reshape(-1, size)
    near = 2.0 * TOLERANCE * theirs.abs()
    if bool(((mine - theirs).abs() <= near).all()):
        return tuple(range(size))
    order = []
    for j in range(size):
        hits = ((mine - theirs[:, j : j + 1]).abs() <= near[:, j : j + 1]).all(0).nonzero().reshape(-1).tolist()
        if len(hits) != 1:
            return None
        order += hits
    return tuple(order)
