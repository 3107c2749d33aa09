"""Random values as functions of (name, index), so that no large tensor is ever built."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

import numpy as np
import torch

_LAYER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")


def seed_of(*parts: object) -> int:
    """A 63-bit seed that depends on nothing but the printed parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def role_of(name: str) -> str:
    """A name without its layer and expert numbers: equal layers then get equal values."""
    return _LAYER.sub("*", name)


def draw(seed: int, index: torch.Tensor) -> torch.Tensor:
    """Values in ±[0.05, 2) for every flat index, float64, by splitmix64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014 (the finaliser).
    """
    with np.errstate(over="ignore"):
        x = index.numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    magnitude = (x >> np.uint64(12)).astype(np.float64) * 2.0**-52 * 1.95 + 0.05
    sign = 1.0 - 2.0 * (x & np.uint64(1)).astype(np.float64)
    return torch.from_numpy(magnitude * sign)


@dataclass(frozen=True)
class Val:
    """A float64 tensor with an identity: equal ids mean equal content."""

    id: int
    data: torch.Tensor


@dataclass
class Arithmetic:
    """What values an evaluation uses, and whether it rounds.

    Exact evaluation (`rounds=False`) proposes the alignment; rounded evaluation checks it. In exact evaluation layers
    share values by role, so equal layers are evaluated once; the check gives every layer its own.
    """

    seed: int
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    rounds: bool = False
    per_layer: bool = False
    _memo: dict[object, Val] = field(default_factory=dict)
    _issued: int = 0

    @property
    def tokens(self) -> int:
        """Tokens in the evaluated forward."""
        return len(self.positions)

    def name(self, name: str) -> str:
        """The name a random value hangs on."""
        return name if self.per_layer else role_of(name)

    def intern(self, key: object) -> Val | None:
        """The memoised value of `key`, or None."""
        return self._memo.get(key)

    def put(self, key: object, data: torch.Tensor) -> Val:
        """Remember `data` as the value of `key`."""
        val = self.new(data)
        self._memo[key] = val
        return val

    def new(self, data: torch.Tensor) -> Val:
        """A value with an identity of its own."""
        self._issued += 1
        return Val(self._issued, data)

    def anchor(self, name: str, shape: tuple[int, ...], dtype: str) -> Val:
        """Output of an anchor, the same on both sides for the same name; rounded to what the anchor stores."""
        key = ("anchor", self.name(name), shape, dtype if self.rounds else "")
        if (val := self._memo.get(key)) is None:
            n = int(np.prod(shape))
            data = draw(seed_of(self.seed, "anchor", self.name(name)), torch.arange(n)).view(shape)
            val = self.put(key, self.round(data, dtype))
        return val

    def fresh(self, name: str, shape: tuple[int, ...]) -> Val:
        """A new shared value for an aligned residual sum."""
        key = ("fresh", self.name(name), shape)
        if (val := self._memo.get(key)) is None:
            n = int(np.prod(shape))
            val = self.put(key, draw(seed_of(self.seed, "fresh", self.name(name)), torch.arange(n)).view(shape))
        return val

    def parameter(self, checkpoint: str, index: torch.Tensor, dtype: str) -> torch.Tensor:
        """Elements of a checkpoint tensor at flat indices."""
        return self.round(draw(seed_of(self.seed, "parameter", self.name(checkpoint)), index), dtype)

    def round(self, data: torch.Tensor, dtype: str) -> torch.Tensor:
        """`data` rounded to `dtype` (to nearest even, via float32), or unchanged in exact evaluation or for FP32 and wider."""
        from graphalign.ir.dataflow import LOW_PRECISION

        if not self.rounds or dtype not in LOW_PRECISION:
            return data
        return round_to(data, dtype)


def round_to(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """float64 `data` rounded to a low-precision format, as float64.

    The value is first rounded to odd at FP32's precision, so that the second rounding gives the correctly rounded result
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008) instead of suffering a double rounding.
    """
    single = data.float()
    back = single.double()
    bits = single.view(torch.int32)
    inexact = back != data
    even = (bits & 1) == 0
    toward = torch.where((data.abs() > back.abs()), bits + 1, bits - 1)
    bits = torch.where(inexact & even & torch.isfinite(single), toward, bits)
    return bits.view(torch.float32).to(getattr(torch, dtype)).double()


def by_expert(weights: torch.Tensor, ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing weights and expert numbers with each token's experts in ascending order: top-k leaves the order open."""
    w, i = weights.reshape(tokens, -1), ids.reshape(tokens, -1)
    order = torch.argsort(i, dim=-1, stable=True)
    return w.gather(-1, order), i.gather(-1, order)
