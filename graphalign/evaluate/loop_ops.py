"""What the operations of Inductor's loop bodies compute, in float64: a closed table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def _t(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=torch.float64 if isinstance(x, float) else None)


def _truncdiv(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _floordiv(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="floor")


def _pow(a: Tensor, b: Tensor) -> Tensor:
    return torch.pow(a.double() if a.is_floating_point() else a, b)


OPS: dict[str, Callable[..., Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in [
            "abs",
            "exp",
            "exp2",
            "expm1",
            "log",
            "log2",
            "log10",
            "log1p",
            "sqrt",
            "rsqrt",
            "sin",
            "cos",
            "tan",
            "sinh",
            "cosh",
            "tanh",
            "asin",
            "acos",
            "atan",
            "asinh",
            "acosh",
            "atanh",
            "sigmoid",
            "erf",
            "erfc",
            "floor",
            "ceil",
            "round",
            "trunc",
            "reciprocal",
            "relu",
            "sign",
            "signbit",
            "isnan",
            "isinf",
            "logical_not",
            "logical_and",
            "logical_or",
            "logical_xor",
            "bitwise_not",
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
            "add",
            "sub",
            "mul",
            "maximum",
            "minimum",
            "remainder",
            "fmod",
            "atan2",
            "hypot",
            "copysign",
            "nextafter",
            "lt",
            "le",
            "gt",
            "ge",
            "eq",
            "ne",
            "square",
            "neg",
            "lgamma",
            "digamma",
            "erfinv",
            "where",
        ]
    },
    "truediv": torch.true_divide,
    "div": torch.true_divide,
    "truncdiv": _truncdiv,
    "int_truediv": torch.true_divide,
    "div_rn": torch.true_divide,
    "floordiv": _floordiv,
    "mod": torch.fmod,
    "pow": _pow,
    "ldexp": torch.ldexp,
    "fma": lambda a, b, c: a * b + c,
    "muladd": lambda a, b, c: a * b + c,
    "bitwise_left_shift": torch.bitwise_left_shift,
    "bitwise_right_shift": torch.bitwise_right_shift,
    "identity": lambda x: x,
    "and_": torch.logical_and,
    "or_": torch.logical_or,
    "xor": torch.bitwise_xor,
    "invert": torch.bitwise_not,
}


def apply(target: str, args: list[Any]) -> Tensor | None:
    """The result of a pointwise op on broadcasting tensors, or None if the op isn't in the table."""
    f = OPS.get(target.removeprefix("libdevice_"))
    if f is None:
        return None
    return f(*[_t(a) for a in args])


def reduce(kind: str, x: Tensor, dims: tuple[int, ...]) -> Tensor | tuple[Tensor, ...] | None:
    """A reduction over `dims`, kept as size-1 dimensions; None if the kind is not known."""
    match kind:
        case "sum":
            return x.sum(dims, keepdim=True)
        case "prod":
            for d in dims:
                x = x.prod(d, keepdim=True)
            return x
        case "max" | "min":
            return x.amax(dims, keepdim=True) if kind == "max" else x.amin(dims, keepdim=True)
        case "any":
            return x.bool().any(dims[0], keepdim=True) if len(dims) == 1 else (x != 0).sum(dims, keepdim=True) > 0
        case "xor_sum":
            return None
        case "argmax" | "argmin" if len(dims) == 1:
            return (x.argmax if kind == "argmax" else x.argmin)(dims[0], keepdim=True)
        case "welford_reduce":
            mean = x.mean(dims, keepdim=True)
            n = torch.tensor(float(torch.tensor([x.shape[d] for d in dims]).prod()))
            return mean, ((x - mean) ** 2).sum(dims, keepdim=True), n.expand_as(mean).double()
        case "online_softmax_reduce":
            top = x.amax(dims, keepdim=True)
            return top, (x - top).exp().sum(dims, keepdim=True)
    return None


def reduce_pairs(kind: str, top: Tensor, total: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, ...] | None:
    """A reduction of partial results, as Inductor splits one over a large dimension; None if the kind is not known.

    Args:
        kind: of the reduction.
        top: maxima of the parts.
        total: sums of exp(x - maximum) over the parts; -inf with 0 for an element that is masked out.
        dims: kept as size-1 dimensions.
    """
    if kind != "online_softmax_reduce":
        return None
    most = top.amax(dims, keepdim=True)
    return most, torch.where(total == 0, 0.0, total * (top - most).exp()).sum(dims, keepdim=True)
