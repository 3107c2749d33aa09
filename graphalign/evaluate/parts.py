"""Fused training ops taken apart: the steps that one ATen op stands for, each of which reads its operands for itself.

An engine's kernel may read the op's input unrounded for one of them and rounded for another: a LayerNorm whose statistics are computed in
the loop that makes the input, and whose result in the next, which reloads it. Edges into the steps are then finer than edges into the op.
Both the alignment (on captured ops) and the rewriter (on a Dynamo graph) put these steps in the op's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphalign.evaluate.aten import base

SEPARATOR = ":"
"""Between an op and a step of it, as in `native_layer_norm:mean`."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a fused op."""

    name: str
    """What it makes, in a word that a reviewer understands."""
    op: str
    """ATen overload."""
    args: tuple[Any, ...]
    """Arguments; a text is the name of an operand or of an earlier step."""


@dataclass(frozen=True, slots=True)
class Fused:
    """One call of a fused op, taken apart."""

    operands: tuple[str, ...]
    """Names of its tensor operands, in argument order; all are read in FP32."""
    steps: tuple[Step, ...]
    """In order; the last one makes the op's first result, before it is rounded."""


@dataclass(frozen=True, slots=True)
class Made:
    """What makes a value of an op that was taken apart."""

    op: str
    """The op."""
    step: str
    """The step of it."""
    last: bool
    """Whether the value is the op's result."""

    @property
    def name(self) -> str:
        """`aten.native_layer_norm.default:mean`."""
        return f"{self.op}{SEPARATOR}{self.step}"


def key_name(op: str) -> str:
    """An op as keys have it, without namespace and overload: `mul`, `native_layer_norm:mean`."""
    whole, colon, step = op.partition(SEPARATOR)
    return f"{base(whole)}{colon}{step}"


def step_words(op: str, words: str) -> str:
    """Words for an op, with the step if it is one: `ln_2(x): mean`."""
    step = op.partition(SEPARATOR)[2]
    return f"{words}: {step.replace('_', ' ')}" if step else words


def take_apart(op: str, args: Sequence[Any], is_tensor: Any) -> Fused | None:
    """The steps of a call.

    Args:
        op: ATen overload, `aten.native_layer_norm.default`.
        args: positional arguments; absent ones at the end may be missing.
        is_tensor: tells which of them are tensors.

    Returns:
        The steps, or None if the op is not known or has an argument that this does not cover.
    """
    given = list(args)

    def tensor(n: int) -> bool:
        return n < len(given) and is_tensor(given[n])

    match base(op):
        case "native_layer_norm" if len(given) == 5 and isinstance(given[4], int | float):
            return _layer_norm(-len(given[1]), tensor(2), tensor(3), float(given[4]))
        case "_fused_rms_norm" if len(given) == 4 and isinstance(given[3], int | float):
            return _rms_norm(-len(given[1]), tensor(2), float(given[3]))
        case "_softmax" | "softmax" | "_safe_softmax" if len(given) >= 2 and isinstance(given[1], int):
            return _softmax(given[1]) if base(op) != "_safe_softmax" else None
    return None


def _layer_norm(first: int, weight: bool, bias: bool, epsilon: float) -> Fused:
    """(x − mean) / sqrt(variance + ε) · weight + bias, in two passes as Inductor's CPU loops and eager's kernel have it."""
    dims = list(range(first, 0))
    steps = [
        Step("mean", "aten.mean.dim", ("input", dims, True)),
        Step("deviation", "aten.sub.Tensor", ("input", "mean")),
        Step("square", "aten.pow.Tensor_Scalar", ("deviation", 2)),
        Step("variance", "aten.mean.dim", ("square", dims, True)),
        Step("plus_epsilon", "aten.add.Tensor", ("variance", epsilon)),
        Step("rsqrt", "aten.rsqrt.default", ("plus_epsilon",)),
        Step("centred", "aten.sub.Tensor", ("input", "mean")),
        Step("normalised", "aten.mul.Tensor", ("centred", "rsqrt")),
    ]
    return _affine(steps, weight, bias)


def _rms_norm(first: int, weight: bool, epsilon: float) -> Fused:
    """x / sqrt(mean of squares + ε) · weight."""
    steps = [
        Step("square", "aten.pow.Tensor_Scalar", ("input", 2)),
        Step("mean_square", "aten.mean.dim", ("square", list(range(first, 0)), True)),
        Step("plus_epsilon", "aten.add.Tensor", ("mean_square", epsilon)),
        Step("rsqrt", "aten.rsqrt.default", ("plus_epsilon",)),
        Step("normalised", "aten.mul.Tensor", ("input", "rsqrt")),
    ]
    return _affine(steps, weight, bias=False)


def _affine(steps: list[Step], weight: bool, bias: bool) -> Fused:
    if weight:
        steps.append(Step("weighted", "aten.mul.Tensor", (steps[-1].name, "weight")))
    if bias:
        steps.append(Step("shifted", "aten.add.Tensor", (steps[-1].name, "bias")))
    return Fused(("input", *["weight"] * weight, *["bias"] * bias), tuple(steps))


def _softmax(dim: int) -> Fused:
    """exp(x − max) / sum of these."""
    steps = (
        Step("maximum", "aten.amax.default", ("input", [dim], True)),
        Step("below_maximum", "aten.sub.Tensor", ("input", "maximum")),
        Step("exp", "aten.exp.default", ("below_maximum",)),
        Step("sum", "aten.sum.dim_IntList", ("exp", [dim], True)),
        Step("quotient", "aten.div.Tensor", ("exp", "sum")),
    )
    return Fused(("input",), steps)
