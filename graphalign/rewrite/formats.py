"""The formats in which GEMMs and attention kernels read their operands: a patch changes none of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphalign.evaluate.aten import base
from graphalign.rewrite.analyse import ANCHORS

Calls = Counter[tuple[str, tuple[str, ...], str]]
"""(op, formats of its tensor operands, the parameter among them) to the number of calls."""


class _Formats(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Calls = Counter()
        self._names = {p.untyped_storage().data_ptr(): n for n, p in module.named_parameters() if type(p.data) is torch.Tensor}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let patched layers run as they do without the mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = base(str(func))
        if name in ANCHORS or (func.namespace not in ("aten", "prim", "prims", "profiler") and not str(func).startswith("_c10d")):
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            named = (self._names.get(x.untyped_storage().data_ptr(), "") for x in read if type(x) in (torch.Tensor, nn.Parameter))
            formats = tuple(str(x.dtype).removeprefix("torch.") for x in read)
            self.calls[f"{func.namespace}.{name}", formats, next((n for n in named if n), "")] += 1
        return func(*args, **kwargs)


@contextmanager
def formats_of(module: nn.Module) -> Iterator[Calls]:
    """Counts the calls of GEMMs, attention kernels and custom ops within the block, of a module that may be patched."""
    mode = _Formats(module)
    with mode:
        yield mode.calls


def moved(stock: Calls, patched: Calls) -> str:
    """In words, where a patched model's calls read other formats than the stock model's; empty if they don't.

    How often something is called is not compared: which experts are chosen may differ. A parameter that only one of the two models read
    must be read in formats that the stock model reads somewhere.
    """
    named, forms = {name for _, _, name in stock}, {(op, formats) for op, formats, _ in stock}
    new = [c for c in patched if c not in stock and (c[2] in named or c[:2] not in forms)]
    if not new:
        return ""
    gone = [c for c in stock if c not in patched]

    def words(calls: list[tuple[str, tuple[str, ...], str]]) -> str:
        lines = [f"{op}({', '.join(formats)})" + (f" of {name}" if name else "") for op, formats, name in calls]
        return "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "") if lines else "no such call"

    return f"with the patch: {words(new)}\nwithout it: {words(gone)}"
