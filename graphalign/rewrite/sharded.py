"""Layers under FSDP2 (`fully_shard`): FP32 master weights, and unrounded values past its casts.

FSDP2 casts what enters a sharded module to `param_dtype` (`cast_forward_inputs`, on by default) and what leaves it to `output_dtype`. A
value that the patch passes on unrounded is put back: hooks around FSDP2's own keep hold of it, and an autograd function joins it with the
one that FSDP2 made, whose gradient is zero, so that FSDP2's backward hooks run when they should. All else is cast as without the patch.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from graphalign.errors import PatchNotLiveError

_INSTALLED: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""By unit: the handles of its two hooks."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.entering: dict[int, torch.Tensor] = {}
        """By unit: its input before FSDP2's hook."""
        self.leaving: dict[int, tuple[Any, frozenset[int]]] = {}
        """By unit: what its forward returned, and the ids of the tensors in it that are unrounded."""


_KEPT = _Kept()


class Finder(Protocol):
    """Finds a unit's input among a call's arguments."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> tuple[int | str, torch.Tensor] | tuple[None, None]: ...


def fsdp_class() -> Any:
    """The class that `fully_shard` mixes into modules; None without torch.distributed."""
    if not torch.distributed.is_available():
        return None
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on a module."""
    cls = fsdp_class()
    return cls is not None and isinstance(module, cls)


def stock_class(cls: type) -> type:
    """A module's class without the one that `fully_shard` put over it."""
    mixed = fsdp_class()
    if mixed is None or not issubclass(cls, mixed):
        return cls
    return next(c for c in cls.__mro__ if not issubclass(c, mixed))


def sharded_over(model: nn.Module, units: dict[str, nn.Module]) -> bool:
    """Whether any parameter of the units is held by `fully_shard`: of a unit, of a module inside one, or of one around it."""
    inner = {id(m) for u in units.values() for m in u.modules()}
    return any(id(x) in inner for m in model.modules() if is_sharded(m) for x in m.modules())


def keep_unrounded(unit: nn.Module, find: Finder, dtype: torch.dtype) -> None:
    """Put a unit's hooks around FSDP2's. Called before every call of the unit; does nothing but look if they are there.

    Args:
        unit: a sharded module.
        find: finds its input.
        dtype: the format in which the stock module receives activations.
    """
    if unit not in _INSTALLED:
        _INSTALLED[unit] = (
            unit.register_forward_pre_hook(functools.partial(_enter, find, dtype), prepend=True, with_kwargs=True),
            unit.register_forward_hook(_leave),
        )
        return
    before, after = _INSTALLED[unit]
    hooks: Any = unit  # ordered dicts of hooks by id, which torch types as dicts
    if next(iter(unit._forward_pre_hooks), None) != before.id:  # FSDP2's came later, in front of it
        hooks._forward_pre_hooks.move_to_end(before.id, last=False)
    if next(reversed(unit._forward_hooks), None) != after.id:
        hooks._forward_hooks.move_to_end(after.id)


def release(unit: nn.Module) -> None:
    """Take a unit's hooks off again."""
    for handle in _INSTALLED.pop(unit, ()):
        handle.remove()


def _enter(find: Finder, dtype: torch.dtype, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _, x = find(args, kwargs)
    if x is not None and x.dtype != dtype:
        _KEPT.entering[id(unit)] = x


def entered(unit: nn.Module, x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A unit's input as it was before FSDP2 cast it to `dtype`, None where it was not cast.

    Raises:
        PatchNotLiveError: a hook changed it besides.
    """
    kept = _KEPT.entering.pop(id(unit), None)
    if kept is None or x is None or x is kept or x.dtype != dtype:
        return None
    if kept.shape != x.shape or (_others(unit._forward_pre_hooks) and not torch.equal(kept.to(dtype), x)):
        raise PatchNotLiveError(
            f"the input of {type(unit).__name__} was changed by a hook, beside FSDP2's cast to {dtype}",
            where=", ".join(map(str, _others(unit._forward_pre_hooks)))[:300],
            hint="register that hook before fully_shard, or on the module before",
        )  # fmt: skip
    joined: torch.Tensor = _Join.apply(x, kept)  # type: ignore[no-untyped-call]
    return joined


def leave(unit: nn.Module, result: Any, unrounded: list[torch.Tensor]) -> None:
    """Keep hold of a forward's result until FSDP2's hook has cast it.

    Args:
        unit: whose forward returned.
        result: what it returned.
        unrounded: the tensors in it that the patch passes on unrounded.
    """
    if unrounded and unit in _INSTALLED:
        _KEPT.leaving[id(unit)] = result, frozenset(map(id, unrounded))


def _leave(unit: nn.Module, args: Any, output: Any) -> Any:
    kept = _KEPT.leaving.pop(id(unit), None)
    if kept is None:
        return None
    result, unrounded = kept
    return _put_back(unit, result, output, unrounded)


def _put_back(unit: nn.Module, was: Any, now: Any, unrounded: frozenset[int]) -> Any:
    """What left the forward, cast by FSDP2's hook, with its unrounded tensors as they were."""
    if isinstance(now, torch.Tensor):
        if id(was) not in unrounded or was is now or was.dtype == now.dtype:
            return now
        if _others(unit._forward_hooks) and not torch.equal(was.to(now.dtype), now):
            raise PatchNotLiveError(
                f"what {type(unit).__name__} returned was changed by a hook, beside FSDP2's cast to {now.dtype}",
                where=", ".join(map(str, _others(unit._forward_hooks)))[:300], hint="register that hook on the module behind it",
            )  # fmt: skip
        return was
    if isinstance(now, dict) and isinstance(was, dict):
        for k in now:
            now[k] = _put_back(unit, was[k], now[k], unrounded)
        return now
    if type(now) in (tuple, list) and len(now) == len(was):
        return type(now)(_put_back(unit, a, b, unrounded) for a, b in zip(was, now, strict=True))
    return now


def _others(hooks: Any) -> list[Callable[..., Any]]:
    """Hooks that are neither FSDP2's nor of this module."""
    return [h for h in hooks.values() if not _module(h).startswith(("torch.distributed.", __name__))]


def _module(hook: Any) -> str:
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", ""))


class _Join(torch.autograd.Function):
    """The unrounded value, of a tensor that FSDP2 made by casting it. The gradient goes to the value; the tensor's is zero."""

    @staticmethod
    def forward(ctx: Any, cast: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.dtype = cast.dtype
        return kept.view_as(kept)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        g = grads[0]
        return g.new_zeros((), dtype=ctx.dtype).expand(g.shape), g
