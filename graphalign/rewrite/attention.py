"""Attention functions that Dynamo does not look into while it traces a patched module.

Transformers' function for FlashAttention decides by numbers (are sequences packed, which tokens are padding), at which Dynamo breaks the
graph; flex attention is a kernel only when it is compiled by itself; what a user registered may do anything. A patch changes nothing inside
attention, so the function is one node of the graph, and when the graph runs it is called as the stock model calls it: autograd sees its
kernels. For Dynamo's fake tensors the node gives an empty result of the right shape (`allow_in_graph`, torch 2.13; `leaf_function` does not
survive checkpointing that is not reentrant).
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from graphalign.errors import PatchNotLiveError

OP = "opaque.attention"
"""What `analyse` calls such a node."""
_TRACED = frozenset({"transformers.integrations.sdpa_attention"})
"""Modules whose attention functions Dynamo traces as they are."""
_MARK = "_graphalign_attention"
"""Of a stand-in: the function that it calls. Of an in-graph function: True."""
_MISSING = object()


class Held:
    """Stands for an argument that a graph cannot take (a `BlockMask`), on its way to the attention function."""

    def __init__(self, token: torch.Tensor) -> None:
        self.token = token
        """Int64, no dimensions: the number of the object in `_Running.held`."""


@dataclass
class _Call:
    unit: nn.Module
    held: dict[int, Any] = field(default_factory=dict)


class _Running(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []


_RUN = _Running()
_LOCK = threading.RLock()
_PLACED: dict[tuple[int, str], tuple[int, Any]] = {}
"""By interface and name: the number of calls that need the stand-in now, and what was there before."""
_STAND_INS: dict[Callable[..., Any], Callable[..., Any]] = {}
_NUMBERS = itertools.count()


def interfaces_of(unit: nn.Module) -> tuple[Any, ...]:
    """The tables (`AttentionInterface`) in which a unit's modeling files look attention functions up."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    kind = getattr(modeling, "AttentionInterface", None)
    if kind is None:
        return ()
    files = {c.__module__ for m in unit.modules() for c in type(m).__mro__}
    found = [modeling.ALL_ATTENTION_FUNCTIONS]
    found += [x for f in sorted(files) for x in vars(sys.modules.get(f, object)).values() if isinstance(x, kind)] if files else []
    return tuple({id(x): x for x in found}.values())


@contextmanager
def opaque_attention(unit: nn.Module, interfaces: Iterable[Any], names: Iterable[str]) -> Iterator[None]:
    """Within the block, models find stand-ins for the attention functions of these names; anybody else's call of one is a call of the
    function itself.

    Args:
        unit: the patched module that runs.
        interfaces: where it looks them up, see `interfaces_of`.
        names: the implementations of its configs.
    """
    placed = [(i, n) for i in interfaces for n in names if _place(i, n)]
    _RUN.calls.append(_Call(unit))
    try:
        yield
    finally:
        _RUN.calls.pop()
        for i, n in placed:
            _remove(i, n)


def hold(x: Any) -> Any:
    """A call's arguments with `Held` in the place of block masks. Within `opaque_attention`."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    kind = getattr(flex, "BlockMask", None)
    return x if kind is None else _hold(x, kind)


def keep(x: Any) -> torch.Tensor:
    """The token (int64, no dimensions) by which a graph's node finds an object that the graph cannot take. Within `opaque_attention`."""
    number = next(_NUMBERS)
    _RUN.calls[-1].held[number] = x
    return torch.tensor(number)


def kept(token: torch.Tensor) -> Any:
    """The object of a token, in the call that kept it."""
    return _RUN.calls[-1].held[int(token)]


def _hold(x: Any, kind: Any) -> Any:
    if isinstance(x, kind):
        return Held(keep(x))
    if type(x) is dict:
        return {k: _hold(y, kind) for k, y in x.items()}
    if type(x) in (tuple, list):
        return type(x)(_hold(y, kind) for y in x)
    return x


def _place(interface: Any, name: str) -> bool:
    with _LOCK:
        key = (id(interface), name)
        count, before = _PLACED.get(key, (0, _MISSING))
        try:
            found = interface[name]
        except KeyError:  # eager: the modeling file's own function
            return False
        if not hasattr(found, _MARK):
            if found.__module__ in _TRACED:
                return False
            if not count:
                before = interface._local_mapping.get(name, _MISSING)
            interface[name] = _stand_in(found)
        _PLACED[key] = count + 1, before
        return True


def _remove(interface: Any, name: str) -> None:
    with _LOCK:
        key = (id(interface), name)
        count, before = _PLACED.pop(key)
        if count > 1:
            _PLACED[key] = count - 1, before
        elif not hasattr(interface[name], _MARK):
            return  # somebody put another function there meanwhile
        elif before is _MISSING:
            del interface[name]
        else:
            interface[name] = before


def _stand_in(fn: Callable[..., Any]) -> Callable[..., Any]:
    if fn not in _STAND_INS:
        _STAND_INS[fn] = _make(fn)
    return _STAND_INS[fn]


def _make(fn: Callable[..., Any]) -> Callable[..., Any]:
    # what a FlashAttention kernel casts FP32 queries to, which only `fn` knows
    target_dtype = getattr(sys.modules.get(fn.__module__), "get_target_dtype", None)

    def attention(path: str, dtype: torch.dtype, query: Any, key: Any, value: Any, mask: Any, held: bool, args: Any, kwargs: Any) -> Any:
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        if not _RUN.calls:
            raise PatchNotLiveError(
                f"{_name(fn)} of a patched model was traced outside of its forward", where=path,
                hint="leave torch.compile to graphalign while a patched model runs in another thread",
            )  # fmt: skip
        if isinstance(query, FakeTensor):
            return query.new_empty(shape, dtype=dtype)
        call = _RUN.calls[-1]
        result = fn(call.unit.get_submodule(path) if path else call.unit, query, key, value, kept(mask) if held else mask, *args, **kwargs)
        found = result[0] if isinstance(result, tuple | list) else result
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != shape or found.dtype != dtype:
            got = f"{tuple(found.shape)} in {found.dtype}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise PatchNotLiveError(
                f"the attention function {_name(fn)} returned {got}, not {shape} in {dtype}", where=path,
                hint="a registered attention function must return [batch, tokens, heads, width] in the query's dtype first",
            )  # fmt: skip
        return found

    setattr(attention, _MARK, True)
    attention.__qualname__ = attention.__name__ = f"attention_of_{fn.__name__ if hasattr(fn, '__name__') else 'model'}"
    inside = torch._dynamo.allow_in_graph(attention)  # type: ignore[no-untyped-call]

    def stand_in(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return fn(module, query, key, value, attention_mask, *args, **kwargs)
        dtype = target_dtype(query, module) if target_dtype is not None else None
        held = isinstance(attention_mask, Held)
        mask = attention_mask.token if held else attention_mask
        return inside("", query.dtype if dtype is None else dtype, query, key, value, mask, held, args, kwargs), None

    setattr(stand_in, _MARK, fn)
    return stand_in


def is_attention(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph calls an attention function."""
    return node.op == "call_function" and getattr(node.target, _MARK, None) is True


def set_path(node: fx.Node, path: str) -> None:
    """Tell an attention node which module of the unit calls it."""
    node.args = (path, *node.args[1:])


def _name(fn: Callable[..., Any]) -> str:
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__name__)}".lstrip(".")
