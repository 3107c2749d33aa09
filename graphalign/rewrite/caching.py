"""KV caches that Dynamo does not look into while it traces a patched module.

A cache keeps a list of layers, so a graph that reads it is a graph for one index: equal layers would not share theirs, and a deep model
would compile as many graphs as it has layers. A layer that only updates its cache gets a stand-in whose `update` is one node of the graph.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from graphalign.errors import PatchNotLiveError
from graphalign.rewrite.attention import keep, kept

OP = "opaque.cache"
"""What `analyse` calls such a node."""
_NAMES = r"\b(?:past_key_values?|layer_past|kv_cache|cache_params|cache)\b"
_USE = re.compile(_NAMES + r"\s*\.\s*(\w+)")
_UPDATE = re.compile(_NAMES + r"\s*\.\s*update\(\s*[\w.]+\s*,\s*[\w.]+\s*,\s*self\.layer_idx\b")
_ASKED = re.compile(r"(?:isinstance|type|getattr|hasattr|len)\(\s*" + _NAMES + "|" + _NAMES + r"\s*\[")


class HeldCache:
    """Stands for a cache among the arguments of a layer that only updates it, at its own index."""

    def __init__(self, cache: Any, index: int, length: int) -> None:
        self.token = keep((cache, index))
        self.keys = torch.empty(length, dtype=torch.int8)
        """[keys that the layer will attend to]: only its shape is read."""

    def update(self, key_states: Any, value_states: Any, layer_idx: Any, *args: Any, **kwargs: Any) -> Any:
        """As `Cache.update`, for the held index; `layer_idx` is not read, or the graph would be for that layer alone."""
        return _update(key_states, value_states, self.token, self.keys, args, kwargs)


def _call(key: Any, value: Any, token: Any, keys: Any, args: Any, kwargs: Any) -> Any:
    shapes = [(x.shape[0], x.shape[1], keys.shape[0], x.shape[3]) for x in (key, value)]
    # An empty DynamicCache takes its dtype from the keys and appends by torch.cat, which promotes (Transformers 5.19): values of a BF16
    # GEMM beside keys that RoPE made FP32, as under autocast, come back in FP32.
    dtypes = [key.dtype, torch.promote_types(key.dtype, value.dtype)]
    if isinstance(key, FakeTensor):
        return key.new_empty(shapes[0], dtype=dtypes[0]), value.new_empty(shapes[1], dtype=dtypes[1])
    cache, index = kept(token)
    found = tuple(cache.update(key, value, index, *args, **kwargs))
    if [tuple(x.shape) for x in found] != shapes or [x.dtype for x in found] != dtypes:
        said, gave = (
            ", ".join(
                f"{name} of {tuple(s)}, {str(d).removeprefix('torch.')}" for name, s, d in zip(("keys", "values"), ss, ds, strict=True)
            )
            for ss, ds in ((shapes, dtypes), ([x.shape for x in found], [x.dtype for x in found]))
        )
        raise PatchNotLiveError(
            f"{type(cache).__name__} returned {gave}, and said before that they would be {said}",
            where=f"layer {index}", hint="run this model without a cache (use_cache=False), or with a DynamicCache that nobody filled",
        )  # fmt: skip
    return found


_call.__name__ = _call.__qualname__ = "update_cache"
_update = torch._dynamo.allow_in_graph(_call)  # type: ignore[no-untyped-call]


def is_cache(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph updates a cache."""
    return node.target is _call


@functools.cache
def _only_updates(cls: type) -> bool | None:
    """Whether a class's code does nothing with a cache but to update it at its module's own index; None if it names none."""
    try:
        text = inspect.getsource(cls)
    except (OSError, TypeError):
        return False
    uses = _USE.findall(text)
    if _ASKED.search(text) or len(_UPDATE.findall(text)) != len(uses):
        return False
    return True if uses else None


def index_of(unit: nn.Module) -> int | None:
    """The index at which a unit updates its cache, if that is all it does with one."""
    found: dict[nn.Module, bool] = {}
    for m in unit.modules():
        for cls in type(m).__mro__:
            if not cls.__module__.startswith(("torch.", "graphalign.", "builtins")) and (only := _only_updates(cls)) is not None:
                found[m] = found.get(m, True) and only
    if len(found) != 1 or not all(found.values()):
        return None
    index = getattr(next(iter(found)), "layer_idx", None)
    return index if isinstance(index, int) else None


def hold_cache(x: Any, index: int, tokens: int) -> Any:
    """A cache of Transformers as a `HeldCache`; anything else as it is.

    Args:
        x: an argument of the layer's forward.
        index: of the layer in the cache.
        tokens: number of new ones.
    """
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or type(x) is not caches.DynamicCache:
        return x
    length, _ = x.get_mask_sizes(tokens, index)
    return HeldCache(x, index, int(length))
