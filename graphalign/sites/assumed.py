"""Composite anchors whose inside was not compared: they are joined because the same module owns them, and taken for equal."""

from __future__ import annotations

from graphalign.align.inside import Inside, words

ASSUMED = "assumed equal: joined by owner, its inside was not compared"


def assumed_anchors(inside: Inside) -> dict[int, str]:
    """The matched composite anchors of the trainer of which nothing is known, with the reason."""
    return {op: f"{ASSUMED} ({why})" for op, why in inside.assumed.items()}


def compared_anchors(inside: Inside) -> dict[int, str]:
    """Those that were compared and are the same function, with what was measured."""
    return {op: f"the same function: {words(found)}" for op, found in inside.equal.items()}
