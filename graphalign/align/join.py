"""The value join: which inference ops hold a training op's elements. It only proposes; `align.check` verifies."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch

TOLERANCE_BITS = 12
"""Mantissa bits ignored: values agree to 2⁻⁴⁰."""
SAMPLE = 48
"""Elements looked at before a full comparison."""


class Keys:
    """The distinct nonzero |values| of an array, as sorted integers that are monotonic in the value."""

    def __init__(self, data: torch.Tensor) -> None:
        flat = data.detach().double().abs().reshape(-1).numpy()
        flat = flat[np.isfinite(flat)]
        self.zeros = bool((flat == 0).any())
        bits = np.unique(flat[flat != 0].view(np.int64) >> TOLERANCE_BITS)
        self.bits = bits
        step = max(1, len(bits) // SAMPLE)
        self.sample = bits[::step]

    def __len__(self) -> int:
        return len(self.bits)


def share_inside(a: np.ndarray, b: np.ndarray) -> float:
    """The share of `a`'s keys that occur in `b`, within one unit."""
    if not len(a) or not len(b):
        return 0.0
    at = np.searchsorted(b, a - 1)
    return float((b[np.minimum(at, len(b) - 1)] <= a + 1)[at < len(b)].sum()) / len(a)


@dataclass
class Join:
    """Comparisons of value arrays, remembered by identity so that equal layers are compared once."""

    full: float = 0.999
    """Share of elements that must be found for one array to be inside another."""
    keys: dict[int, Keys] = field(default_factory=dict)
    _inside: dict[tuple[int, int], bool] = field(default_factory=dict)
    compared: int = 0
    """Full comparisons made."""

    def key(self, id: int, data: torch.Tensor) -> Keys:
        """The keys of an array, by its identity."""
        if id not in self.keys:
            self.keys[id] = Keys(data)
        return self.keys[id]

    def inside(self, a: int, b: int) -> bool:
        """Whether all elements of array `a` (an identity already keyed) occur in array `b`, zeros included."""
        if a == b:
            return True
        if (a, b) not in self._inside:
            x, y = self.keys[a], self.keys[b]
            ok = len(x) > 0 and not (x.zeros and not y.zeros) and share_inside(x.sample, y.bits) > 0.9
            if ok:
                self.compared += 1
                ok = share_inside(x.bits, y.bits) >= self.full
            self._inside[a, b] = ok
        return self._inside[a, b]

    def partners(self, target: int, candidates: dict[int, list[int]]) -> list[int]:
        """Candidates that hold the elements of array `target`.

        Those whose elements all belong to the target are taken if together they cover it (equal, split or broadcast
        copies); else those that contain the target (computed on a merged buffer).

        Args:
            target: identity of the training array.
            candidates: array identity to the ops that have it.

        Returns:
            Ops, in order; empty if the target is not covered.
        """
        parts = [c for c in candidates if self.inside(c, target)]
        if parts and self._covers(target, parts):
            return [op for c in parts for op in candidates[c]]
        wholes = [c for c in candidates if self.inside(target, c)]
        return [op for c in wholes for op in candidates[c]]

    def _covers(self, target: int, parts: list[int]) -> bool:
        if any(self.inside(target, p) for p in parts):
            return True
        union = np.unique(np.concatenate([self.keys[p].bits for p in parts]))
        return share_inside(self.keys[target].bits, union) >= self.full


def chance_rate(arrays: list[Keys], seed: int = 0, draws: int = 20000) -> float:
    """The measured share of unrelated random values that match some element of some array: the join's chance-match rate."""
    if not arrays:
        return 0.0
    rng = np.random.default_rng(seed)
    values = np.abs(rng.standard_normal(draws)) + 1e-3
    bits = values.view(np.int64) >> TOLERANCE_BITS
    everything = np.unique(np.concatenate([k.bits for k in arrays]))
    return share_inside(bits, everything)


def by_identity(ids: dict[int, int]) -> dict[int, list[int]]:
    """Op to array identity, turned around."""
    out: dict[int, list[int]] = defaultdict(list)
    for op, identity in ids.items():
        out[identity].append(op)
    return dict(out)
