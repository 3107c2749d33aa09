"""Ops that take one of two sides in each element (clamps, `where`, `max`), and whether the chosen inputs make them take both.

A clamp that never fires is the identity on these inputs: nothing that compares values can see it, or its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphalign.evaluate.aten import base
from graphalign.ir.training import Node

COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
GUARDS = frozenset({"isnan", "isinf", "isfinite", "isposinf", "isneginf"})
MASKS = frozenset({"logical_not", "logical_and", "logical_or", "logical_xor", "bitwise_not", "bitwise_and", "bitwise_or", "and_", "or_"})
PAIR = 2
_SATURATES = 3.0
"""Where `hardswish` and `hardsigmoid` become straight."""
_SOFTPLUS = 20.0
"""torch's default threshold."""


@dataclass(frozen=True)
class Pick:
    """An op that took one side only."""

    limit: float | None
    """What its operand is compared with and never passes; None if that is no number."""
    size: float
    """Median magnitude of what is compared."""
    what: str
    """In words."""


def one_sided(x: torch.Tensor, low: float | None, high: float | None) -> Pick | None:
    """Whether elements stay on one side of a lower or an upper limit, both, or always pass it."""
    if not x.is_floating_point() or not x.numel():
        return None
    for limit, passed, side in (
        (low, x < low if low is not None else None, "below"),
        (high, x > high if high is not None else None, "above"),
    ):
        if limit is None or passed is None or (bool(passed.any()) and not bool(passed.all())):
            continue
        always = bool(passed.any())
        return Pick(limit, _size(x), f"every value is {side} {limit:g}" if always else f"no value is {side} {limit:g}")
    return None


def chosen(mask: torch.Tensor, compared: tuple[float | None, float] = (None, 0.0)) -> Pick | None:
    """Whether a condition is the same for all elements."""
    if not mask.numel() or (bool(mask.any()) and not bool(mask.bool().all())):
        return None
    words = "its condition is true for every value" if bool(mask.any()) else "its condition is true for no value"
    return Pick(*compared, words)


def of_two(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Pick | None:
    """Whether a maximum or minimum is always the same one of its operands."""
    if not result.is_floating_point() or not result.numel():
        return None
    first, second = bool((result == a).all()), bool((result == b).all())
    if first == second:
        return None
    limit, moving = (_uniform(b), a) if _uniform(b) is not None else (_uniform(a), b)
    if limit is None or _uniform(moving) is not None:
        return Pick(None, _size(moving), "it always takes the same operand")
    always = first == (moving is b)
    return Pick(limit, _size(moving), f"every value passes {limit:g}" if always else f"no value passes {limit:g}")


def _uniform(x: torch.Tensor) -> float | None:
    """The number that all elements are."""
    return float(x.reshape(-1)[0]) if x.numel() and bool((x == x.reshape(-1)[0]).all()) else None


def of_node(node: Node, data: Sequence[torch.Tensor], result: torch.Tensor) -> Pick | None:
    """A recorded ATen op that took one side only, given its operands; None for other ops and for those that took both."""
    name = base(node.op)
    x = data[0] if data else result
    numbers = [number(a) for a in node.args[1:]]

    def at(i: int, key: str, default: float | None = None) -> float | None:
        given = numbers[i] if i < len(numbers) else number(node.kwargs.get(key))
        return default if given is None else given

    match name:
        case "clamp":
            if len(data) > 1:
                return of_two(result, x, data[1]) if len(data) == PAIR else None
            return one_sided(x, at(0, "min"), at(1, "max"))
        case "clamp_min" | "clamp_max" if len(data) == 1:
            limit = at(0, "min" if name.startswith("clamp_min") else "max")
            return one_sided(x, limit, None) if name.startswith("clamp_min") else one_sided(x, None, limit)
        case "hardtanh":
            return one_sided(x, at(0, "min_val", -1.0), at(1, "max_val", 1.0))
        case "relu6":
            return one_sided(x, 0.0, 6.0)
        case "relu" | "abs":
            return one_sided(x, 0.0, None)
        case "threshold":
            return one_sided(x, at(0, "threshold", 0.0), None)
        case "hardswish" | "hardsigmoid":
            return one_sided(x, -_SATURATES, _SATURATES)
        case "softplus":
            return one_sided(x, None, (at(1, "threshold", _SOFTPLUS) or _SOFTPLUS) / (at(0, "beta", 1.0) or 1.0))
        case "nan_to_num":
            return None if bool((~x.isfinite()).any()) else Pick(None, _size(x), "every value is finite")
        case "maximum" | "minimum" | "fmax" | "fmin" | "max" | "min" | "clamp_min" | "clamp_max" if len(data) == PAIR:
            return of_two(result, x, data[1])
    return None


class Conditions:
    """What the conditions of a loop body compare; a condition on positions or sizes is none on data."""

    def __init__(self) -> None:
        self.compared: dict[int, tuple[float | None, float]] = {}
        """Identity of a mask to the limit and the median magnitude of what it compares."""

    def see(self, target: str, operands: Sequence[Any], result: torch.Tensor) -> Pick | None:
        """Look at one evaluated op. Tensors must stay alive as long as this object."""
        tensors = [o for o in operands if isinstance(o, torch.Tensor)]
        floats = [o for o in tensors if o.is_floating_point()]
        if target in COMPARISONS | GUARDS and any(o.numel() > 1 for o in floats):
            moving = max(floats, key=lambda o: o.numel())
            limits = [float(o.reshape(-1)[0]) for o in floats if o is not moving and o.numel() == 1]
            self.compared[id(result)] = (limits[0] if limits else None, _size(moving))
        elif target in MASKS and (known := [self.compared[id(o)] for o in tensors if id(o) in self.compared]):
            self.compared[id(result)] = known[0]
        elif target == "where" and len(tensors) == 1 + PAIR and id(tensors[0]) in self.compared:
            return chosen(tensors[0], self.compared[id(tensors[0])])
        elif target in ("maximum", "minimum") and len(floats) == PAIR:
            found = of_two(result, *floats)  # of two computed values: a running maximum, as of a softmax
            return found if found is not None and found.limit is not None else None
        elif target in ("relu", "abs") and floats:
            return one_sided(floats[0], 0.0, None)
        return None


def number(a: Any) -> float | None:
    if isinstance(a, dict) and "f" in a:
        return float(a["f"])
    return float(a) if isinstance(a, int | float) and not isinstance(a, bool) else None


def _size(x: torch.Tensor) -> float:
    known = x.detach().abs().reshape(-1)
    known = known[known.isfinite()]
    return float(known.median()) if known.numel() else 0.0
