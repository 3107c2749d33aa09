"""Rounding float64 to a low-precision format, in one step."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from graphalign.evaluate.values import draw, round_to, seed_of


def nearest_even(x: float, mantissa: int) -> float:
    """`x` rounded to `mantissa` bits after the leading one, ties to even, in exact arithmetic."""
    if x == 0 or not math.isfinite(x):
        return x
    scale = Fraction(2) ** (mantissa - math.frexp(x)[1] + 1)
    return float(Fraction(round(Fraction(x) * scale)) / scale)  # Python rounds fractions to even


@pytest.mark.parametrize(("dtype", "mantissa"), [("bfloat16", 7), ("float16", 10)])
def test_against_exact_arithmetic(dtype: str, mantissa: int) -> None:
    x = draw(seed_of("round"), torch.arange(3000)) * 3
    assert round_to(x, dtype).tolist() == [nearest_even(v, mantissa) for v in x.tolist()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_values_round_as_torch_does(dtype: str) -> None:
    x = (torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * 10).float()
    assert torch.equal(round_to(x.double(), dtype), x.to(getattr(torch, dtype)).double())


def test_ties_go_to_even() -> None:
    one, ulp = 1.0, 2.0**-7
    x = torch.tensor([one + ulp / 2, one + 3 * ulp / 2, -(one + ulp / 2), -(one + 3 * ulp / 2)], dtype=torch.float64)
    assert round_to(x, "bfloat16").tolist() == [one, one + 2 * ulp, -one, -(one + 2 * ulp)]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_no_double_rounding(sign: float) -> None:
    """A value just beside a tie rounds to float32's tie first, and then to even: the wrong way."""
    tie = 1 + 2.0**-8
    for nudge, right in ((2.0**-40, 1 + 2.0**-7), (-(2.0**-40), 1.0)):
        x = torch.tensor([sign * (tie + nudge)], dtype=torch.float64)
        assert x.float().double() == sign * tie, "the naive way loses the nudge"
        assert round_to(x, "bfloat16").item() == sign * right


def test_special_values() -> None:
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e300, -1e300], dtype=torch.float64)
    got = round_to(x, "bfloat16")
    assert got[:4].tolist() == [0.0, 0.0, math.inf, -math.inf]
    assert math.isnan(got[4])
    assert got[5:].tolist() == [math.inf, -math.inf]
    assert torch.equal(got[:2].signbit(), torch.tensor([False, True]))


def test_rounding_twice_is_rounding_once() -> None:
    x = draw(seed_of("twice"), torch.arange(500))
    assert torch.equal(round_to(round_to(x, "bfloat16"), "bfloat16"), round_to(x, "bfloat16"))
