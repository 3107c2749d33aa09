"""The closed parser against sympy, which prints the expressions that captures hold."""

from __future__ import annotations

import itertools

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import CleanDiv, FloorDiv, ModularIndexing

from graphalign.errors import CaptureFileError
from graphalign.ir.indexing import evaluate, parse

P = sympy.symbols("p0 p1 s72", integer=True, nonnegative=True)
LEAVES = st.one_of(st.sampled_from(P), st.integers(0, 300).map(sympy.Integer))


def combine(inner: st.SearchStrategy[sympy.Expr]) -> st.SearchStrategy[sympy.Expr]:
    small = st.sampled_from([1, 2, 3, 8, 32])
    return st.one_of(
        st.tuples(inner, inner).map(lambda x: x[0] + x[1]),
        st.tuples(inner, small).map(lambda x: x[0] * x[1]),
        st.tuples(inner, small).map(lambda x: FloorDiv(x[0], x[1])),
        st.tuples(inner, small, small).map(lambda x: ModularIndexing(x[0], x[1], x[2])),
        st.tuples(inner, inner).map(lambda x: sympy.Min(*x)),
        st.tuples(inner, inner).map(lambda x: sympy.Max(*x)),
    )


@settings(max_examples=60)
@given(st.recursive(LEAVES, combine, max_leaves=6))
def test_printed_expressions_evaluate_as_sympy_does(expression: sympy.Expr) -> None:
    for values in itertools.product((0, 1, 7), (3, 31), (5,)):
        env = dict(zip(("p0", "p1", "s72"), values, strict=True))
        assert evaluate(str(expression), env) == int(expression.subs(dict(zip(P, values, strict=True))))


def test_tensors_broadcast_over_the_loop() -> None:
    p0, p1 = torch.arange(4).view(4, 1), torch.arange(6).view(1, 6)
    flat = evaluate("6*p0 + p1", {"p0": p0, "p1": p1})
    assert torch.equal(flat, torch.arange(24).view(4, 6))
    back = evaluate("ModularIndexing(x, 1, 6)", {"x": flat})
    assert torch.equal(back, p1.expand(4, 6))
    assert torch.equal(evaluate("(x//6)", {"x": flat}), p0.expand(4, 6))
    assert torch.equal(evaluate("Where(x < 3, x, -x)", {"x": p1}), torch.tensor([[0, 1, 2, -3, -4, -5]]))


def test_division_rounds_down_like_python() -> None:
    for x in (-7, 7):
        assert evaluate("x//2", {"x": x}) == evaluate("FloorDiv(x, 2)", {"x": torch.tensor(x)}) == x // 2
        assert evaluate("CeilDiv(x, 2)", {"x": x}) == -(-x // 2)


def test_printing_of_torch_functions_is_understood() -> None:
    assert str(CleanDiv(P[0] * 8, 8)) is not None
    assert evaluate(str(CleanDiv(P[2], 4)), {"s72": 12}) == 3


@pytest.mark.parametrize(
    "text",
    ["", "a b", "f(x)", "x.y", "x[0]", "[x]", "'x'", "x if y else z", "lambda: 0", "x and y", "1 < x < 2", "x**y", "x**5", "x**-1",
     "Min(x, key=y)", "Min(*x)", "x := 1", "2**2**99", "10**30", "f'{x}'", "x @ y", "~x", "None"],
)  # fmt: skip
def test_the_language_is_closed(text: str) -> None:
    with pytest.raises(CaptureFileError):
        parse(text)


@pytest.mark.parametrize("text", ["x", "1//0", "1 % 0", "1/0", "FloorDiv(1)", "ModularIndexing(1, 0, 3)", "((9**4)**4)**4*((9**4)**4)**4"])
def test_what_cannot_be_evaluated_is_an_error_of_the_capture(text: str) -> None:
    with pytest.raises(CaptureFileError):
        evaluate(text, {})
