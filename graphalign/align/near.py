"""Near misses: what of the engine comes closest to an op of the trainer that has no partner, and which condition it failed.

They are not evidence, and no part of the alignment: they are shown to somebody who asks why an op was not found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphalign.align.join import Join, Keys, found_in, share_inside
from graphalign.align.tables import as_real
from graphalign.ir.dataflow import Dataflow
from graphalign.ir.paths import layer_of

SHOWN = 2
"""Candidates kept per op."""
LEAST = 0.05
"""Share of an op's elements that a candidate must hold: unrelated values hold next to none."""
SAMPLE = 64
"""Elements by which a constant factor is looked for before all are compared."""
OTHERS = "it holds them all, and others"
EXACT = 1e-11
"""Largest relative spread of a factor that is taken for constant."""


@dataclass(frozen=True)
class Near:
    """An inference op that comes near to an op of the trainer."""

    op: int
    """The inference op."""
    held: float
    """Share of the trainer's distinct elements that it holds."""
    why: str
    """What speaks against it, in words."""


def near_misses(
    flow: Dataflow, engine: Dataflow, partners: Mapping[int, Any], values: tuple[Mapping[int, Any], Mapping[int, Any]],
    place: tuple[Mapping[int, int], Mapping[int, frozenset[int]]], join: Join,
) -> dict[int, tuple[Near, ...]]:  # fmt: skip
    """The nearest inference ops of each training op that has no partner.

    Args:
        flow, engine: of the trainer, and of the engine.
        partners: training ops that have some.
        values: of both sides, `Val` by op.
        place: the region of a training op; those that an inference op can belong to.
        join: compares arrays.

    Returns:
        By training op, the best first; ops that nothing comes near to are left out.
    """
    mine, theirs = values
    by_array: dict[int, list[int]] = defaultdict(list)
    data: dict[int, torch.Tensor] = {}
    for i in place[1]:
        val = theirs.get(i)
        if val is not None and val.data.is_floating_point():
            by_array[val.id].append(i)
            data[val.id] = val.data
            join.key(val.id, val.data)
    ordered: dict[tuple[str, int], np.ndarray] = {}
    found: dict[int, list[tuple[int, float, str]]] = {}
    out: dict[int, tuple[Near, ...]] = {}
    for op in flow.ops:
        val = mine.get(op.id)
        if op.kind != "op" or op.id in partners or val is None or not (val.data.is_floating_point() or val.data.is_complex()):
            continue
        if val.id not in found:
            keys, real = join.key(val.id, as_real(val.data)), as_real(val.data)
            found[val.id] = _candidates((val.id, real, keys), data, ordered, join) if len(keys) else []
        region, layer = place[0].get(op.id), layer_of(op.module)
        ranked = sorted(
            (-held, region not in place[1][i], layer_of(engine.ops[i].module) != layer, i, why)
            for array, held, why in found[val.id]
            for i in by_array[array]
        )
        near = [
            Near(i, -held, why or ("it holds them all, but is not computed from what this part of the trainer reads" if far else OTHERS))
            for held, far, _, i, why in ranked[:SHOWN]
        ]
        if near:
            out[op.id] = tuple(near)
    return out


def _candidates(
    mine: tuple[int, torch.Tensor, Keys], data: Mapping[int, torch.Tensor], ordered: dict[tuple[str, int], np.ndarray], join: Join
) -> list[tuple[int, float, str]]:
    """(array, share held, what speaks against it) of arrays that come near one: its identity, its elements, its keys."""
    out = []
    id, real, keys = mine
    for array, other in data.items():
        theirs = join.keys[array]
        if share_inside(keys.sample, theirs.bits) > LEAST:
            held = share_inside(keys.bits, theirs.bits)
            if held > LEAST:
                out.append((array, held, _against(keys, theirs, held, join.full)))
        elif (factor := _factor((id, real), (array, other), ordered)) is not None:
            out.append((array, 0.0, f"it holds them times {factor:.6g}"))
    return out


def _against(keys: Keys, theirs: Keys, held: float, full: float) -> str:
    if held < full:
        return f"it holds {held:.1%} of the elements, and {full:.1%} are asked for"
    if keys.zeros and not theirs.zeros:
        return "it holds all but the zeros"
    if not found_in(keys.often, theirs.bits).all():
        return "it lacks a number that many of the elements are (a clamp's limit?)"
    return ""


def _factor(a: tuple[int, torch.Tensor], b: tuple[int, torch.Tensor], ordered: dict[tuple[str, int], np.ndarray]) -> float | None:
    """The constant that turns one array's distinct magnitudes into another's; None if there is none, or it is 1."""
    if a[1].numel() != b[1].numel():
        return None
    mine, theirs = _sorted(a, ordered, "training"), _sorted(b, ordered, "inference")
    if len(mine) != len(theirs) or len(mine) < SAMPLE:
        return None
    step = max(1, len(mine) // SAMPLE)
    for take in (slice(None, None, step), slice(None)):
        ratio = theirs[take] / mine[take]
        if np.ptp(ratio) > EXACT * abs(float(ratio.mean())):
            return None
    return float(ratio.mean())


def _sorted(array: tuple[int, torch.Tensor], ordered: dict[tuple[str, int], np.ndarray], side: str) -> np.ndarray:
    key = side, array[0]
    if key not in ordered:
        flat = np.sort(array[1].detach().double().abs().reshape(-1).numpy())
        ordered[key] = flat[np.isfinite(flat) & (flat != 0)]
    return ordered[key]
