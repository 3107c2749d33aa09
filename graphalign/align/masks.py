"""Which keys attention reads: the trainer's mask as it was built, against what the engine's layer does, at both edges of its window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphalign.ir.inference import Attention

OLD = "the training capture records no masks (it is of an older version, or of a patched model)"


@dataclass(frozen=True)
class Masks:
    """What is known about the keys that both sides read."""

    differences: tuple[tuple[str, str], ...] = ()
    """(what, reason)."""
    unknown: str = ""
    """Why they were not compared."""
    edge: bool = False
    """Whether that is so only from the engine's window on."""


def compare_masks(seen: Any, engine: Attention) -> Masks:
    """Compare the keys that both sides read.

    Args:
        seen: of the trainer's call, see `capture.visible.visible`; None if it was not recorded.
        engine: its layer. A window counts the token itself.
    """
    if not isinstance(seen, dict):
        return Masks(unknown=OLD)
    if "tokens" not in seen or not ("rows" in seen or "below" in seen):
        return Masks(unknown=str(seen.get("unknown") or "the capture does not say which keys are read"))
    out: list[tuple[str, str]] = []
    tokens = int(seen["tokens"])
    adds = seen.get("adds")
    unrecorded = adds and not engine.alibi and engine.causal is None  # an older capture, which says neither
    if unrecorded:
        pass
    elif adds and not engine.alibi:
        out.append(
            ("mask", f"the trainer's mask adds numbers between {adds[0]:.6g} and {adds[1]:.6g} to scores that count; the engine adds none")
        )
    elif engine.alibi and not adds:
        out.append(("mask", "the engine adds a bias that grows with the distance (ALiBi), the trainer's mask adds nothing"))
    for n, q in enumerate(seen["at"] if "at" in seen else range(tokens)):
        (first, last), (start, end) = _trainer(seen, n, q), _engine(engine, q, tokens)
        if last != end:
            words = f"token {q} of {tokens} reads keys up to {last} in the trainer, up to {end} in the engine"
            return Masks((*out, ("causality", words)))
        if first != start:
            words = f"token {q} reads keys from {first} on in the trainer, from {start} on in the engine"
            return Masks((*out, ("window", words)))
    if unrecorded:
        return Masks(unknown="its mask adds numbers to scores, and the engine's capture does not record whether it adds any")
    edge = max(engine.window or 0, engine.chunk or 0)
    if tokens > edge:
        return Masks(tuple(out))
    return Masks(tuple(out), f"the trainer was tried with {tokens} tokens, which do not exceed the engine's window of {edge}", True)


def _trainer(seen: dict[str, Any], n: int, q: int) -> tuple[int, int]:
    """First and last key of a query, the n-th that was looked at."""
    if "rows" in seen:
        return int(seen["rows"][n][0]), int(seen["rows"][n][1])
    below, above, most = seen["below"], seen["above"], int(seen["tokens"]) - 1
    return 0 if below is None else max(0, q - below), most if above is None else min(most, q + above)


def _engine(engine: Attention, q: int, tokens: int) -> tuple[int, int]:
    first = max(0, q - engine.window + 1) if engine.window else 0
    if engine.chunk:
        first = max(first, q // engine.chunk * engine.chunk)
    return first, tokens - 1 if engine.causal is False else q
