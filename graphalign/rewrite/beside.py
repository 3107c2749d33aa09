"""Values that cross between patched modules unrounded.

Between layers the tensor itself is FP32. What a module outside the layers returns (an embedding, the cos and sin of a rotary embedding) is
also read by the model's own code, which goes by its dtype (`cos.to(x.dtype)`, masks) or hands it to modules that are not patched. So it
stays rounded, and the unrounded tensor travels beside it, as an attribute, for the patched modules that are to read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

ATTRIBUTE = "_graphalign_unrounded"
Path = tuple[int | str, ...]
"""Where a tensor is among a call's arguments: position or keyword, then positions or keys inside."""


@dataclass(frozen=True, slots=True)
class Unrounded:
    """What travels beside a rounded tensor."""

    tensor: torch.Tensor
    """FP32, of the same shape."""
    sources: frozenset[str]
    """The exits that made it, `UnitEdit.source`."""
    version: int | None
    """Of the rounded tensor; another one means that it was written since."""
    returned: list[torch.Tensor]
    """Gradients of this value from readers that got it put together again, see `_Again`."""


_SEEN: dict[int, TensorWeakRef] = {}
"""Rounded tensors by address, to find one from an alias."""


def attach(rounded: torch.Tensor, unrounded: torch.Tensor, sources: frozenset[str]) -> torch.Tensor:
    """Let an unrounded value travel beside a rounded one, for as long as that lives.

    Returns:
        The rounded one: another tensor, where gradients flow.
    """
    returned: list[torch.Tensor] = []
    if unrounded.requires_grad and torch.is_grad_enabled():
        rounded = _Beside.apply(rounded, unrounded, returned)  # type: ignore[no-untyped-call]
    setattr(rounded, ATTRIBUTE, Unrounded(unrounded, sources, _version(rounded), returned))
    for address in [a for a, ref in _SEEN.items() if ref() is None]:
        del _SEEN[address]
    _SEEN[rounded.untyped_storage().data_ptr()] = TensorWeakRef(rounded)
    return rounded


def take(x: torch.Tensor) -> tuple[torch.Tensor, frozenset[str]] | None:
    """The unrounded value of a tensor and where it comes from; None if nothing travels beside it.

    A detached input (reentrant checkpointing) or what FSDP2 puts a hook on is another tensor with the same elements: then the value is put
    together again from it and the rounding error, which is exact in FP32, and its gradient goes back to the unrounded value in FP32.
    """
    found = getattr(x, ATTRIBUTE, None)
    if found is not None:
        return (found.tensor, found.sources) if found.version == _version(x) else None
    ref = _SEEN.get(x.untyped_storage().data_ptr()) if type(x) is torch.Tensor else None
    first = ref() if ref is not None else None
    found = getattr(first, ATTRIBUTE, None)
    if first is None or found is None or _layout(first) != _layout(x) or found.version != _version(first):
        return None
    error = found.tensor.detach() - first.detach().to(torch.float32)
    again: torch.Tensor = _Again.apply(x, torch.nan_to_num(error, 0.0, 0.0, 0.0), found.returned)  # type: ignore[no-untyped-call]
    return again, found.sources


class _Beside(torch.autograd.Function):
    """A rounded tensor whose backward also hands on what `_Again` got: autograd runs it when all readers have run."""

    @staticmethod
    def forward(ctx: Any, rounded: torch.Tensor, unrounded: torch.Tensor, returned: list[torch.Tensor]) -> torch.Tensor:
        ctx.returned = returned
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        total = None
        for g in ctx.returned:
            total = g if total is None else total + g
        ctx.returned.clear()
        return grads[0], total, None


class _Again(torch.autograd.Function):
    """The unrounded value, of a tensor that autograd knows by its rounded elements only.

    A gradient that went the way of that tensor would be rounded to its format, and added up in it. So it is laid where `_Beside` finds it,
    and the tensor gets zeros: they keep the backward of what lies between (a reentrant checkpoint) running.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: torch.Tensor, returned: list[torch.Tensor]) -> torch.Tensor:
        ctx.returned, ctx.dtype = returned, x.dtype
        return x.to(torch.float32) + error

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        ctx.returned.append(grads[0])
        return torch.zeros_like(grads[0], dtype=ctx.dtype), None, None


def split(results: Any, beside: Sequence[tuple[int, frozenset[str]]]) -> Any:
    """A rewritten graph's results without those at its end, which travel beside the result of the given position."""
    count = len(results) - len(beside)
    out = list(results[:count])
    for (position, sources), unrounded in zip(beside, results[count:], strict=True):
        out[position] = attach(out[position], unrounded, sources)
    return tuple(out) if isinstance(results, tuple) else out


def substitute(
    args: tuple[Any, ...], kwargs: dict[str, Any], wanted: frozenset[str]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Path, ...], frozenset[str]]:
    """A call's arguments with unrounded tensors where something wanted travels beside one.

    Returns:
        The arguments, the places where they changed, and what was found.
    """
    paths: list[Path] = []
    found: frozenset[str] = frozenset()
    for path, x in [*_tensors(args), *_tensors(kwargs)]:
        if x.is_floating_point() and (taken := take(x)) is not None and taken[1] & wanted:
            args, kwargs = put(args, kwargs, path, _constant(taken[0]))
            paths.append(path)
            found |= taken[1]
    return args, kwargs, tuple(paths), found


def _constant(value: torch.Tensor) -> Callable[[Any], Any]:
    return lambda _: value


def put(args: tuple[Any, ...], kwargs: dict[str, Any], path: Path, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with the one at a path changed. Dynamo traces it."""
    if isinstance(path[0], int):
        return _changed(args, path, change), kwargs
    return args, _changed(kwargs, path, change)


def _changed(x: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    if len(path) == 0:
        return change(x)
    at, rest = path[0], path[1:]
    if isinstance(x, dict):
        return {**x, at: _changed(x[at], rest, change)}
    items = [_changed(y, rest, change) if i == at else y for i, y in enumerate(x)]
    return tuple(items) if isinstance(x, tuple) else items


def _tensors(x: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Tensors in plain tuples, lists and dicts, with their paths."""
    if isinstance(x, torch.Tensor):
        yield path, x
    elif type(x) in (tuple, list):
        for i, y in enumerate(x):
            yield from _tensors(y, (*path, i))
    elif type(x) is dict:
        for k, y in x.items():
            if isinstance(k, str):
                yield from _tensors(y, (*path, k))


def _version(x: torch.Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), x.storage_offset()
