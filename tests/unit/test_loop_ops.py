"""What loop ops compute, against torch."""

from __future__ import annotations

import math

import pytest
import torch

from graphalign.evaluate.loop_ops import OPS, apply, reduce

X = torch.tensor([-2.5, -1.0, 0.0, 0.5, 3.25], dtype=torch.float64)
POSITIVE = X.abs() + 0.5


def test_unary_ops_are_torch_s() -> None:
    for name in ("exp", "tanh", "sigmoid", "erf", "floor", "abs", "neg", "square", "relu", "sign", "expm1", "cos"):
        assert torch.equal(apply(name, [X]), getattr(torch, name)(X)), name
    for name in ("log", "sqrt", "rsqrt", "reciprocal", "log1p", "log2"):
        assert torch.equal(apply(name, [POSITIVE]), getattr(torch, name)(POSITIVE)), name


def test_numbers_and_tensors_mix() -> None:
    assert torch.equal(apply("mul", [X, 2.0]), X * 2)
    assert torch.equal(apply("where", [X > 0, X, 0.0]), X.clamp(min=0))
    assert torch.equal(apply("truediv", [X, 4]), X / 4)
    assert torch.equal(apply("fma", [X, 2.0, 1.0]), X * 2 + 1)


def test_divisions_round_as_their_names_say() -> None:
    a, b = torch.tensor([-7, 7]), torch.tensor([2, 2])
    assert apply("floordiv", [a, b]).tolist() == [-4, 3]
    assert apply("truncdiv", [a, b]).tolist() == [-3, 3]
    assert apply("mod", [a, b]).tolist() == [-1, 1], "C's remainder"
    assert apply("remainder", [a, b]).tolist() == [1, 1], "Python's"


def test_unknown_ops_are_not_guessed() -> None:
    assert apply("inline_asm", [X]) is None
    assert apply("__class__", [X]) is None
    assert torch.equal(apply("libdevice_tanh", [X]), X.tanh())
    assert all(callable(f) for f in OPS.values())


@pytest.mark.parametrize("dims", [(1,), (0,), (0, 1)])
def test_reductions(dims: tuple[int, ...]) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(reduce("sum", x, dims), x.sum(dims, keepdim=True))
    assert torch.equal(reduce("max", x, dims), x.amax(dims, keepdim=True))
    assert torch.equal(reduce("min", x, dims), x.amin(dims, keepdim=True))
    product = reduce("prod", x, dims)
    assert math.isclose(float(product.prod()), float(x.prod()), rel_tol=1e-12)
    assert bool(reduce("any", x > 10, dims).any()) is False
    mean, m2, weight = reduce("welford_reduce", x, dims)
    assert torch.allclose(mean, x.mean(dims, keepdim=True))
    assert torch.allclose(m2 / weight, x.var(dims, correction=0, keepdim=True))
    top, total = reduce("online_softmax_reduce", x, dims)
    assert torch.allclose(top + total.log(), x.logsumexp(dims, keepdim=True))


def test_unknown_reductions_are_not_guessed() -> None:
    assert reduce("xor_sum", X.view(1, -1), (1,)) is None
    assert reduce("argmax", X.view(1, -1), (0, 1)) is None
    assert reduce("argmax", X.view(1, -1), (1,)).item() == 4
