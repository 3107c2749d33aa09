"""Runs an instrumented model once: which tensor every expression yields, and which tensors every op reads and makes, in order."""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphalign.evaluate.aten import TRANSPARENT, base
from graphalign.ir.frames import is_modeling_file, relative_file
from graphalign.rewrite.analyse import DEAD
from graphalign.source.spans import RECORD, Spans, instrumented_file
from graphalign.source.stock import Stock, load_module, restore, swap_classes


@dataclass(frozen=True)
class Op:
    """One ATen op that ran."""

    module: str
    function: str
    op: str
    ordinal: int
    """Among equal ops of that function in that module, as in a spec's key."""
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    here: bool
    """Whether the instrumented file runs it, not another modeling file."""
    text: str = ""
    """`line 61: ` and the line's text; of another modeling file with its name."""

    @property
    def transparent(self) -> bool:
        """It makes no new value."""
        return self.op in TRANSPARENT


@dataclass(frozen=True)
class Seen:
    """One evaluation of an expression."""

    span: int
    value: int
    """-1: it yielded no tensor."""
    module: str


@dataclass
class Trace:
    """Events in order; values are numbered by tensor identity."""

    events: list[Op | Seen] = field(default_factory=list)
    dtype: dict[int, torch.dtype] = field(default_factory=dict)
    dims: dict[int, int] = field(default_factory=dict)
    norms: set[str] = field(default_factory=set)
    """Names of the `nn.LayerNorm` modules, whose op runs in torch's file: the expression of the modeling file is the call."""


def watch(model: nn.Module, stock: Stock, spans: Spans, tokens: int = 8) -> Trace:
    """One forward of a model whose classes come from `stock`, under the instrumented code. The model is as before afterwards."""
    watcher = _Watcher(model, instrumented_file(spans.text), spans.text.splitlines())
    watcher.trace.norms.update(n for n, m in model.named_modules() if type(m) is nn.LayerNorm)
    instrumented = load_module(
        f"graphalign_instrumented_{stock.module.rpartition('.')[2]}", watcher.file, spans.code, {RECORD: watcher.record}
    )
    swapped = swap_classes(model, stock.module, instrumented)
    try:
        with torch.no_grad(), watcher.running():
            model(input_ids=torch.arange(tokens)[None] + 3, use_cache=False)
    finally:
        restore(swapped)
    return watcher.trace


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module, file: str, lines: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace, self.file, self.lines = Trace(), file, lines
        self.names = {id(m): n for n, m in model.named_modules()}
        self.modules: list[str] = []
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.ids: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []  # ids of tensors stay theirs
        self.on = False

    @contextmanager
    def running(self) -> Iterator[None]:
        hooks = nn.modules.module
        handles = [
            hooks.register_module_forward_pre_hook(lambda m, a: self.modules.append(self.names.get(id(m), ""))),
            hooks.register_module_forward_hook(self._left, always_call=True),
        ]
        self.on = True
        try:
            with self:
                yield
        finally:
            self.on = False
            for h in handles:
                h.remove()

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self.modules.pop()

    def number(self, t: torch.Tensor) -> int:
        found = self.ids.get(id(t))
        if found is None:
            found = self.ids[id(t)] = len(self.trace.dtype)
            self.alive.append(t)
            self.trace.dtype[found], self.trace.dims[found] = t.dtype, t.dim()
        return found

    def record(self, span: int, value: Any) -> Any:
        if self.on:
            module = self.modules[-1] if self.modules else ""
            self.trace.events.append(Seen(span, self.number(value) if isinstance(value, torch.Tensor) else -1, module))
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        ins = tuple(self.number(a) for a in flat)
        out = func(*args, **kwargs)
        made = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        op = base(str(func))
        if func.namespace == "aten" and op in DEAD:
            for t in made:  # autograd's alias of the same value
                self.alive.append(t)
                self.ids[id(t)] = ins[0] if ins else self.number(t)
            return out
        function, here, text = self._function(sys._getframe(1))
        module = self.modules[-1] if self.modules else ""
        ordinal = self.counts[module, function, op]
        self.counts[module, function, op] += 1
        self.trace.events.append(Op(module, function, op, ordinal, ins, tuple(self.number(t) for t in made), here, text))
        return out

    def _function(self, frame: FrameType | None) -> tuple[str, bool, str]:
        while frame is not None:
            name = frame.f_code.co_filename
            if name == self.file or is_modeling_file(name):
                here = name == self.file
                text = (
                    f"line {frame.f_lineno}: {self.lines[frame.f_lineno - 1].strip()}"
                    if here
                    else f"{relative_file(name)}:{frame.f_lineno} {linecache.getline(name, frame.f_lineno).strip()}"
                )
                return frame.f_code.co_qualname, here, text
            frame = frame.f_back
        return "", False, ""
