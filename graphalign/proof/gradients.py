"""Gradients of a patched model against an FP64 evaluation of the same function with the same roundings, straight-through.

The reference runs every rewritten graph in float64 and rounds where the graph rounds; its backward passes through the roundings
as if they were not there and rounds nothing. Between two patched modules values (and gradients) have the dtype they always have.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphalign.rewrite.live import ORIGINAL, evaluated_by

_NARROW = frozenset({"float", "bfloat16", "half", "type_as"})
LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Row:
    """One parameter."""

    name: str
    cosine: float
    """Between the model's gradient and the reference; 1 is best, NaN if one of them is zero."""
    norm: float
    """Norm of the model's gradient over the reference's."""
    lost: bool
    """The reference has a gradient, the model has none."""


def compare_gradients(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> tuple[Row, ...]:
    """One row per parameter inside patched modules, in the model's order. The model's gradients are cleared.

    Args:
        model: a patched model.
        loss: called with the model, gives the scalar to differentiate; must give the same on every call.
    """
    inside = {id(p) for m in model.modules() if hasattr(type(m), ORIGINAL) and not _around(m) for p in m.parameters()}
    model.zero_grad(set_to_none=True)
    loss(model).backward()  # type: ignore[no-untyped-call]
    found = {n: None if p.grad is None else p.grad.double() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    reference = Reference()
    with evaluated_by(reference):
        loss(model).backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    rows = []
    for name, p in model.named_parameters():
        want = reference.leaves[p].grad if p in reference.leaves else None
        if id(p) not in inside or want is None:
            continue
        got = found[name]
        if got is None or not bool(got.any()):
            rows.append(Row(name, float("nan"), 0.0, bool(want.any())))
            continue
        norms = float(got.norm()), float(want.norm())
        cosine = float((got * want).sum()) / (norms[0] * norms[1]) if norms[1] else float("nan")
        rows.append(Row(name, cosine, norms[0] / norms[1] if norms[1] else float("inf"), False))
    return tuple(rows)


def _around(module: nn.Module) -> bool:
    """Whether a module only watches over the patched modules in it."""
    return any(hasattr(type(m), ORIGINAL) for m in module.modules() if m is not module)


class _Round(torch.autograd.Function):
    """Round in FP64 storage; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype).to(torch.float64)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Reference:
    """Evaluates graphs in float64. Parameters get float64 leaves, whose `grad` is the reference gradient."""

    def __init__(self) -> None:
        self.leaves: dict[torch.Tensor, torch.Tensor] = {}

    def __call__(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        plain, wide = {}, {}
        inputs = iter(args)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                plain[node] = value = next(inputs)
                wide[node] = self._widen(value)
            elif node.op == "get_attr":
                plain[node] = value = operator.attrgetter(node.target)(gm)
                wide[node] = self._widen(value)
            elif node.op == "output":
                return fx.map_arg(node.args[0], lambda n: _narrowed(wide[n], plain[n]))
            else:
                with torch.no_grad():  # tells dtypes, and values that are no tensors
                    plain[node] = _run(gm, node, plain, wide=False)
                wide[node] = _rounded(_run(gm, node, wide, wide=True), plain[node])
        raise ValueError("a graph without an output")

    def _widen(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if isinstance(value, nn.Parameter):
            if value not in self.leaves:
                self.leaves[value] = value.detach().double().requires_grad_(value.requires_grad)
            return self.leaves[value]
        return value.double()


def _run(gm: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Any], *, wide: bool) -> Any:
    args: Any = fx.map_arg(node.args, env.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, env.__getitem__)
    if wide:
        args, kwargs = _double(args), _double(kwargs)
    if node.op == "call_method":
        name = str(node.target)
        return args[0].clone() if wide and name in _NARROW else getattr(args[0], name)(*args[1:], **kwargs)
    if node.op == "call_module":
        return gm.get_submodule(str(node.target))(*args, **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _double(a: Any) -> Any:
    """Arguments with every floating dtype named in them made float64."""
    if isinstance(a, torch.dtype) and a.is_floating_point:
        return torch.float64
    if isinstance(a, dict):
        return {k: _double(v) for k, v in a.items()}
    return type(a)(map(_double, a)) if type(a) in (tuple, list) else a


def _rounded(wide: Any, plain: Any) -> Any:
    if isinstance(wide, tuple | list):
        return [_rounded(w, p) for w, p in zip(wide, plain, strict=True)]
    if isinstance(wide, torch.Tensor) and wide.dtype == torch.float64 and plain.dtype in LOW:
        return _Round.apply(wide, plain.dtype)  # type: ignore[no-untyped-call]
    return wide


def _narrowed(wide: Any, plain: Any) -> Any:
    return wide.to(plain.dtype) if isinstance(wide, torch.Tensor) else wide
