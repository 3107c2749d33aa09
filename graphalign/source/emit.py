"""Text edits at spans: comments and layout of the stock file stay as they are."""

from __future__ import annotations

import ast
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from graphalign.errors import PatchError
from graphalign.ir.paths import layer_of
from graphalign.source.frame import CALL_NORM, CALL_ONCE
from graphalign.source.guard import function_of, guard
from graphalign.source.ids import MARK, short_ids
from graphalign.source.plan import Change, Layers
from graphalign.source.spans import Spans

CASTS = frozenset({"to", "type_as", "float", "bfloat16", "half", "type"})
"""Methods that change the dtype."""


@dataclass(frozen=True)
class _Text:
    """One text edit: bytes `start` to `end` become `text`. At one place, suffixes of inner expressions come first."""

    start: int
    end: int
    text: str
    order: tuple[int, int]


class Emitter:
    """Writes changes into the text.

    Args:
        spans: of the stock text.
        low: name of the format that is rounded to, `bfloat16`.
        model: tells where a module keeps its layer number.
        modules: span to the modules that evaluate it.
    """

    def __init__(self, spans: Spans, low: str, model: nn.Module, modules: Mapping[int, set[str]]) -> None:
        self.spans, self.low, self.model, self.modules = spans, f"torch.{low}", model, modules
        self.source = spans.text.encode()
        starts = [0]
        for line in spans.text.split("\n"):
            starts.append(starts[-1] + len(line.encode()) + 1)
        self.starts = starts
        self.sets: dict[Layers, str] = {}
        self.told: dict[tuple[str, frozenset[str]], str] = {}
        """(function, modules in which it rounds) to the parameter that says so."""
        self.guards: dict[int, tuple[Layers, Layers]] = {}
        """See `guard.find_guards`."""
        self.once = False
        """Whether the text calls what rounds a value once for all its readers."""
        self.norm = self.apart = False
        """Whether it calls what runs a LayerNorm in FP32, and whether that one takes it apart."""

    def write(self, changes: Mapping[int, Change]) -> str:
        """The changed text.

        Raises:
            PatchError: a change cannot be written at its expression.
        """
        edits: list[_Text] = []
        for span, change in sorted(changes.items()):
            edits += self._edit(span, change)
        for (function, inside), name in self.told.items():
            edits += self._tell(function, inside, name)
        edits += self._comments(changes)
        for span, (layers, every) in self.guards.items():
            line, text = guard(self.spans, span, layers, every, lambda x, s=span: self._condition(s, x))  # type: ignore[misc]
            at = self._offset(line, 0)
            edits.append(_Text(at, at, text + "\n", (0, 0)))
        out = self.source
        for e in sorted(edits, key=lambda e: (e.start, e.order), reverse=True):
            out = out[: e.start] + e.text.encode() + out[e.end :]
        return self._with_sets(_without_unused_dtypes(out.decode(), self.spans.text))

    def _edit(self, span: int, change: Change) -> list[_Text]:
        node = self.spans.nodes[span]
        start, end = self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno or 0, node.end_col_offset or 0)
        out: list[_Text] = []
        if change.literal:
            if (call := self.spans.taken_as(span)) is not None:
                return [_Text(self._cast(call), self._offset(call.end_lineno or 0, call.end_col_offset or 0), f".to({self.low})", (2, 0))]
            p = self.spans.parent(span)
            assert isinstance(p, ast.Attribute)
            out.append(_Text(start, self._offset(p.end_lineno or 0, p.end_col_offset or 0), self.low, (2, 0)))
            return out
        if change.uncast:
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CASTS):
                raise PatchError(
                    "a rounding inside a call must go, and only casts can be taken out", where=self.spans.show(span),
                    hint="use `graphalign.apply`",
                )  # fmt: skip
            out.append(_Text(self._cast(node), end, "", (2, 0)))
        prefix, suffix = self._affixes(span, change)
        if change.norm:
            assert isinstance(node, ast.Call)
            prefix = f"{prefix}{CALL_NORM}("
            opening = self.source.index(b"(", self._offset(node.func.end_lineno or 0, node.func.end_col_offset or 0))
            out += [_Text(opening, opening + 1, ", ", (2, 0)), _Text(end - 1, end - 1, self._norm(span, change), (3, 0))]
        if prefix:
            out += [_Text(start, start, prefix, (0, start - end)), _Text(end, end, suffix, (1, end - start))]
        elif suffix:
            wrap = isinstance(node, ast.BinOp | ast.UnaryOp | ast.IfExp | ast.Compare)
            bracketed = self.source[start - 1 : start] == b"(" and self.source[end : end + 1] == b")"
            inner = wrap and bracketed and not isinstance(self.spans.parent(span), ast.Call | ast.keyword)
            if wrap and not inner:
                out.append(_Text(start, start, "(", (0, start - end)))
            at = end + 1 if inner else end
            out.append(_Text(at, at, (")" if wrap and not inner else "") + suffix, (1, end - start)))
        return out

    def _norm(self, span: int, c: Change) -> str:
        """What a LayerNorm that runs in FP32 is told beside its input."""
        self.norm = True
        wide = f", wide={self._condition(span, c.norm_in)}" if c.norm_in is not None else ""
        if not c.apart:
            return wide
        self.once = self.apart = True
        return f"{wide}, apart={self._condition(span, c.apart_in) if c.apart_in is not None else True}"

    def _comments(self, changes: Mapping[int, Change]) -> list[_Text]:
        """Behind every changed line the sites that it serves."""
        served: dict[int, set[str]] = defaultdict(set)
        for span, change in changes.items():
            served[self.spans.nodes[span].end_lineno or 0] |= change.serves
        out = []
        for line, sites in served.items():
            end = self.starts[line] - 1
            if sites and self.source[end - 1 : end] != b"\\":
                out.append(_Text(end, end, f"  {MARK}{short_ids(sites)}", (4, 0)))
        return out

    def _cast(self, call: ast.Call) -> int:
        """Where the cast of `x.to(...)` begins: at its dot."""
        assert isinstance(call.func, ast.Attribute)
        name_end = self._offset(call.func.end_lineno or 0, call.func.end_col_offset or 0)
        return self.source.rindex(b".", 0, name_end - len(call.func.attr) + 1)

    def _affixes(self, span: int, c: Change) -> tuple[str, str]:
        """What stands before and behind an expression."""
        suffix = self._suffix(span, c)
        if not (c.shared and c.down) or (c.down_in is not None and c.up_in is not None):
            return "", suffix
        self.once = True
        wanted = ""
        if c.down_in is not None:
            wanted = f", {self._condition(span, c.down_in)}"
        if c.down_at is not None:
            wanted = f", {self.told[self.spans.functions[span], c.down_at]}"
        if c.wide:
            wanted += ", wide=True"
        return f"{CALL_ONCE}(", f"{wanted})" + (self._up(span, c) if c.up else "")

    def _up(self, span: int, c: Change) -> str:
        return ".float()" if c.up_in is None else f".to(torch.float32 if {self._condition(span, c.up_in)} else {self.low})"

    def _suffix(self, span: int, c: Change) -> str:
        up = self._up(span, c) if c.up else ""
        down = f".to({self.low})" if c.down else ""
        if c.down and c.down_in is not None:
            if c.up and c.up_in is not None and not c.up_in & c.down_in:
                return up  # one condition says both
            down = f".to({self.low} if {self._condition(span, c.down_in)} else torch.float32)"
        if c.down and c.down_at is not None:
            function = self.spans.functions[span]
            taken = sum(f == function for f, _ in self.told)
            name = self.told.setdefault((function, c.down_at), "rounded" if not taken else f"rounded_{taken + 1}")
            down = f".to({self.low} if {name} else torch.float32)"
        return down + up

    def _tell(self, function: str, at: frozenset[str], name: str) -> list[_Text]:
        """A parameter of a `forward`, and what its callers give for it."""
        f = next(x for s, n in self.spans.functions.items() if n == function and (x := function_of(self.spans, s)) is not None)
        last: ast.expr | ast.arg = f.args.defaults[-1] if f.args.defaults else f.args.args[-1]
        end = self._offset(last.end_lineno or 0, last.end_col_offset or 0)
        out = [_Text(end, end, f", {name}=False", (3, 0))]
        left = set(at)
        for span, node in self.spans.nodes.items():
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "self"):
                continue
            called = {f"{m}.{node.func.attr}".lstrip("."): m for m in self.modules.get(span, ())}
            inside = set(called) & at
            if not inside:
                continue
            left -= inside
            condition = "True" if inside == set(called) else self._condition(span, frozenset(layer_of(m) for m in inside))
            stop = self._offset(node.end_lineno or 0, node.end_col_offset or 0) - 1
            out.append(_Text(stop, stop, f", {name}={condition}", (3, 0)))
        if left:
            raise PatchError(
                f"{function} rounds in some modules and not in others, and nothing in this file calls {sorted(left)[0]} by its name",
                where=f"line {f.lineno}: def {f.name}", hint="use `graphalign.apply`, which tells places apart",
            )  # fmt: skip
        return out

    def _condition(self, span: int, layers: Layers) -> str:
        numbers = sorted(x for x in layers if x is not None)
        index = self._layer_index(span)
        if len(numbers) == 1:
            return f"{index} == {numbers[0]}"
        every = {layer_of(n) for n in self.modules[span]}
        if every - set(layers) == {0}:
            return f"{index} > 0"
        name = self.sets.setdefault(layers, f"_LAYERS_{chr(ord('A') + len(self.sets))}")
        return f"{index} in {name}"

    def knows_layer(self, span: int) -> bool:
        """Whether the function that a span is in can tell its layer's number."""
        try:
            return bool(self._layer_index(span))
        except PatchError:
            return False

    def _layer_index(self, span: int) -> str:
        """The expression that gives the layer number where a span is evaluated."""
        names = sorted(self.modules[span])
        function = self.spans.functions[span]
        modules = {n: self.model.get_submodule(n) for n in names}
        owner = function.rpartition(".")[0]
        if owner and all(any(c.__name__ == owner for c in type(m).__mro__) for m in modules.values()):
            first = next(iter(modules.values()))
            for path in ("", *(f"{n}." for n, _ in first.named_children())):
                found = [_attribute(m, f"{path}layer_idx") for m in modules.values()]
                if found == [layer_of(n) for n in names]:
                    return f"self.{path}layer_idx"
            own = [n for n, x in vars(first).items() if x is None] + [n for n, _ in first.named_children()]
            for a, b in itertools.combinations(dict.fromkeys(own), 2):  # one of them is None
                found = [_attribute(getattr(m, a, None) or getattr(m, b, None), "layer_idx") for m in modules.values()]
                if found == [layer_of(n) for n in names]:
                    return f"(self.{a} or self.{b}).layer_idx"
        raise PatchError(
            f"layers differ in {function or 'the file'}, which does not know its layer's number", where=self.spans.show(span),
            hint="use `graphalign.apply`, which tells layers apart",
        )  # fmt: skip

    def _with_sets(self, text: str) -> str:
        """Constants for the sets of layers, behind the imports."""
        if not self.sets:
            return text
        lines = text.split("\n")
        last = max(n.end_lineno or 0 for n in ast.parse(text).body if isinstance(n, ast.Import | ast.ImportFrom))
        made = [
            f"{name} = frozenset({{{', '.join(str(x) for x in sorted(x for x in s if x is not None))}}})" for s, name in self.sets.items()
        ]
        return "\n".join([*lines[:last], "", *made, *lines[last:]])

    def _offset(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column


def _attribute(m: object, path: str) -> object:
    for part in path.split("."):
        m = getattr(m, part, None)
    return m


def _without_unused_dtypes(text: str, stock: str) -> str:
    """Without `input_dtype = x.dtype` where the deleted cast was the only reader."""
    before = {s for f in _functions(stock) for s in _unused(f)}
    gone = {line for f in _functions(text) for (name, value), line in _unused(f).items() if (name, value) not in before}
    return "\n".join(x for i, x in enumerate(text.split("\n"), 1) if i not in gone)


def _functions(text: str) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]


def _unused(f: ast.FunctionDef) -> dict[tuple[str, str], int]:
    loads = Counter(n.id for n in ast.walk(f) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    out = {}
    for s in f.body:
        if isinstance(s, ast.Assign) and len(s.targets) == 1 and isinstance(s.targets[0], ast.Name) and not loads[s.targets[0].id]:
            value = ast.unparse(s.value)
            if value.endswith(".dtype") or (value.startswith("torch.") and value.count(".") == 1):
                out[s.targets[0].id, value] = s.lineno
    return out
