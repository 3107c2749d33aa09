"""Which edges a reader of a buffer gets, while the engine's kernels are traced one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from graphalign.dataflow.identity import nearest_anchors
from graphalign.dataflow.opaque import OpaqueOp
from graphalign.dataflow.partial import Partial
from graphalign.errors import CaptureFileError
from graphalign.evaluate import aten
from graphalign.ir.args import buffers_of
from graphalign.ir.dataflow import LOW_PRECISION, Op, Operand, Ref, selected_format
from graphalign.ir.inference import VALUE, Buffer, Graph, InferenceGraph, Input, Parameter


@dataclass
class Held:
    """The ops so far, and what the buffers of the graph that is traced hold."""

    capture: InferenceGraph
    rules: dict[str, OpaqueOp]
    ops: list[Op] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ids: dict[tuple[int, str, str], int] = field(default_factory=dict)
    """(graph, node, op of its body) to op index, for the evaluator."""
    sources: dict[tuple[int, str], int] = field(default_factory=dict)
    """(graph, input name) to op index."""
    constant: set[tuple[int, str, str]] = field(default_factory=set)
    """(graph, node, op of its body) of what depends on run-time inputs and tables only: the engine computes it in FP32."""
    exact: dict[int, str] = field(default_factory=dict)
    """Op index to the format its result is exact in already, see `selected_format`."""
    exported: dict[str, Operand] = field(default_factory=dict)
    """What graphs hand on to later graphs, by name."""
    computed: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Op index of a table that a kernel computes to (graph, node)."""
    copies: dict[tuple[int, str], str] = field(default_factory=dict)
    """(graph, buffer) that holds a parameter, copied without a change, to the graph input that is the parameter."""
    partial: Partial = field(default_factory=Partial)
    parameters: dict[str, Parameter] = field(init=False)
    tables: set[str] = field(init=False)
    g: int = -1
    """The graph that is traced."""
    buffers: dict[str, Buffer] = field(default_factory=dict)
    """Of this graph, with what earlier ones pass on."""
    inputs: dict[str, Input] = field(default_factory=dict)
    """Of this graph."""
    register: dict[str, Operand] = field(default_factory=dict)
    """Edges as they are stored."""
    memory: dict[str, Operand] = field(default_factory=dict)
    """Once written to memory: in their rounded form; views of a concat buffer feed the whole."""
    _occurrences: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters = {p.name: p for p in self.capture.parameters}
        self.tables = {t.name for t in self.capture.tables}

    def enter(self, g: int, graph: Graph) -> None:
        """Go on to the next graph, of which nothing is written yet."""
        self.g = g
        self.buffers = {b.name: b for b in (*graph.passed(), *graph.buffers)}
        self.inputs = {i.name: i for i in graph.inputs}
        self.register, self.memory = {}, {}
        self.partial.buffers.clear()

    def add(self, **kw: Any) -> Op:
        """The next op."""
        op = Op(id=len(self.ops), **kw)
        self.ops.append(op)
        return op

    def is_part(self, name: str) -> bool:
        """Whether a buffer or input holds one rank's part of a sum."""
        return self.partial.holds(self.inputs, self.buffers, name)

    def take(self, g: int, name: str) -> Operand:
        """`read`, by something that needs whole values."""
        if self.is_part(name):
            self.partial.entered.update(r.producer for r in self.read(g, name))
        return self.read(g, name)

    def read(self, g: int, name: str) -> Operand:
        """Edges that a load of `name` from memory gives."""
        if name in self.memory:
            return self.memory[name]
        if (i := self.inputs.get(name)) is not None:
            if i.role in ("symbol", "layer"):
                return ()
            if i.source.startswith(VALUE):
                return self.exported.get(i.source.removeprefix(VALUE), ())
            return (Ref(self.source(g, name), (i.dtype,) if i.dtype in LOW_PRECISION else ()),)
        buffer = self.buffers.get(name)
        if buffer is not None and buffer.view_of is not None and buffer.view_of != name:
            return self.read(g, buffer.view_of)
        if buffer is not None:
            return ()  # allocated, not written yet: an output argument
        raise CaptureFileError(f"the capture reads {name}, which is neither an input nor a buffer", where=f"graph {g}")

    def source(self, g: int, name: str) -> int:
        """The op that an input of a graph is."""
        if (g, name) in self.sources:
            return self.sources[g, name]
        i = self.inputs[name]
        p = self.parameters.get(i.source) if i.role == "parameter" else None
        if p is not None and p.segments and p.learned:
            kind, key = "parameter", tuple(s.checkpoint for s in p.segments)
        elif p is not None and p.name in self.tables:
            kind, key = "table", (p.name,)
        else:
            kind, key = "input", (i.source or name,)
        op = self.add(name=f"{name}@{g}" if g else name, kind=kind, target=i.source or name, dtype=i.dtype or "float32", key=key)
        self.sources[g, name] = op.id
        return op.id

    def write(self, name: str, refs: Operand) -> None:
        """A store of edges into a buffer: rounded for readers of memory, kept as they are for registers."""
        self.partial.buffers.discard(name)
        self.copies.pop((self.g, name), None)
        self.register[name] = self.register.get(name, ()) + refs
        buffer = self.buffers.get(name)
        dtype = (buffer.dtype if buffer else None) or "float32"
        rounded = tuple(
            r.through(name) if not r.roundings and self.exact.get(r.producer) == dtype else r.rounded(dtype, name) for r in refs
        )
        seen = {name}
        while True:
            self.memory[name] = merged(self.memory.get(name, ()), rounded)
            buffer = self.buffers.get(name)
            if buffer is None or buffer.view_of is None or buffer.view_of in seen:
                return
            name = buffer.view_of
            seen.add(name)

    def selects(self, op: Op, target: str = "") -> None:
        """Take note of an op whose result is exact in its operands' format."""
        if fmt := selected_format(target or aten.base(op.target), op.operands):
            self.exact[op.id] = fmt

    def dtype_of(self, names: list[str]) -> str:
        """The format of the first buffer that has one."""
        return next((b.dtype for n in names if (b := self.buffers.get(n)) is not None and b.dtype), "float32")

    def parameter(self, arg: Any) -> Parameter | None:
        """The engine's parameter that an argument is, or holds a copy of."""
        if isinstance(arg, dict) and "param" in arg:
            return self.parameters.get(arg["param"])
        for b in buffers_of(arg):
            i = self.inputs.get(self.copies.get((self.g, b), b))
            if i is not None and i.role == "parameter":
                return self.parameters.get(i.source)
        return None

    def number(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """A key with its occurrence, counted from 0."""
        n = self._occurrences.get(key, 0)
        self._occurrences[key] = n + 1
        return (*key, n)

    def anchors_above(self, operands: Iterable[Operand]) -> tuple[str, ...]:
        """Checkpoint names of the GEMMs (or keys of other anchors) nearest above some operands: an anchor's structural identity."""
        return nearest_anchors(self.ops, operands)


def merged(old: Operand, new: Operand) -> Operand:
    """Edges with more of them, each once."""
    return old + tuple(r for r in dict.fromkeys(new) if r not in old)
