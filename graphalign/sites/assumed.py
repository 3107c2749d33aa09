"""What was not compared: composite anchors, taken for equal because the same module owns them, and clamps that never fired."""

from __future__ import annotations

from collections import Counter

import networkx as nx

from graphalign.align.align import Alignment
from graphalign.align.check import QUERY_KEY
from graphalign.align.exercise import only_here
from graphalign.align.inside import Inside, words
from graphalign.align.masks import OLD
from graphalign.ir.dataflow import Dataflow
from graphalign.ir.paths import layer_of, pattern_of

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


def uncompared(al: Alignment, unknown: dict[int, str], *, tail: bool) -> tuple[str, ...]:
    """A sentence for each side that has anchors without a partner, for each table of the engine that is read where it is not recorded,
    and for attention of which something is not known.

    Args:
        al: the alignment.
        unknown: attention of the trainer to what was not compared, and why.
        tail: whether the engine's tail was captured.
    """
    own = [op for op in al.training.ops if op.kind == "anchor" and op.id not in al.partners and (tail or op.id not in al.regions.tail)]
    theirs = [op for op in al.inference.ops if op.kind == "anchor" and op.id not in al.reverse]
    out = []
    for ops, side, other in ((own, "the trainer", "the engine"), (theirs, "the engine", "the trainer")):
        if ops:
            kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(op.target for op in ops).items()))
            places = ", ".join(dict.fromkeys(pattern_of(op.module) or op.name for op in ops))
            out.append(f"{len(ops)} anchors of {side} have no partner in {other} ({kinds}): {places}"[:400])
    unread = {
        op.target: why for op in al.inference.ops if op.kind == "table" and (why := al.unsupported.get(("inference", op.id))) is not None
    }
    out += [f"what the engine computes with its table {table}: {why}"[:400] for table, why in unread.items()]
    for why in dict.fromkeys(unknown.values()):
        same = [al.training.ops[op] for op, other in unknown.items() if other == why]
        places = ", ".join(dict.fromkeys(pattern_of(op.module) or op.name for op in same))
        out.append(f"of {len(same)} attention{'s' if len(same) > 1 else ''} of the trainer ({places}), {why}"[:600])
    return tuple(out)


def old_masks(attentions: int) -> tuple[str, ...]:
    """A note about attentions whose windows could be compared only as they are configured."""
    if not attentions:
        return ()
    return (f"{OLD}: the windows of {attentions} attentions are compared as configured, causality is not",)


def unrotated(flow: Dataflow) -> tuple[int, ...]:
    """Layers that have attention, to whose queries and keys no table leads inside the layer, in order."""
    found = []
    for attention in flow.ops:
        if attention.target == "attention" and (layer := layer_of(attention.module)) is not None:
            inside = nx.DiGraph()
            inside.add_node(attention.id)
            for op in flow.ops[: attention.id + 1]:
                if layer_of(op.module) == layer:
                    read = op.operands[:QUERY_KEY] if op is attention else op.operands
                    inside.add_edges_from((r.producer, op.id) for operand in read for r in operand)
            if all(flow.ops[i].kind != "table" for i in nx.ancestors(inside, attention.id)):
                found.append(layer)
    return tuple(sorted(set(found)))
