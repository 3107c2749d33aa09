"""Products with dummy matrices that share memory, without reading all of it.

Noise repeats, so most columns of such a product are equal: they are computed once, from the first period. A cast of a matrix
is noise that was rounded once more, and needs no memory either. Whatever else is done with a matrix reads it, as with any weight.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphalign.engines.noise import PERIOD, Region
from graphalign.errors import CaptureFailedError

Run = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""Calls an op: (op, arguments, keyword arguments)."""


class SharedNoise:
    """The memory of a model's dummy matrices: a region per dtype, equal up to rounding.

    Args:
        elements: the most that a matrix takes, with the offset at which it begins.
    """

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.regions: dict[tuple[torch.dtype, ...], Region] = {}

    def region(self, dtypes: tuple[torch.dtype, ...]) -> Region:
        """The region of noise rounded to the dtypes one after the other."""
        dtypes = tuple(d for i, d in enumerate(dtypes) if i or d != torch.float32) or (torch.float32,)
        if dtypes not in self.regions:
            self.regions[dtypes] = Region(dtypes, self.elements * dtypes[-1].itemsize)
        return self.regions[dtypes]

    def place(self, t: Any) -> tuple[Region, int] | None:
        """The region of a tensor and the element of it at which the tensor begins; None for any other tensor."""
        if type(t) not in (torch.Tensor, nn.Parameter) or t.device.type != "cpu" or t.layout != torch.strided or not t.numel():
            return None
        for region in self.regions.values():
            if (start := region.start(t)) is not None:
                return region, start
        return None

    def run(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an op; an instance's method is a `Run`.

        Raises:
            CaptureFailedError: it writes to a dummy matrix.
        """
        special = _SPECIAL.get(op)
        if special is not None and (found := special(self, *args, **kwargs)) is not None:
            return found
        if op._schema.is_mutable:
            self._refuse_writes(op, args, kwargs)
        return op(*args, **kwargs)

    def _refuse_writes(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for i, a in enumerate(op._schema.arguments):
            if a.alias_info is not None and a.alias_info.is_write:
                x = args[i] if i < len(args) else kwargs.get(a.name)
                for t in x if isinstance(x, list | tuple) else [x]:
                    if isinstance(t, torch.Tensor) and self.place(t) is not None:
                        raise CaptureFailedError(
                            f"the forward writes to a weight of shape {list(t.shape)}, and dummy weights of a large model share memory",
                            where=str(op),
                            hint="use fewer --layers, or give the model with its weights",
                        )

    # ---- ops: None where nothing is gained ----

    def columns(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Of a (K, N) matrix the columns up to where they repeat, from the first period; None for any other tensor."""
        found = self.place(weight)
        if found is None or weight.ndim != 2:
            return None
        region, start = found
        k, n = weight.shape
        step = weight.stride(1)
        distinct = min(n, PERIOD // math.gcd(PERIOD, step)) if step else 1
        return region.tensor(start % PERIOD, (k, distinct), weight.stride())

    def mm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        part = self.columns(weight)
        if part is None:
            return None
        n = weight.shape[1]
        found = torch.mm(x, part)
        return found if found.shape[1] == n else found.repeat(1, -(-n // found.shape[1]))[:, :n].contiguous()

    def addmm(self, bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor | None:
        part = self.columns(weight)
        if part is None:
            return None
        n, width = weight.shape[1], part.shape[1]
        biases = bias.expand(*bias.shape[:-1], n).split(width, -1)
        return torch.cat([torch.addmm(b, x, part[:, : b.shape[-1]], beta=beta, alpha=alpha) for b in biases], 1)

    def bmm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        if self.place(weight) is None:
            return None
        return torch.stack([self._product(x[i], weight[i]) for i in range(len(weight))])

    def grouped(
        self, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
    ) -> torch.Tensor | None:
        """Rows of x up to `offs[i]` with the i-th matrix; other rows are zeros (the kernel leaves them as they are, torch 2.13)."""
        if x.ndim != 2 or weight.ndim != 3 or offs is None or bias is not None or out_dtype is not None or self.place(weight) is None:
            return None
        out, begin = x.new_zeros(x.shape[0], weight.shape[2]), 0
        for i, end in enumerate(offs.tolist()):
            if end > begin:
                out[begin:end] = self._product(x[begin:end], weight[i])
            begin = end
        return out

    def cast(self, weight: torch.Tensor, **options: Any) -> torch.Tensor | None:
        """As noise of another dtype; only tensors that lie dense in memory keep their strides."""
        dtype = options.pop("dtype", None)
        found = self.place(weight) if dtype is not None and not options and weight.numel() >= PERIOD else None
        if found is None or not (weight.is_contiguous() or weight.mT.is_contiguous()):
            return None
        region, start = found
        return self.region((*region.dtypes, dtype)).tensor(start, weight.shape, weight.stride())

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = self.mm(x, weight)
        return torch.mm(x, weight) if found is None else found


_ATEN = torch.ops.aten
_SPECIAL: dict[Any, Callable[..., torch.Tensor | None]] = {
    _ATEN.mm.default: SharedNoise.mm,
    _ATEN.addmm.default: SharedNoise.addmm,
    _ATEN.bmm.default: SharedNoise.bmm,
    _ATEN._grouped_mm.default: SharedNoise.grouped,
    _ATEN._to_copy.default: SharedNoise.cast,
}
_OF: weakref.WeakKeyDictionary[nn.Module, SharedNoise] = weakref.WeakKeyDictionary()


def remember(model: nn.Module, noise: SharedNoise) -> None:
    """A model's matrices lie in this memory."""
    _OF[model] = noise


def call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an op as it is."""
    return op(*args, **kwargs)


def runner(model: nn.Module) -> Run:
    """How to call ops of a model's forward."""
    return _OF[model].run if model in _OF else call
