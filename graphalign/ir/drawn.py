"""Numbers that two processes draw alike: weights and inputs for running one op of the engine and the trainer's counterpart.

Every number is a function of a name and an index. This file is also read by its path in the engine's process: it imports only the standard
library, numpy and torch.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

SCALES = (0.5, 4.0, 24.0)
"""What the inputs of an op are multiplied by in turn: clamps and saturation show at large ones, offsets and thresholds at small ones."""
WIDE = 16
"""Size from which the last two dimensions of a weight are those of a matrix product."""
MOST = 1 << 27
"""Elements that are drawn at most for one layer."""


def uniform(name: str, n: int) -> torch.Tensor:
    """`n` numbers in (-1, 1), evenly distributed, float32, each exact in BF16 (8 bits); by splitmix64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014 (the finaliser).
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    out = torch.empty(n)
    for start in range(0, n, 1 << 20):
        with np.errstate(over="ignore"):
            index = np.arange(start, min(n, start + (1 << 20)), dtype=np.uint64)
            x = index * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
            x ^= x >> np.uint64(30)
            x *= np.uint64(0xBF58476D1CE4E5B9)
            x ^= x >> np.uint64(27)
            x *= np.uint64(0x94D049BB133111EB)
            x ^= x >> np.uint64(31)
        out[start : start + len(index)] = torch.from_numpy((x >> np.uint64(57)).astype(np.float32) / 64 - 127 / 128)
    return out


def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A weight, by the name and shape that the trainer has it under: float32, exact in BF16.

    Products keep the size of what they multiply; vectors lie in (-1, 1).
    """
    data = uniform(f"weight {name}", math.prod(shape)).view(shape)
    if len(shape) < 2:
        return data
    fan = math.sqrt(shape[-1] * shape[-2]) if min(shape[-2:]) >= WIDE else math.prod(shape[1:])
    return data * 2.0 ** round(math.log2(math.sqrt(3 / fan)))


def activation(slot: int, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    """An input of an op: float32, exact in BF16."""
    return uniform(f"input {slot}", math.prod(shape)).view(shape) * scale


def routing_weights(shape: tuple[int, ...]) -> torch.Tensor:
    """Routing weights [tokens, experts per token], in (0, 1): float32, exact in BF16."""
    return uniform("routing", math.prod(shape)).view(shape).abs()


def expert_numbers(shape: tuple[int, ...], experts: int) -> torch.Tensor:
    """Expert numbers [tokens, experts per token], int64: none twice for a token, each used if there are tokens enough."""
    tokens, chosen = shape
    return (torch.arange(tokens)[:, None] * chosen + torch.arange(chosen)[None, :]) % experts
