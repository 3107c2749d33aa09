"""Which keys attention reads: the trainer's mask as it was built, against what the engine's layer does, at both edges of its window."""

from __future__ import annotations

from typing import Any

from graphalign.ir.inference import Attention


def compare_masks(seen: Any, engine: Attention) -> list[tuple[str, str]] | None:
    """Differences between the keys that both sides read, as (what, reason).

    Args:
        seen: of the trainer's call, see `capture.visible.visible`; None or without rows if it was not recorded.
        engine: its layer. A window counts the token itself.

    Returns:
        None if the windows were not compared: nothing was recorded, or too few tokens to exceed the engine's.
    """
    if not isinstance(seen, dict) or "tokens" not in seen or not ("rows" in seen or "below" in seen):
        return None
    out: list[tuple[str, str]] = []
    tokens = int(seen["tokens"])
    adds = seen.get("adds")
    if adds and not engine.alibi:
        out.append(
            ("mask", f"the trainer's mask adds numbers between {adds[0]:.6g} and {adds[1]:.6g} to scores that count; the engine adds none")
        )
    elif engine.alibi and not adds:
        out.append(("mask", "the engine adds a bias that grows with the distance (ALiBi), the trainer's mask adds nothing"))
    for q in range(tokens):
        (first, last), (start, end) = _trainer(seen, q), _engine(engine, q, tokens)
        if last != end:
            words = f"token {q} of {tokens} reads keys up to {last} in the trainer, up to {end} in the engine"
            out.append(("causality", words))
            return out
        if first != start:
            words = f"token {q} reads keys from {first} on in the trainer, from {start} on in the engine"
            out.append(("window", words))
            return out
    edge = max(engine.window or 0, engine.chunk or 0)
    return out if out or tokens > edge else None


def _trainer(seen: dict[str, Any], q: int) -> tuple[int, int]:
    """First and last key of a query."""
    if "rows" in seen:
        return int(seen["rows"][q][0]), int(seen["rows"][q][1])
    below, above, most = seen["below"], seen["above"], int(seen["tokens"]) - 1
    return 0 if below is None else max(0, q - below), most if above is None else min(most, q + above)


def _engine(engine: Attention, q: int, tokens: int) -> tuple[int, int]:
    first = max(0, q - engine.window + 1) if engine.window else 0
    if engine.chunk:
        first = max(first, q // engine.chunk * engine.chunk)
    return first, tokens - 1 if engine.causal is False else q
