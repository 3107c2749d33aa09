"""A line in every layer that raises where a trainer rounds the layer's FP32 input on its way in.

FSDP2's default `cast_forward_inputs=True` casts floating inputs of every wrapped layer to the low format (torch 2.13): the residual
stream would be rounded between layers again, without a word. Where a layer does not know its number and the inputs of some layers are
rounded, there is no such line.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn

from graphalign.ir.paths import layer_of, unit_of
from graphalign.source.flow import Flow
from graphalign.source.plan import Layers
from graphalign.source.spans import Spans
from graphalign.source.watch import Seen

CALL = "_expect_unrounded"
"""Name of the function that checks an input; it stands in the generated file."""
FUNCTION = f'''

def {CALL}(x, wanted, name):
    """Raise if a layer's input, which has to arrive in FP32, was rounded on its way in."""
    if wanted and x.dtype != torch.float32:
        raise RuntimeError(
            f"{{name}} has to arrive in FP32 and arrived as {{x.dtype}}: something casts the inputs of layers. "
            "For FSDP2 give each layer MixedPrecisionPolicy(cast_forward_inputs=False)."
        )
'''


def wide_inputs(model: nn.Module) -> set[str]:
    """The modules whose first input arrives in FP32, in one forward of the model as it stands."""
    wide: set[str] = set()

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            first = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(first, torch.Tensor) and first.dtype == torch.float32:
                wide.add(name)

        return hook

    inside = [(n, m) for n, m in model.named_modules() if layer_of(n) is not None and unit_of(n) == n]
    handles = [m.register_forward_pre_hook(look(n), with_kwargs=True) for n, m in inside]
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(8)[None] + 3, use_cache=False)
    finally:
        for h in handles:
            h.remove()
    return wide


def find_guards(flow: Flow, spans: Spans, inputs: set[str]) -> dict[int, tuple[Layers, Layers]]:
    """Span of the first read of a layer's first argument to (layers where it is FP32 in the generated code, all layers).

    `inputs`: what `wide_inputs` finds in the generated model.
    """
    wide: dict[int, set[int | None]] = defaultdict(set)
    every: dict[int, set[int | None]] = defaultdict(set)
    entered: set[str] = set()
    for e in flow.events:
        if not isinstance(e, Seen) or e.value < 0 or e.module in entered or layer_of(e.module) is None or unit_of(e.module) != e.module:
            continue
        node = spans.nodes[e.span]
        if not isinstance(node, ast.Name) or node.id != first_argument(spans, e.span):
            continue
        entered.add(e.module)
        every[e.span].add(layer_of(e.module))
        if flow.low(e.value) and e.module in inputs:
            wide[e.span].add(layer_of(e.module))
    return {s: (frozenset(found), frozenset(every[s])) for s, found in wide.items()}


def first_argument(spans: Spans, span: int) -> str:
    """The first parameter behind `self` of the function that a span is in."""
    f = function_of(spans, span)
    return f.args.args[1].arg if f is not None and len(f.args.args) > 1 else ""


def function_of(spans: Spans, span: int) -> ast.FunctionDef | None:
    """The function that a span is in."""
    n: ast.AST | None = spans.parent(span)
    while n is not None and not isinstance(n, ast.FunctionDef):
        n = spans.around(n)
    return n


def guard(spans: Spans, span: int, layers: Layers, every: Layers, index: Callable[[Layers], str]) -> tuple[int, str]:
    """(line before which it stands, the statement)."""
    f = function_of(spans, span)
    assert f is not None
    body = f.body[1:] if isinstance(f.body[0], ast.Expr) and isinstance(f.body[0].value, ast.Constant) and len(f.body) > 1 else f.body
    condition = "True" if layers == every else index(layers)
    name = first_argument(spans, span)
    return body[0].lineno, f'{" " * body[0].col_offset}{CALL}({name}, {condition}, "{name}")'
