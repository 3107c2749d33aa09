"""What an eager op would have returned before it rounded to BF16.

The trainer's kernels take BF16 operands, compute in FP32 and round their result. Here the op runs once more on the same operands in a
wider format: pointwise ops and reductions in FP64, GEMMs and attention in FP32, as their kernels accumulate. A cast from a wider
format rounds its operand, so that is the unrounded value. Rounding what is found here must give what the op returned; how often it does is
counted, and is less than always where the kernel rounds inside (attention probabilities) or adds up in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from graphalign.clusters.positions import Tally, rounded
from graphalign.evaluate.aten import ATTENTIONS, MATMULS, TRANSPARENT, base
from graphalign.ir.training import Value

LOW = torch.bfloat16
_CASTS = frozenset({"_to_copy", "to", "copy"})
_WIDE = (torch.float32, torch.float64)

Done = Callable[[Sequence[Value | None], Sequence[Any]], None]


class Unrounded:
    """Tallies the unrounded value of every result that is rounded to BF16, in one forward. A `capture.recorder.Watch`.

    Args:
        tokens: length of the sequence; an axis of this size is that of the tokens.

    Attributes:
        tallies: by value id.
        unmeasured: op to the reason why it could not be run in a wider format.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.tallies: dict[int, Tally] = {}
        self.unmeasured: dict[str, str] = {}

    def __call__(self, op: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Done | None:
        name = base(op)
        if name in TRANSPARENT and name not in _CASTS:
            return None
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not tensors or all(isinstance(t, torch.nn.Parameter) for t in tensors):
            return None
        with torch.no_grad():
            wide = _source(name, args) if name in _CASTS else self._evaluate(op, func, args, kwargs, tensors)
        return None if wide is None else functools.partial(self._tally, op, wide)

    def _evaluate(
        self, op: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]
    ) -> list[Any] | None:
        """The leaves of the op's result in a wider format; None if nothing it reads is BF16, or it cannot be had."""
        if all(t.dtype != LOW for t in tensors):
            return None
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.unmeasured[op] = "it is random"
            return None
        # Operands are copied, always: an in-place op must not write into the model's own.
        sums = base(op) in MATMULS | ATTENTIONS or not op.startswith("aten.")
        wider = torch.float32 if sums else torch.float64
        widen = functools.partial(_widen, wider=wider)
        try:
            if isinstance(func, functools.partial):  # a composite anchor: its operands are bound
                given, named = pytree.tree_map(widen, (func.args, func.keywords))
                result = func.func(*given, **named)
            else:
                given, named = pytree.tree_map(widen, (list(args), dict(kwargs)))
                result = func(*given, **named)
        except Exception as e:  # whatever a kernel raises that takes BF16 only
            self.unmeasured[op] = f"it does not run in {str(wider).removeprefix('torch.')}: {_first_line(e)}"
            return None
        return list(pytree.tree_leaves(result))

    def _tally(self, op: str, wide: Sequence[Any], values: Sequence[Value | None], results: Sequence[Any]) -> None:
        for unrounded, value, result in zip(wide, values, results, strict=False):
            if value is None or not isinstance(result, torch.Tensor) or result.dtype != LOW or not result.numel():
                continue
            if not isinstance(unrounded, torch.Tensor) or unrounded.dtype not in _WIDE:
                self.unmeasured[op] = "its result is BF16 whatever it is given"
                continue
            # NumPy from here: its single thread is faster than many short parallel loops on a busy machine.
            x = by_token(unrounded.detach().expand(result.shape), self.tokens).cpu().numpy().astype(np.float64)
            bits = by_token(result.detach(), self.tokens).view(torch.int16).cpu().numpy().view(np.uint16)
            tally = self.tallies.setdefault(value.id, Tally())
            tally.agreeing += int(np.count_nonzero(rounded(x) == bits))
            tally.add(x)


def by_token(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """A result as [tokens, values]; [rows, last axis] where no axis is that of the tokens (an expert's share of them)."""
    axis = next((i for i, n in enumerate(x.shape) if n == tokens), None)
    if axis is not None:
        return x.movedim(axis, 0).reshape(tokens, -1)
    return x.reshape(-1, x.shape[-1] if x.dim() else 1)


def _source(name: str, args: Sequence[Any]) -> list[Any] | None:
    """What a cast rounds; None if it does not come from a wider format."""
    source = args[1] if name == "copy" else args[0]
    return [source.detach()] if isinstance(source, torch.Tensor) and source.dtype in _WIDE else None


def _widen(x: Any, wider: torch.dtype) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().to(wider, copy=True) if x.dtype in (LOW, torch.float32) else x.detach().clone()
    return wider if x is LOW else x


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
