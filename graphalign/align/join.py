"""The value join: which inference ops hold a training op's elements. It only proposes; `align.check` verifies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

TOLERANCE_BITS = 12
"""Mantissa bits ignored: values agree to 2⁻⁴⁰."""
SAMPLE = 48
"""Elements looked at before a full comparison."""
CANCELLED = 2.0**-11
"""An element this small beside its array's largest may be a difference of nearly equal numbers, of which FP64 keeps fewer bits."""
OFTEN, MANY = 0.05, 16
"""A number that more than this share of an array's elements are, and more than this many, may not be missing on the other side."""
FEW = 0.01
"""Share of an array's elements that may be lost for that."""


class Keys:
    """The distinct nonzero |values| of an array, as sorted integers that are monotonic in the value."""

    def __init__(self, data: torch.Tensor) -> None:
        flat = data.detach().double().abs().reshape(-1).numpy()
        flat = flat[np.isfinite(flat)]
        self.zeros = bool((flat == 0).any())
        ordered = np.sort(flat[flat != 0].view(np.int64) >> TOLERANCE_BITS)
        bits = _distinct(ordered)
        self.bits = bits
        far = max(MANY, int(OFTEN * len(ordered)))
        self.often = _distinct(ordered[:-far][ordered[:-far] == ordered[far:]]) if len(ordered) > far else ordered[:0]
        """Keys of a good part of the elements: all values behind a clamp's limit are one number."""
        largest = flat.max(initial=0.0) * CANCELLED
        self.cancelled = int(np.searchsorted(bits, np.float64(largest).view(np.int64) >> TOLERANCE_BITS)) if largest else 0
        """How many of the keys, the smallest, may be lost to cancellation."""
        step = max(1, len(bits) // SAMPLE)
        self.sample = bits[::step]

    def __len__(self) -> int:
        return len(self.bits)


def _distinct(keys: np.ndarray) -> np.ndarray:
    """Sorted, without repeats (numpy 2's `unique` hashes, which takes ten times as long on values that hardly repeat)."""
    keys = np.sort(keys)
    return keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if len(keys) else keys


def found_in(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which of `a`'s keys occur in `b` (sorted), within one unit."""
    if not len(a) or not len(b):
        return np.zeros(len(a), dtype=bool)
    at = np.searchsorted(b, a - 1)
    found: np.ndarray = (at < len(b)) & (b[np.minimum(at, len(b) - 1)] <= a + 1)
    return found


def all_inside(a: Keys, many: Iterable[np.ndarray], full: float) -> bool:
    """Whether an array's keys occur in several arrays, within one unit; but for a share of them, or a few that cancellation explains."""
    left = np.arange(len(a))
    for b in many:
        left = left[~found_in(a.bits[left], b)]
    if len(left) <= (1 - full) * len(a):
        return True
    return len(left) <= max(1.0, FEW * len(a)) < len(a) and bool((left < a.cancelled).all())


def share_inside(a: np.ndarray, b: np.ndarray) -> float:
    """The share of `a`'s keys that occur in `b`, within one unit."""
    return float(found_in(a, b).sum()) / len(a) if len(a) else 0.0


def all_inside_any(a: np.ndarray, many: Iterable[np.ndarray]) -> bool:
    """Whether each of `a`'s keys occurs in one of several arrays, within one unit."""
    return not len(a) or share_inside_any(a, many) == 1.0


def share_inside_any(a: np.ndarray, many: Iterable[np.ndarray]) -> float:
    """The share of `a`'s keys that occur in one of several arrays, within one unit."""
    left = a
    for b in many:
        left = left[~found_in(left, b)]
    return (len(a) - len(left)) / len(a) if len(a) else 0.0


@dataclass
class Join:
    """Comparisons of value arrays, remembered by identity so that equal layers are compared once."""

    full: float = 0.999
    """Share of elements that must be found for one array to be inside another."""
    keys: dict[int, Keys] = field(default_factory=dict)
    _inside: dict[tuple[int, int], bool] = field(default_factory=dict)
    _partners: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = field(default_factory=dict)
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
            ok = ok and bool(found_in(x.often, y.bits).all())
            if ok:
                self.compared += 1
                ok = all_inside(x, (y.bits,), self.full)
            self._inside[a, b] = ok
        return self._inside[a, b]

    def partners(self, target: int, candidates: tuple[int, ...]) -> tuple[int, ...]:
        """Candidates that hold the elements of array `target`.

        Those whose elements all belong to the target are taken if together they cover it (equal, split or broadcast
        copies); else those that contain the target (computed on a merged buffer).

        Args:
            target: identity of the training array.
            candidates: identities of inference arrays.

        Returns:
            Some of the candidates, in order; empty if the target is not covered.
        """
        key = (target, candidates)
        if key not in self._partners:
            parts = tuple(c for c in candidates if self.inside(c, target))
            if not parts or not self._covers(target, parts):
                parts = tuple(c for c in candidates if self.inside(target, c))
            self._partners[key] = parts
        return self._partners[key]

    def _covers(self, target: int, parts: tuple[int, ...]) -> bool:
        if any(self.inside(target, p) for p in parts):
            return True
        held = [self.keys[p].bits for p in parts]
        return all_inside(self.keys[target], held, self.full) and all_inside_any(self.keys[target].often, held)


def chance_rate(arrays: list[Keys], seed: int = 0, draws: int = 20000) -> float:
    """The measured share of unrelated random values that match some element of some array: the join's chance-match rate."""
    rng = np.random.default_rng(seed)
    values = np.sort(np.abs(rng.standard_normal(draws)) + 1e-3)
    return share_inside_any(values.view(np.int64) >> TOLERANCE_BITS, (k.bits for k in arrays)) if arrays else 0.0
