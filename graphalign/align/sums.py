"""Residual sums: one fresh value for each, the same on both sides, so that regions can be told apart."""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from graphalign.align.exercise import sum_name
from graphalign.align.regions import Regions
from graphalign.evaluate.values import Arithmetic, Val
from graphalign.ir.dataflow import Op

PARTS = 8
"""A kernel may hold no less than this part of a residual sum (a row maximum of it is not the sum)."""


class Sums:
    """Gives every aligned residual sum one fresh value on both sides."""

    def __init__(self, arithmetic: Arithmetic, regions: Regions) -> None:
        self.arithmetic, self.regions = arithmetic, regions
        self.ordinal = {s: n for n, s in enumerate(sorted(regions.sums))}
        self.exact: dict[tuple[int, int], list[tuple[torch.Tensor, Val]]] = {}
        self.ops: dict[int, list[int]] = defaultdict(list)
        """Identity of the fresh value to the training sums that have it."""

    def on_training(self, op: Op, val: Val) -> Val:
        if op.id not in self.regions.sums:
            return val
        fresh = self.arithmetic.fresh(sum_name(op, self.ordinal[op.id]), tuple(val.data.shape))
        known = self.exact.setdefault(_signature(val.data), [])
        if not any(f.id == fresh.id and torch.equal(d, val.data) for d, f in known):
            known.append((val.data, fresh))
        self.ops[fresh.id].append(op.id)
        return fresh

    def on_inference(self, val: Val) -> Val:
        n, digest = _signature(val.data)
        for near in (digest - 1, digest, digest + 1):
            for exact, fresh in self.exact.get((n, near), ()):
                if val.id == fresh.id:
                    return val
                mapped = _transfer(val.data, exact, fresh.data)
                if mapped is not None:
                    return self._known(mapped, fresh)
        for known in self.exact.values():
            for exact, fresh in known:
                if exact.numel() // PARTS <= n < exact.numel() and (mapped := _transfer(val.data, exact, fresh.data)) is not None:
                    return self._known(mapped, fresh)
        return val

    def _known(self, mapped: torch.Tensor, fresh: Val) -> Val:
        """`mapped`, elements of `fresh` in another layout, with one identity per layout."""
        if mapped.shape == fresh.data.shape and torch.equal(mapped, fresh.data):
            return fresh
        key = ("transferred", fresh.id, tuple(mapped.shape), hash(mapped.numpy().tobytes()))
        known = self.arithmetic.intern(key) or self.arithmetic.put(key, mapped)
        self.ops.setdefault(known.id, self.ops[fresh.id])
        return known


def _signature(data: torch.Tensor) -> tuple[int, int]:
    """Size and the sum of magnitudes, to 2⁻³⁰: equal for arrays that hold the same elements in any layout."""
    total = float(data.abs().sum()) if data.numel() else 0.0
    if not 0 < total < float("inf"):
        return data.numel(), 0
    return data.numel(), round(math.log(total) * 2**30)


def _transfer(data: torch.Tensor, exact: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor | None:
    """`fresh` in the layout of `data`, if `data` holds elements of `exact`, all of them or some; else None."""
    a, b = data.reshape(-1), exact.reshape(-1)
    tolerance = 2.0**-40
    if len(a) == len(b) and bool(((a - b).abs() <= tolerance * b.abs()).all()):
        return fresh.reshape(data.shape)
    y, j = b.sort()
    if len(a) == len(b):
        x, i = a.sort()
        if not bool(((x - y).abs() <= tolerance * y.abs()).all()):
            return None
        out = torch.empty_like(a)
        out[i] = fresh.reshape(-1)[j]
        return out.view(data.shape)
    for some in (a[:16], a):
        above = torch.searchsorted(y, some).clamp(max=len(y) - 1)
        below = (above - 1).clamp(min=0)
        near = torch.where((some - y[below]).abs() < (some - y[above]).abs(), below, above)
        if not bool(((some - y[near]).abs() <= tolerance * y[near].abs()).all()):
            return None
    return fresh.reshape(-1)[j[near]].view(data.shape)
