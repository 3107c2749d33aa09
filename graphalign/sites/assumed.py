"""What was not compared: composite anchors, taken for equal because the same module owns them, and clamps that never fired."""

from __future__ import annotations

from graphalign.align.align import Alignment
from graphalign.align.exercise import only_here
from graphalign.align.inside import Inside, words

ASSUMED = "assumed equal: joined by owner, its inside was not compared"


def assumed_anchors(inside: Inside) -> dict[int, str]:
    """The matched composite anchors of the trainer of which nothing is known, with the reason."""
    return {op: f"{ASSUMED} ({why})" for op, why in inside.assumed.items()}


def compared_anchors(inside: Inside) -> dict[int, str]:
    """Those that were compared and are the same function, with what was measured."""
    return {op: f"the same function: {words(found)}" for op, found in inside.equal.items()}


def unexercised(al: Alignment) -> dict[tuple[str, int], str]:
    """(side, op) of clamps, `where` and `max` that one side has and that took one side only on all inputs, with the reason."""
    sides = {"training": "the trainer", "inference": "the engine"}
    why = "it never acts on the chosen inputs ({}), so whether the other side does the same there was not compared; it is {}'s"
    return {
        (side, op): why.format(pick.what, sides[side])
        for (side, op), pick in only_here(al.dormant, al.regions.region, al.region_of).items()
    }
