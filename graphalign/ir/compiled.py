"""Module and source of ops that run inside a graph compiled by Dynamo with a pass-through backend.

A model patched by a Dynamo backend runs generated code (`<eval_with_key>`): no modeling frame is on the stack and no module hook fires.
Both are in the FX node's metadata instead. Inductor's kernels run no ATen ops and cannot be recorded.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from types import CodeType, FrameType
from typing import Any

from torch import fx

from graphalign.ir.frames import is_modeling_file
from graphalign.ir.training import Source

_ASSIGNED = re.compile(r"\s*(\w+)\s*(?::[^=]*)?=")
_WRITTEN = re.compile(r";\s*(\w+)\s*(?::[^=]*)?=")
"""After an in-place statement: `a[b] = c;  setitem = a`."""
STACK_FRAME = re.compile(
    r'  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n(?P<code>    .*)\n(?P<marks>[ ^~]*\^[ ^~]*)?'
)
"""A frame of the stack trace that Dynamo keeps of a node."""


class GeneratedCode:
    """FX nodes by frame, remembered per line of generated code."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[CodeType, int], fx.Node | None] = {}

    def node(self, frame: FrameType | None) -> fx.Node | None:
        """The FX node that runs in the innermost generated frame at or outside `frame`."""
        while frame is not None and not frame.f_code.co_filename.startswith("<eval_with_key>"):
            frame = frame.f_back
        if frame is None:
            return None
        key = (frame.f_code, frame.f_lineno)
        if key not in self._nodes:
            self._nodes[key] = _node_at(frame)
        return self._nodes[key]


def _node_at(frame: FrameType) -> fx.Node | None:
    """Generated code assigns each node to its own name, one per line; where a node writes into an operand, behind that statement."""
    module = frame.f_locals.get("self")
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
    match = _ASSIGNED.match(line) or _WRITTEN.search(line)
    if not isinstance(module, fx.GraphModule) or match is None:
        return None
    return next((n for n in module.graph.nodes if n.name == match[1]), None)


def module_ids(node: fx.Node) -> list[int]:
    """Ids of the modules a node was traced in, innermost first. Dynamo's keys are `str(id(module))` (torch 2.13)."""
    stack: dict[Any, Any] = node.meta.get("nn_module_stack") or {}
    return [int(k) for k in reversed(list(stack)) if isinstance(k, str) and k.isdecimal()]


def rebase(traced: str, running: str, names: frozenset[str]) -> str:
    """Where a node runs, given the module it was traced in and the innermost module whose hooks fired.

    Dynamo compiles one of several equal layers and runs the graph for all (parameters are its inputs, torch 2.13), so the metadata
    names the first: `model.layers.0.mlp` traced, `model.layers.7` running gives `model.layers.7.mlp`.
    """
    ours, theirs = running.split(".") if running else [], traced.split(".")
    if theirs[: len(ours)] == ours:
        return traced
    alike = all(a == b or (a.isdecimal() and b.isdecimal()) for a, b in zip(ours, theirs, strict=False))
    moved = ".".join([*ours, *theirs[len(ours) :]])
    return moved if alike and len(theirs) >= len(ours) and moved in names else running


def trace_source(node: fx.Node) -> tuple[str, Source] | None:
    """Absolute file and source of a node, from its stack trace's innermost entry in modeling code; the file in the source is left absolute.

    The trace marks the columns of the expression's first line only.
    """
    found = list(STACK_FRAME.finditer(str(node.meta.get("stack_trace") or "")))
    if not found:
        return None
    m = next((x for x in reversed(found) if is_modeling_file(x["file"])), found[-1])
    file, line = m["file"], int(m["line"])
    text = linecache.getline(file, line).rstrip("\n")
    indent = len(text) - len(text.lstrip())
    marks = m["marks"] or ""
    start = len(marks) - len(marks.lstrip()) - 4 if marks else 0
    length = len(marks.strip()) if marks else len(text.strip())
    column = len(text[: indent + start].encode())
    piece = text[indent + start : indent + start + length]
    return file, Source(
        file=file,
        function=qualified_name(file, line) or m["function"],
        line=line,
        column=column,
        end_line=line,
        end_column=column + len(piece.encode()),
        text=piece,
    )


def qualified_name(file: str, line: int) -> str:
    """Qualified name of the function around a line, as `co_qualname` spells it."""
    best = ""
    for first, last, name in _functions(file):
        if first <= line <= last:
            best = name  # outer functions come first
    return best


@functools.cache
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    out: list[tuple[int, int, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                out.append((child.lineno, child.end_lineno or child.lineno, prefix + child.name))
                inner = f"{prefix}{child.name}.<locals>."
            elif isinstance(child, ast.ClassDef):
                inner = f"{prefix}{child.name}."
            visit(child, inner)

    try:
        visit(ast.parse("".join(linecache.getlines(file))), "")
    except SyntaxError:
        return ()
    return tuple(out)
