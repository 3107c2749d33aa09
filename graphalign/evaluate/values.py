"""Random values as functions of (name, index), so that no large tensor is ever built; and values with identities.

Equal work is done once: a value's identity stands for its content, so an op on operands that were seen before is a look-up.
Layers are equal wherever they compute the same thing, whatever their numbers are; nothing is assumed about which.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from graphalign.evaluate.shards import Shards
from graphalign.ir.dataflow import LOW_PRECISION
from graphalign.ir.paths import in_turn, role_of

Layers = Literal["alike", "turns", "own"]
"""Which layers share random values: all; those `TURNS` apart; none."""
TURNS = 4
"""Layers that take turns have values that differ from their neighbours', and the same as those this many layers on."""
SUMS = 8
"""Sums after which a residual stream is back at an earlier value, see `stream_term`."""
OFFSET, STEP = 24.0, 0.25
"""What the first sum adds to every element, up to its sign and a little; and how the others' random values are scaled."""


def seed_of(*parts: object) -> int:
    """A 63-bit seed that depends on nothing but the printed parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


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


def stream_term(seed: int, ordinal: int, number: int, n: int) -> torch.Tensor:
    """What the `ordinal`-th sum adds to the residual stream, so that the stream takes the same values again and again.

    The first sum takes every element to ±24; the others add x0, x1, x2, x3, -x0, -x1, -x2, -x3, and so on, all so small that the
    elements stay between 16 and 32. There, a format's numbers are equally spaced, so a rounded sum is the stream's value plus what
    the rounded term would be, wherever the stream is: the stream comes back to the same bits whether each sum is rounded, some, or none.
    (Ties depend on the last bit kept; to even, they settle after the first time: Reiser and Knuth, "Evading the drift in
    floating-point addition", 1975.) Hardly any sum is exact, so every rounding shows; no two of `SUMS` successive sums are equal, so
    every order does. What reads the stream repeats with it, and is evaluated once. A stream that does something else with its terms,
    or starts from larger values, need not repeat, which costs nothing but time.

    Args:
        seed: of the evaluation.
        ordinal: of the sum along the stream.
        number: of the term in this sum; most have one.
        n: number of elements.

    Returns:
        [n] float64, unrounded. Rounding commutes with the sign.
    """
    index = torch.arange(n)
    if ordinal == 0:
        sign = draw(seed_of(seed, "stream", "sign"), index).sign()
        return (sign * OFFSET if number == 0 else 0.0) + STEP * draw(seed_of(seed, "stream", "first", number), index)
    phase = (ordinal - 1) % SUMS
    x = STEP * draw(seed_of(seed, "stream", phase % (SUMS // 2), number), index)
    return x if phase < SUMS // 2 else -x


@dataclass(frozen=True)
class Val:
    """A float64 tensor with an identity: equal ids mean equal content."""

    id: int
    data: torch.Tensor


@dataclass
class Arithmetic:
    """What values an evaluation uses, and whether it rounds.

    Exact evaluation (`rounds=False`) proposes the alignment, on values that all layers share; rounded evaluation checks it, on
    values that differ between neighbouring layers.
    """

    seed: int
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    rounds: bool = False
    layers: Layers = "alike"
    stream: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """With layers in turns: anchors whose outputs are added to the residual stream, by name: ordinal of the sum, number in the sum."""
    share: bool = True
    """Whether equal work is done once. Without, results are the same and take longer; for tests."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Anchors whose output the trainer has multiplied by a constant that the engine multiplies it by later, by name."""
    heads: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Attention anchors to the number and size of the heads that the trainer's returns; the engine may fill heads up with zeros."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """What some anchors' outputs are multiplied by, by the role of their name, so that what reads them passes its limits."""
    shards: Shards = field(default_factory=Shards)
    """What the engine's rank holds; elements that other ranks hold are NaN on the training side."""
    _memo: dict[object, Val] = field(default_factory=dict)
    _contents: dict[object, list[Val]] = field(default_factory=dict)
    _issued: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def tokens(self) -> int:
        """Tokens in the evaluated forward."""
        return len(self.positions)

    def name(self, name: str) -> str:
        """The name a random value hangs on."""
        if self.layers == "own":
            return name
        return role_of(name) if self.layers == "alike" else in_turn(name, TURNS)

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
        return Val(next(self._issued), data)

    def settle(self, data: torch.Tensor) -> Val:
        """The value with this content, bit for bit; a new one if there is none."""
        if not self.share or (data.is_floating_point() and data.dtype != torch.float64):
            return self.new(data)
        bits = _bits(data)
        known = self._contents.setdefault((data.dtype, data.shape, int(bits.sum())), [])
        for val in known:
            if val.data is data or torch.equal(bits, _bits(val.data)):
                return val
        known.append(self.new(data))
        return known[-1]

    def aside(self) -> Arithmetic:
        """The same values, for an evaluation whose own values need not be kept when it is over."""
        return replace(self, _memo=dict(self._memo), _contents={})

    def anchor(self, name: str, shape: tuple[int, ...], dtype: str) -> Val:
        """Output of an anchor, the same on both sides for the same name; rounded to what the anchor stores."""
        held: object = self.name(name)
        if (term := self.stream.get(name) if self.layers == "turns" else None) is not None:
            ordinal, number = term
            held = ("stream", ordinal and 1 + (ordinal - 1) % SUMS, number)
        key = ("anchor", held, shape, dtype if self.rounds else "")
        if (val := self._memo.get(key)) is None:
            n = int(np.prod(shape))
            data = draw(seed_of(self.seed, "anchor", held), torch.arange(n)) if term is None else stream_term(self.seed, *term, n)
            data = data * self.scales.get(role_of(name), 1.0)
            val = self.put(key, self.round(data.view(shape), dtype))
        return val

    def fresh(self, name: str, shape: tuple[int, ...]) -> Val:
        """A new shared value for an aligned residual sum."""
        key = ("fresh", self.name(name), shape)
        if (val := self._memo.get(key)) is None:
            n = int(np.prod(shape))
            data = draw(seed_of(self.seed, "fresh", self.name(name)), torch.arange(n)) * self.scales.get(role_of(name), 1.0)
            val = self.put(key, data.view(shape))
        return val

    def parameter(self, checkpoint: str, index: torch.Tensor, dtype: str) -> torch.Tensor:
        """Elements of a checkpoint tensor at flat indices."""
        return self.round(draw(seed_of(self.seed, "parameter", self.name(checkpoint)), index), dtype)

    def round(self, data: torch.Tensor, dtype: str) -> torch.Tensor:
        """`data` rounded to `dtype` (to nearest even), or unchanged in exact evaluation or for FP32 and wider."""
        if not self.rounds or dtype not in LOW_PRECISION:
            return data
        return round_to(data, dtype)


def _bits(data: torch.Tensor) -> torch.Tensor:
    """Content as integers: unlike numbers, NaN equals NaN and 0 differs from -0."""
    if data.is_complex():
        data = torch.view_as_real(data)
    return data.contiguous().view(torch.int64) if data.dtype == torch.float64 else data


_FORMATS = {"bfloat16": (45, 2.0**-126, float.fromhex("0x1.fep127")), "float16": (42, 2.0**-14, 65504.0)}
"""Bits of float64's significand that the format lacks, its smallest normal and its largest number."""


def round_to(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """float64 `data` rounded to a low-precision format, to nearest even, in one step, as float64."""
    if data.is_complex():
        return torch.view_as_complex(round_to(torch.view_as_real(data), dtype))
    if dtype in _FORMATS and data.dtype == torch.float64 and data.numel():
        drop, least, most = _FORMATS[dtype]
        size = data.abs()
        low, high = (float(x) for x in size.aminmax())
        # zero or normal numbers, none of which becomes infinite; NaN fails the comparison
        if high <= most and (low >= least or not bool(((size < least) & (size > 0)).any())):
            # adding just under half a unit, or half a unit where the last bit kept is 1, carries where rounding up is right
            bits = data.contiguous().view(torch.int64)
            carried = (bits >> drop).bitwise_and_(1).add_((1 << (drop - 1)) - 1).add_(bits)
            return carried.bitwise_and_(-1 << drop).view(torch.float64)
        if high != high and not bool((unknown := data.isnan()).all()):  # what other ranks hold; the rest takes the quick way
            return round_to(data.masked_fill(unknown, 0.0), dtype).masked_fill(unknown, float("nan"))
    return round_slowly(data, dtype)


def round_slowly(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """The same for any numbers and formats.

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
