"""A language model's log-probabilities without a model: peaked logits, tokens drawn from them, a trainer that is off by rounding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Policy:
    """Logits and tokens of some sequences."""

    logits: list[Array]
    ids: list[NDArray[np.int64]]

    def logprobs(self, temperature: float = 1.0) -> list[Array]:
        return [take(z / temperature, i) for z, i in zip(self.logits, self.ids, strict=True)]


def log_softmax(z: Array) -> Array:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def take(z: Array, ids: NDArray[np.int64]) -> Array:
    return log_softmax(z)[np.arange(len(ids)), ids]


def policy(sequences: int = 6, tokens: int = 40, vocabulary: int = 64, temperature: float = 1.0, seed: int = 0) -> Policy:
    """Tokens drawn at a temperature."""
    rng = np.random.default_rng(seed)
    logits = [rng.normal(0, 2.5, (tokens, vocabulary)) for _ in range(sequences)]
    ids = [(z / temperature + rng.gumbel(size=z.shape)).argmax(1) for z in logits]
    return Policy(logits, ids)


def rounded(x: list[Array], size: float = 0.02, seed: int = 1) -> list[Array]:
    """The same log-probabilities as another implementation has them."""
    rng = np.random.default_rng(seed)
    return [np.minimum(a + size * rng.normal(size=a.shape) * np.minimum(1, -a), 0) for a in x]
