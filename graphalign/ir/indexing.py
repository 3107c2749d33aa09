"""A closed parser for the size and index expressions in captures.

Captures come from other machines, so an expression is never handed to `eval` or sympy. Python's `ast` only
*parses* here; the tree is then translated node by node, and anything not listed is refused.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphalign.errors import CaptureFileError

MAX_LENGTH = 4096
"""Longest expression accepted, in characters."""

Number = Any
"""int, float, bool or an integer tensor that broadcasts over the loop."""
Env = Mapping[str, Number]
Compiled = Callable[[Env], Number]


def _bounded(x: Number) -> Number:
    """`x`, unless it is a number that no index can be: nested powers would grow without end."""
    if isinstance(x, int | float) and not abs(x) < 2**63:
        raise OverflowError("a number of more than 63 bits")
    return x


def _floordiv(a: Number, b: Number) -> Number:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.div(a, b, rounding_mode="floor")
    return a // b


def _choose(c: Number, a: Number, b: Number) -> Number:
    if isinstance(c, torch.Tensor):
        return torch.where(c, a, b)
    return a if c else b


def _extreme(pick: Callable[..., Any], tensor_pick: Callable[..., Any]) -> Callable[..., Number]:
    def apply(*xs: Number) -> Number:
        if not any(isinstance(x, torch.Tensor) for x in xs):
            return pick(xs)
        return functools.reduce(tensor_pick, [torch.as_tensor(x) for x in xs])

    return apply


_CALLS: dict[str, Callable[..., Number]] = {
    "FloorDiv": _floordiv,
    "CleanDiv": _floordiv,
    "IntTrueDiv": lambda a, b: a / b,
    "CeilDiv": lambda a, b: -_floordiv(-a, b),
    "ModularIndexing": lambda x, d, m: _floordiv(x, d) % m,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "Min": _extreme(min, torch.minimum),
    "Max": _extreme(max, torch.maximum),
    "Where": _choose,
    "Identity": lambda x: x,
    "Abs": abs,
}
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: _floordiv,
    ast.Div: lambda a, b: a / b,
    ast.Mod: lambda a, b: a % b,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Number, Number], Number]] = {
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
}


@functools.lru_cache(maxsize=65536)
def parse(text: str) -> Compiled:
    """Translate an expression into a function of its symbols.

    Args:
        text: an expression as sympy prints it, `128*p0 + ModularIndexing(p1, 4, 32)`.

    Returns:
        A function from an environment (symbol to int or integer tensor) to the value.

    Raises:
        CaptureFileError: not an expression of the closed language, or too long.
    """
    if len(text) > MAX_LENGTH:
        raise CaptureFileError("an index expression is too long", where=text[:80] + "…")
    try:
        tree = ast.parse(text, mode="eval").body
        return _translate(tree, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _refuse(text) from None


def evaluate(text: str, env: Env) -> Number:
    """The value of an expression; `CaptureFileError` if a symbol is unbound or it divides by zero."""
    try:
        return parse(text)(env)
    except KeyError as e:
        raise CaptureFileError(f"unbound symbol {e.args[0]} in an index expression", where=text[:200]) from None
    except (ZeroDivisionError, OverflowError, RuntimeError, TypeError) as e:
        raise CaptureFileError(f"an index expression cannot be evaluated: {e}", where=text[:200]) from None


def _refuse(text: str) -> CaptureFileError:
    return CaptureFileError(
        "a capture holds an index expression outside the closed language", where=text[:200], hint="capture it again; do not trust this file"
    )


def _translate(node: ast.expr, text: str) -> Compiled:
    match node:
        case ast.Constant(value=value) if isinstance(value, int | float) and abs(value) < 2**62:
            return lambda env: value
        case ast.Name(id=name):
            return lambda env: env[name]
        case ast.UnaryOp(op=ast.USub(), operand=x):
            f = _translate(x, text)
            return lambda env: -f(env)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(n))) if 0 <= n <= 4:
            f = _translate(left, text)
            return lambda env: _bounded(f(env) ** n)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            f, g, h = _translate(left, text), _translate(right, text), _BINARY[type(op)]
            return lambda env: _bounded(h(f(env), g(env)))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            f, g, c = _translate(left, text), _translate(right, text), _COMPARE[type(op)]
            return lambda env: c(f(env), g(env))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            fs, call = [_translate(a, text) for a in args], _CALLS[name]
            return lambda env: call(*[f(env) for f in fs])
    raise _refuse(text)
