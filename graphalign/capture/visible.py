"""Which keys an attention call may read, from the mask and the flags that its kernel is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_UNREADABLE = 0.5
"""Of a dtype's most negative number: added to a score, it hides the key."""
_HIDES = -9e3
"""So does this: after it, `exp` is 0 in FP32 beside any score that occurs. ALiBi stays above it: its slopes are below 1, and the probe's
distances below 8194."""
ALL, SOME = 512, 48
"""Tokens up to which every query is looked at, and how many are at each end and in between of more."""
_ROWS = 256
"""Queries that are looked at together: masks of thousands of tokens need no copies of their size."""

Hides = Callable[[torch.Tensor], torch.Tensor]


def chosen(tokens: int, edges: tuple[int, ...] = ()) -> list[int]:
    """The queries that are looked at: all of a few; of many the first and the last, those around every multiple of the windows and chunks
    that a config names, and some in between. What reads another window or chunk differs in the last ones, or in those in between."""
    if tokens <= ALL:
        return list(range(tokens))
    near = {m + d for e in edges for m in range(e, tokens + 1, max(e, tokens // SOME)) for d in range(-2, 3)}
    between = range(0, tokens, max(1, tokens // SOME))
    return sorted({*range(SOME), *range(tokens - SOME, tokens), *between, *(q for q in near if 0 <= q < tokens)})


def visible(tokens: int, keys: int, mask: Any, given: dict[str, Any], queries: list[int] | None = None) -> dict[str, Any]:
    """The keys that each query reads, compactly.

    Args:
        tokens: number of queries, the last of `keys` tokens.
        keys: number of keys.
        mask: what the attention function is given: None, [batch, heads, queries, keys] (True, or nothing added, where a key is read),
            a padding mask [batch, keys], or FlexAttention's `BlockMask`.
        given: `implementation` and, where they mean something to it, `is_causal` and `position_bias`. `flash` is a FlashAttention kernel,
            of which `window` says how many keys left and right of a token it reads, None for all.
        queries: the ones to look at, ascending; all if None.

    Returns:
        `tokens`; `below` and `above`: query q reads the keys from q - below to q + above, None where the ends of the sequence limit it; or
        `rows`: first and last key of every query; or `unknown`, with the reason. `at`: the queries that were looked at, if not all.
        `adds`: least and greatest of numbers that the mask adds to scores of keys that can be read.
    """
    out: dict[str, Any] = {"tokens": tokens}
    name = str(given.get("implementation"))
    block = getattr(mask, "mask_mod", None)
    tensor = isinstance(mask, torch.Tensor)
    if tensor and mask.dim() == 2:
        if not bool(mask.all()):
            return {"unknown": "a padding mask that hides tokens"}
        mask, tensor = None, False
    if given.get("position_bias") is not None:
        return {"unknown": "a position bias, whose numbers are not compared"}
    if block is None and mask is not None and not (tensor and mask.dim() == 4):
        return {"unknown": f"a mask of type {type(mask).__name__}"}
    if block is None and mask is None and name not in ("flash", "sdpa", "eager", "flex_attention"):
        return {"unknown": f"attention implementation {name} without a mask"}
    looked = torch.arange(tokens) if queries is None else torch.tensor(queries)
    firsts, lasts = [], []
    least, most = 0.0, 0.0
    for rows in looked.split(_ROWS):
        at = (rows + keys - tokens)[:, None] - torch.arange(keys)
        seen = torch.ones(len(rows), keys, dtype=torch.bool)
        if block is not None:
            seen = _block(block, rows, keys)
        elif tensor:
            hidden, part = _read(mask, rows, keys)
            if bool((hidden != hidden[:1]).any()):
                return {"unknown": "heads that read different keys"}
            seen = ~hidden[0]
            if part is not None and bool(seen.any()):
                shown = part[:, seen]
                least, most = min(least, float(shown.min())), max(most, float(shown.max()))
        seen = seen & _allowed(name, mask, given, at)
        count = seen.sum(1)
        if not bool(count.all()):
            return {"unknown": "a query that reads no key"}
        firsts.append(seen.int().argmax(1))
        lasts.append(keys - 1 - seen.flip(1).int().argmax(1))
        if not bool((lasts[-1] - firsts[-1] + 1 == count).all()):
            return {"unknown": "a query whose keys are not in a row"}
    if least or most:
        out["adds"] = [least, most]
    if len(looked) < tokens:
        out["at"] = looked.tolist()
    return out | _compact(torch.cat(firsts), torch.cat(lasts), looked + keys - tokens, keys)


def _read(mask: torch.Tensor, rows: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of some queries: which keys are hidden, [heads, rows, keys], and the numbers added, None for a mask of True and False."""
    m = mask[0].detach()
    m = (m if m.shape[1] == 1 else m[:, rows.to(m.device)]).expand(-1, len(rows), -1)[:, :, :keys].cpu()
    if m.dtype == torch.bool:
        return ~m, None
    return m <= max(torch.finfo(m.dtype).min * _UNREADABLE, _HIDES), m


def _allowed(name: str, mask: Any, given: dict[str, Any], at: torch.Tensor) -> torch.Tensor:
    """What the kernel hides by its flags; `at` is the distance of a key from its query."""
    seen = torch.ones_like(at, dtype=torch.bool)
    if name == "flash":
        left, right = given["window"]
        if given["is_causal"]:
            seen &= at >= 0
        if left is not None:
            seen &= at <= left
        if right is not None:
            seen &= -at <= right
    elif name == "sdpa" and mask is None and given.get("is_causal"):
        seen &= at >= 0
    return seen


def _block(mask_mod: Callable[..., Any], rows: torch.Tensor, keys: int) -> torch.Tensor:
    """What a `BlockMask`'s function says of some queries, [rows, keys]."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    zero = torch.zeros((), dtype=torch.int64)
    by_key = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    with TransformGetItemToIndex():  # as `create_mask` does (torch 2.13): masks index tensors with their arguments
        found: torch.Tensor = torch.vmap(by_key, in_dims=(None, None, 0, None))(zero, zero, rows, torch.arange(keys))
    return found.expand(len(rows), keys).bool()


def _compact(first: torch.Tensor, last: torch.Tensor, q: torch.Tensor, keys: int) -> dict[str, Any]:
    below, above = int((q - first).max()), int((last - q).max())
    if bool((first == (q - below).clamp(min=0)).all()) and bool((last == (q + above).clamp(max=keys - 1)).all()):
        return {"below": below if below < keys - 1 else None, "above": above if above < keys - 1 else None}
    return {"rows": [[a, b] for a, b in _pairs(first, last)]}


def _pairs(first: torch.Tensor, last: torch.Tensor) -> Iterator[tuple[int, int]]:
    return zip(first.tolist(), last.tolist(), strict=True)
