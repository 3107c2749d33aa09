"""Reading the trainer's recorded nodes, for what folds several of them into one anchor."""

from __future__ import annotations

from graphalign.ir.args import references
from graphalign.ir.training import Node

HEADS_FIRST = 4
"""Dimensions of what attention reads and returns: batch, heads and tokens in one order or the other, size."""


def values_read(node: Node) -> list[int]:
    """The values that a node reads, as often as it does."""
    return [*references(node.args, "v"), *(v for a in node.kwargs.values() for v in references(a, "v"))]


def viewed(value: int, views: dict[int, Node]) -> int:
    """What a value is a view of; `views` maps a view's value to its node."""
    while value in views and len(above := values_read(views[value])) == 1:
        value = above[0]
    return value
