"""Weights whose names do not fit: names decide which GEMM is which."""

from __future__ import annotations

from graphalign.align.align import Alignment
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph


def name_notes(al: Alignment, inference: InferenceGraph, training: TrainingGraph) -> tuple[str, ...]:
    """What to say where GEMMs have no partner because the trainer names their weights otherwise; empty if names fit."""
    theirs = {s.checkpoint for p in inference.parameters for s in p.segments}
    alone = [o for o in al.training.ops if o.target == "gemm" and o.id not in al.partners and o.id not in al.regions.tail]
    mine = sorted({name for o in alone if (name := str(o.key[1])) not in theirs})
    spare = sorted(theirs - {i.name for i in training.inputs})
    if not mine or not spare:
        return ()
    return (
        f"weights are matched by name: the engine's checkpoint has no {_listed(mine)}, and the trainer no {_listed(spare)}; if the "
        "trainer renames them, let its parameters have the checkpoint's names",
    )


def _listed(names: list[str]) -> str:
    """The first of some names."""
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
