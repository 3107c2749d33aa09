"""Makes every expression of a modeling file report what it yields."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, field
from typing import Any

RECORD = "graphalign_record_"
"""Name of the function that instrumented code calls with (span, value)."""
Place = tuple[int, int, int, int, str]


def place(node: ast.AST) -> Place:
    """Where a node lies in its file, and its type: (line, column, end line, end column), columns in bytes."""
    a: Any = node
    return (
        getattr(a, "lineno", 0),
        getattr(a, "col_offset", 0),
        getattr(a, "end_lineno", 0),
        getattr(a, "end_col_offset", 0),
        type(a).__name__,
    )


@dataclass
class Spans:
    """Expressions of a file, numbered."""

    text: str
    nodes: dict[int, ast.expr] = field(default_factory=dict)
    parents: dict[Place, ast.AST] = field(default_factory=dict)
    functions: dict[int, str] = field(default_factory=dict)
    """Span to the qualified name of its function."""
    code: Any = None
    """The instrumented file, compiled."""

    def __post_init__(self) -> None:
        tree = ast.parse(self.text)
        for n in ast.walk(tree):
            for child in ast.iter_child_nodes(n):
                self.parents[place(child)] = n
        instrumented = ast.fix_missing_locations(_Instrument(self).visit(tree))
        self.code = compile(instrumented, instrumented_file(self.text), "exec", dont_inherit=True)
        self.by_place = {place(n): i for i, n in self.nodes.items()}

    def parent(self, span: int) -> ast.AST | None:
        """The node around a span's expression."""
        return self.parents.get(place(self.nodes[span]))

    def around(self, node: ast.AST) -> ast.AST | None:
        """The node around a node of the file."""
        return self.parents.get(place(node))

    def call_around(self, span: int) -> int | None:
        """The call whose argument a span is."""
        p = self.parent(span)
        if isinstance(p, ast.keyword):
            p = self.parents.get(place(p))
        return self.by_place.get(place(p)) if isinstance(p, ast.Call) else None

    def read_for(self, span: int) -> str:
        """The attribute that is read of the expression's value: `x` in `x.dtype` is read for its dtype."""
        p = self.parent(span)
        if self.taken_as(span) is not None:
            return "dtype"
        return p.attr if isinstance(p, ast.Attribute) else ""

    def taken_as(self, span: int) -> ast.Call | None:
        """The call `y.type_as(x)` whose `x` a span is: it reads no more of it than its dtype."""
        p = self.parent(span)
        named = isinstance(p, ast.Call) and isinstance(p.func, ast.Attribute) and p.func.attr == "type_as"
        return p if isinstance(p, ast.Call) and named and self.nodes[span] is not p else None

    def show(self, span: int) -> str:
        """Line and text, for messages."""
        n = self.nodes[span]
        return f"line {n.lineno}: {' '.join((ast.get_source_segment(self.text, n) or '').split())}"


def instrumented_file(text: str) -> str:
    """File name that instrumented code carries."""
    return f"/graphalign-instrumented/{abs(hash(text))}.py"


class _Instrument(ast.NodeTransformer):
    """Wraps expressions inside functions; decorators, defaults, annotations and targets stay."""

    def __init__(self, spans: Spans) -> None:
        self.spans = spans
        self.path: list[str] = []
        self.inside = 0

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.path.append(node.name)
        node.body = [self.visit(x) for x in node.body]
        self.path.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.path.append(node.name)
        self.inside += 1
        node.body = [self.visit(x) for x in node.body]
        self.inside -= 1
        self.path.pop()
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None and self.inside:
            node.value = self.visit(node.value)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not self.inside:
            return node
        original = copy.deepcopy(node)
        if isinstance(node.func, ast.Attribute):
            if not (isinstance(node.func.value, ast.Call) and getattr(node.func.value.func, "id", "") == "super"):
                node.func.value = self.visit(node.func.value)
        elif not isinstance(node.func, ast.Name):
            node.func = self.visit(node.func)
        if getattr(node.func, "id", "") != "super":
            node.args = [self.visit(a) for a in node.args]
            node.keywords = [ast.copy_location(ast.keyword(k.arg, self.visit(k.value)), k) for k in node.keywords]
            return self._wrap(node, original)
        return node

    def _leaf(self, node: Any) -> ast.AST:
        if not self.inside:
            return node  # type: ignore[no-any-return]
        original = copy.deepcopy(node)
        return self._wrap(super().generic_visit(node), original)

    visit_BinOp = visit_UnaryOp = visit_IfExp = _leaf

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if not self.inside or not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node) if self.inside else node
        original = copy.deepcopy(node)
        node.value = self.visit(node.value)
        return self._wrap(node, original)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if not self.inside or not isinstance(node.ctx, ast.Load):
            return node
        original = copy.deepcopy(node)
        node.value = self.visit(node.value)
        return self._wrap(node, original)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._wrap(node, copy.deepcopy(node)) if self.inside and isinstance(node.ctx, ast.Load) else node

    def visit_Starred(self, node: ast.Starred) -> ast.AST:
        node.value = self.visit(node.value)
        return node

    def _wrap(self, new: Any, original: ast.expr) -> ast.AST:
        span = len(self.spans.nodes)
        self.spans.nodes[span] = original
        self.spans.functions[span] = ".".join(self.path)
        call = ast.Call(ast.Name(RECORD, ast.Load()), [ast.Constant(span), new], [])
        return ast.copy_location(call, original)
