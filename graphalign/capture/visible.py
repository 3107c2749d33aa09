"""Which keys every attention call of the trainer may read: the mask that its kernel is really given, at a length that exceeds the windows.

The recorded forward has a few tokens, fewer than any window. A second forward of more tokens goes through the model's own code with
numbers that are never computed (all that comes from an embedding or a matrix product is a zero of the right shape), so masks and flags are
built as in training and it costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

LEAST, MOST = 64, 8194
"""Tokens of the probe: as many as exceed the windows that the config names, by two."""
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "embedding", "_grouped_mm", "convolution"})
_UNREADABLE = 0.5
"""Of a dtype's most negative number: added to a score, it hides the key."""

_PROBE: list[list[dict[str, Any]]] = []


def probing() -> bool:
    """Whether a probe runs: attention functions are asked for their masks only."""
    return bool(_PROBE)


def probe_length(config: Any, positions: int) -> int:
    """Tokens that cover both edges of every window and chunk that a config names, as far as the positions reach."""
    named = (
        [x for k, x in vars(config).items() if ("window" in k or "chunk" in k) and type(x) is int and x > 0] if config is not None else []
    )
    return max(2, min(max([LEAST, *(n + 2 for n in named if n + 2 <= MOST)]), positions))


@contextmanager
def probe() -> Iterator[list[dict[str, Any]]]:
    """Within the block attention calls are written down, in order, and the model's numbers are not computed."""
    seen: list[dict[str, Any]] = []
    _PROBE.append(seen)
    try:
        with torch.no_grad(), _Zeros():
            yield seen
    finally:
        _PROBE.pop()


def note_call(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, given: dict[str, Any]
) -> tuple[torch.Tensor, None]:
    """Write one call down; `given` is what `attention.attributes` says of it. Returns a result of the right shape."""
    try:
        found = visible(query.shape[2], key.shape[2], mask, given)
    except Exception as e:  # masks come from the model's own code
        found = {"unknown": f"{type(e).__name__}: {e}".splitlines()[0]}
    _PROBE[-1].append(found)
    out = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return query.new_zeros(()).expand(out), None


def visible(tokens: int, keys: int, mask: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The keys that each query reads, compactly.

    Returns:
        `tokens`; `below` and `above`: query q reads the keys from q - below to q + above, None where the ends of the sequence limit it; or
        `rows`: first and last key of every query; or `unknown`, with the reason. `adds`: least and greatest of numbers that the mask
        adds to scores of keys that can be read.
    """
    name = str(given.get("implementation"))
    out: dict[str, Any] = {"tokens": tokens}
    at = torch.arange(keys - tokens, keys)[:, None] - torch.arange(keys)
    seen = torch.ones(tokens, keys, dtype=torch.bool)
    tensor = isinstance(mask, torch.Tensor)
    if hasattr(mask, "mask_mod"):  # a BlockMask
        from torch.nn.attention.flex_attention import create_mask

        seen = create_mask(mask.mask_mod, 1, 1, tokens, keys, device="cpu")[0, 0]
    elif tensor and mask.dim() == 4:
        m = mask[0, 0, :, :keys].detach().cpu()
        if m.dtype != torch.bool:
            hidden = m <= torch.finfo(m.dtype).min * _UNREADABLE
            shown = m[~hidden]
            if shown.numel() and bool((shown != 0).any()):
                out["adds"] = [float(shown.min()), float(shown.max())]
            m = ~hidden
        seen = m.expand(tokens, keys)
    elif tensor and mask.dim() == 2 and not bool(mask.all()):
        return {"unknown": "a padding mask that hides tokens"}
    elif mask is not None and not tensor:
        return {"unknown": f"a mask of type {type(mask).__name__}"}
    if "flash" in name:
        window = given.get("sliding_window")
        if given.get("is_causal"):
            seen = seen & (at >= 0)
        if isinstance(window, int) and window > 0:
            seen = seen & (at < window) & (at > -window)
    elif name == "sdpa":
        if mask is None and given.get("is_causal"):
            seen = seen & (at >= 0)
    elif mask is None and name not in ("eager", "flex_attention"):
        return {"unknown": f"attention implementation {name} without a mask"}
    return out | _compact(seen)


def _compact(seen: torch.Tensor) -> dict[str, Any]:
    tokens, keys = seen.shape
    count = seen.sum(1)
    if not bool(count.all()):
        return {"unknown": "a query that reads no key"}
    first = seen.int().argmax(1)
    last = keys - 1 - seen.flip(1).int().argmax(1)
    if not bool((last - first + 1 == count).all()):
        return {"unknown": "a query whose keys are not in a row"}
    q = torch.arange(keys - tokens, keys)
    below, above = int((q - first).max()), int((last - q).max())
    if bool((first == (q - below).clamp(min=0)).all()) and bool((last == (q + above).clamp(max=keys - 1)).all()):
        return {"below": below if below < keys - 1 else None, "above": above if above < keys - 1 else None}
    return {"rows": [[int(a), int(b)] for a, b in zip(first, last, strict=True)]}


class _Zeros(TorchDispatchMode):
    """Results of embeddings and matrix products, and all that is made of them, are zeros without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[torch.dtype, torch.Tensor] = {}
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        product = func._schema.name.removeprefix("aten::") in _PRODUCTS and any(t.is_floating_point() for t in tensors)
        if not product and not any(self._is_made(t) for t in tensors):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0] if args else kwargs.get("out")
        try:
            meta = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (args, kwargs))
            if "device" in meta[1]:
                meta[1]["device"] = torch.device("meta")
            result = func(*meta[0], **meta[1])
        except Exception:  # sizes that depend on numbers
            return func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, self._zero, result)

    def _is_made(self, t: torch.Tensor) -> bool:
        return not t.is_meta and t.untyped_storage().data_ptr() in self.known

    def _zero(self, like: torch.Tensor) -> torch.Tensor:
        if like.dtype not in self.made:
            self.made[like.dtype] = torch.zeros((), dtype=like.dtype)
            self.known.add(self.made[like.dtype].untyped_storage().data_ptr())
        return self.made[like.dtype].expand(like.shape)


def record_masks(forward: Callable[[], Any]) -> list[dict[str, Any]]:
    """The masks of one forward's attention calls, in order."""
    with probe() as seen:
        forward()
    return seen
