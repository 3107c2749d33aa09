"""Which value a live tensor holds, through views, aliases and in-place writes.

A tensor is identified by its storage and geometry (offset, shape, strides, dtype), not by its Python object: autograd
hands out new objects for the same memory (`detach`, non-differentiable views; torch 2.13), and an object's `id` is
reused after it dies. Small tensors are also held by object, so that two objects of one geometry stay two values.

Writes are made functional: the written tensor gets a new value, and the value of the whole storage is
updated with `aten.as_strided_scatter`; a view that is read afterwards is cut out of it with `aten.as_strided`.
Both only ever act on a value whose elements lie contiguously, so they mean indexing of the flattened value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

HOLD_BYTES = 1 << 20
"""Tensors with a larger storage are not kept alive by the tracker (casts of weights under autocast, gathered experts)."""

Emit = Callable[[str, tuple[object, ...], torch.dtype, tuple[int, ...]], int]
"""Appends a synthetic node (op, args, dtype and shape of its output) and returns the value id."""


@dataclass(frozen=True, slots=True)
class Geometry:
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False

    @classmethod
    def of(cls, t: torch.Tensor) -> Geometry:
        shape = tuple(t.shape)
        strides = tuple(s if n > 1 else 0 for n, s in zip(shape, t.stride(), strict=True))  # a size-1 stride means nothing
        return cls(int(t.storage_offset()), shape, strides, t.dtype, t.is_conj(), t.is_neg())


@dataclass
class Storage:
    ref: StorageWeakRef
    """Keeps the address of the storage object from being reused, not its memory alive."""
    bytes: int
    version: int = 0
    views: dict[Geometry, tuple[int, int]] = field(default_factory=dict)
    """Geometry to (value, version of the storage for which it holds)."""
    whole: Geometry | None = None
    """Geometry of a view that holds every element exactly once; its value is current at all times."""


class TensorTable:
    """Values of live tensors.

    Args:
        emit: called to append the synthetic nodes described above.
        note: called with a sentence if a value cannot be tracked.
    """

    def __init__(self, emit: Emit, note: Callable[[str], None]) -> None:
        self._emit, self._note = emit, note
        self._storages: dict[int, Storage] = {}
        self._held: dict[int, tuple[torch.Tensor, int, int]] = {}

    def bind(self, t: torch.Tensor, value: int) -> None:
        """`t` was just computed (or made as a view): it holds `value`."""
        s, g = self._storage(t), Geometry.of(t)
        s.views[g] = (value, s.version)
        self._hold(t, s, value)
        if s.whole is None and s.version == 0 and _covers(g, s):
            s.whole = g

    def write(self, t: torch.Tensor, value: int) -> None:
        """`t` was just written in place: it holds `value`, and what shares its memory changed."""
        s, g = self._storage(t), Geometry.of(t)
        if s.whole is not None and g != s.whole:
            base = self._flat(s)
            if base is not None and g.dtype == s.whole.dtype and not (g.conj or g.neg):
                args = ({"v": base}, {"v": value}, list(g.shape), list(g.strides), g.offset)
                whole = self._emit("aten.as_strided_scatter.default", args, s.whole.dtype, s.whole.shape)
                s.views[s.whole] = (whole, s.version + 1)
            else:
                s.whole = None
        s.version += 1
        s.views[g] = (value, s.version)
        self._hold(t, s, value)

    def value(self, t: torch.Tensor) -> int | None:
        """The value `t` holds now, None if it was never seen."""
        s = self._storages.get(t.untyped_storage()._cdata)
        if s is None:
            return None
        held = self._held.get(id(t))
        if held is not None and held[0] is t and held[2] == s.version:
            return held[1]
        g = Geometry.of(t)
        entry = s.views.get(g)
        if entry is not None and entry[1] == s.version:
            return entry[0]
        if s.whole is not None and g.dtype == s.whole.dtype and not (g.conj or g.neg):
            base = self._flat(s)
            if base is not None:
                value = self._emit("aten.as_strided.default", ({"v": base}, list(g.shape), list(g.strides), g.offset), g.dtype, g.shape)
                s.views[g] = (value, s.version)
                return value
        if entry is None:
            return None
        self._note(f"a {_words(g)} view is read after its memory was written through another view; its value {entry[0]} is the older one")
        return entry[0]

    def _flat(self, s: Storage) -> int | None:
        """Value of the whole storage with its elements in memory order."""
        whole = s.whole
        if whole is None:
            return None
        value, _ = s.views[whole]
        if _is_contiguous(whole):
            return value
        order = sorted(range(len(whole.shape)), key=lambda d: -whole.strides[d])
        shape = tuple(whole.shape[d] for d in order)
        value = self._emit("aten.permute.default", ({"v": value}, order), whole.dtype, shape)
        s.whole = Geometry(0, shape, tuple(whole.strides[d] for d in order), whole.dtype)
        s.views[s.whole] = (value, s.version)
        return value

    def _storage(self, t: torch.Tensor) -> Storage:
        raw = t.untyped_storage()
        s = self._storages.get(raw._cdata)
        if s is None:
            s = self._storages[raw._cdata] = Storage(StorageWeakRef(raw), raw.nbytes())
        return s

    def _hold(self, t: torch.Tensor, s: Storage, value: int) -> None:
        if s.bytes <= HOLD_BYTES or isinstance(t, torch.nn.Parameter):
            self._held[id(t)] = (t, value, s.version)
        else:
            self._held.pop(id(t), None)


def _is_contiguous(g: Geometry) -> bool:
    expected = 1
    for n, stride in zip(reversed(g.shape), reversed(g.strides), strict=True):
        if n > 1 and stride != expected:
            return False
        expected *= n
    return True


def _covers(g: Geometry, s: Storage) -> bool:
    """Whether a view holds every element of its storage exactly once."""
    if g.offset or g.conj or g.neg or math.prod(g.shape) * g.dtype.itemsize != s.bytes:
        return False
    dims = sorted((stride, n) for n, stride in zip(g.shape, g.strides, strict=True) if n > 1)
    expected = 1
    for stride, n in dims:
        if stride != expected:
            return False
        expected *= n
    return True


def _words(g: Geometry) -> str:
    return f"{str(g.dtype).removeprefix('torch.')}{list(g.shape)}"
