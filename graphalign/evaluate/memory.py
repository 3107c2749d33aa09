"""What the engine's buffers hold while its graphs are evaluated: where a buffer lives, what a load reads, what a store leaves."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphalign.errors import CaptureFileError, UnsupportedOpError
from graphalign.evaluate import aten
from graphalign.evaluate.storage import UNKNOWN, Lazy, Rows, Storage, laid_out
from graphalign.evaluate.values import Arithmetic, draw, seed_of
from graphalign.ir.args import buffers_of
from graphalign.ir.indexing import evaluate as index_value
from graphalign.ir.inference import VALUE, Buffer, Export, Graph, InferenceGraph, Input, Parameter, Table


@dataclass
class Memory:
    """The buffers of one evaluation. Equal content is one object, whatever led to it."""

    capture: InferenceGraph
    arithmetic: Arithmetic
    copies: Mapping[tuple[int, str], str]
    """(graph, buffer) that holds a copy of a parameter, to the graph input that is the parameter."""
    reads: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] | None = None
    """If given, it is filled: tables, by `table_key`, to the rows that loops read at indices that they computed from what they loaded,
    and to the lanes that are not masked out."""
    unrecorded: dict[Any, set[int]] = field(default_factory=dict)
    """Tables, by `table_key`, to the rows that were read and that the capture does not hold."""
    tables: dict[str, Table] = field(init=False)
    parameters: dict[str, Parameter] = field(init=False)
    storages: dict[Any, Storage] = field(default_factory=dict)
    """By identity, what was stored anywhere."""
    exported: dict[str, Storage] = field(default_factory=dict)
    """What earlier graphs hand on."""
    g: int = -1
    """The graph that is evaluated."""
    buffers: dict[str, Buffer] = field(default_factory=dict)
    inputs: dict[str, Input] = field(default_factory=dict)
    env: dict[str, int] = field(default_factory=dict)
    """Symbols of the graph's sizes."""
    symbols: tuple[tuple[str, int], ...] = ()
    """The same, in order."""
    live: dict[str, Storage] = field(default_factory=dict)
    """What buffers of their own hold now, by name."""
    _numbers: dict[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tables = {t.name: t for t in self.capture.tables}
        self.parameters = {p.name: p for p in self.capture.parameters}

    def enter(self, g: int, graph: Graph) -> None:
        """Go on to the next graph, of which nothing is written yet but what earlier ones hand on."""
        passed = graph.passed()
        self.g, self.buffers, self.inputs = g, {b.name: b for b in (*passed, *graph.buffers)}, {i.name: i for i in graph.inputs}
        self.env = dict(graph.symbols)
        if graph.tokens:  # another symbol of the same size counts tokens too: Dynamo does not know that they are equal
            count = graph.symbols.get(graph.tokens)
            self.env.update({s: self.arithmetic.tokens for s, n in graph.symbols.items() if n == count})
            self.env[graph.tokens] = self.arithmetic.tokens
        for i in graph.inputs:
            if i.role == "symbol":
                self.env.setdefault(i.name, self.env.get(i.source, 0))
        self.symbols = tuple(sorted(self.env.items()))
        self.live = {}
        for b in passed:
            if (known := self.exported.get(self.inputs[b.name].source)) is not None:
                self.live[b.name] = known

    def export(self, e: Export) -> None:
        """Hand a tensor on to later graphs: its storage from its first element on."""
        name = str(e.tensor.get("b"))
        root, offset = self.root(name)
        source = self.source(name) if name in self.inputs else self.live.get(root)
        if not isinstance(source, Storage):
            return
        offset += int(index_value(str(e.tensor.get("offset", "0")), self.env))
        key = ("exported", source.id, offset)
        if key not in self.storages:
            memory = source.memory[offset:].clone() if offset else source.memory  # `as_strided` counts from a tensor's storage
            self.storages[key] = Storage(source.id if offset == 0 else self.number(key), memory, memory)
        self.exported[VALUE + e.name] = self.storages[key]

    def size(self, text: str) -> int:
        """An extent of a buffer or loop.

        Raises:
            CaptureFileError: it is impossible.
        """
        n = int(index_value(text, self.env))
        if not 0 <= n <= aten.MAX_ELEMENTS:
            raise CaptureFileError(f"a buffer of the capture has the impossible size {n}", where=text)
        return n

    def root(self, name: str) -> tuple[str, int]:
        """The buffer whose storage `name` lives in, and the offset of `name` in it."""
        offset, seen = 0, set()
        while (b := self.buffers.get(name)) is not None and b.view_of is not None and b.view_of != name and name not in seen:
            seen.add(name)
            offset += int(index_value(b.offset, self.env)) if b.layout == "NonOwningLayout" else 0
            name = b.view_of
        return name, offset

    def storage(self, root: str) -> Storage:
        """What a buffer of its own holds; unknown elements where nothing was written."""
        if root not in self.live:
            b = self.buffers.get(root)
            if b is None:
                raise CaptureFileError(f"the capture reads {root}, which nothing wrote", where=f"graph {self.g}")
            n = self.extent(b)
            if ("empty", n) not in self.storages:
                empty = torch.full((n,), UNKNOWN, dtype=torch.float64)
                self.storages["empty", n] = Storage(("empty", n), empty, empty)
            self.live[root] = self.storages["empty", n]
        return self.live[root]

    def extent(self, b: Buffer) -> int:
        """Elements of the storage that a buffer needs.

        Raises:
            CaptureFileError: it is impossible.
        """
        sizes, strides = [self.size(s) for s in b.size], [int(index_value(s, self.env)) for s in b.stride]
        if any(s == 0 for s in sizes):
            return 0
        n = 1 + sum((s - 1) * t for s, t in zip(sizes, strides, strict=False))
        if not 0 <= n <= aten.MAX_ELEMENTS:
            raise CaptureFileError(f"buffer {b.name} has an impossible extent", where=str(b.size))
        return n

    def source(self, name: str) -> Storage | Lazy:
        """What a load of `name` reads."""
        name = self.copies.get((self.g, name), name)
        i = self.inputs.get(name)
        if i is None:
            return self.storage(self.root(name)[0])
        if name in self.live:  # written by an extern call, or another graph's export
            return self.live[name]
        if i.source.startswith(VALUE):
            return self.storage(name)
        p = self.parameters.get(i.source) if i.role == "parameter" else None
        if p is not None and p.segments and p.learned:
            pieces = tuple((self.arithmetic.name(s.checkpoint), s.dim, s.start, s.length, s.index, s.order, s.shards) for s in p.segments)
            return Lazy(("parameter", pieces, p.shape, i.dtype or p.dtype), p, i.dtype or p.dtype)
        if i.source in self.tables:
            storage = self._table(i.source)
        elif "position" in i.source:
            size, stride = tuple(map(self.size, i.size)), tuple(int(index_value(s, self.env)) for s in i.stride)
            data = laid_out(self.arithmetic.positions, size, stride)
            storage = Storage(("positions", size), data, data)
        elif i.dtype in ("int32", "int64") and "id" in i.source:
            data = torch.tensor(self.arithmetic.token_ids, dtype=torch.float64)
            storage = Storage(("ids",), data, data)
        else:
            n = 1
            for s in i.size:
                n *= self.size(s)
            data = draw(seed_of(self.arithmetic.seed, "input", i.source), torch.arange(n))
            storage = Storage(("input", i.source, n), data, data)
        self.live[name] = storage
        return storage

    def table_key(self, name: str) -> Any:
        """Equal for tables of equal content: layers often have a copy each."""
        t = self.tables[name]
        return ("table", t.values, t.rows, t.shape)

    def read_rows(self, table: Rows, index: torch.Tensor, lanes: torch.Tensor | None, *, computed: bool) -> None:
        """Take note of a loop's read: which rows, at flat indices, in the lanes that are not masked out."""
        row = table.row(index)
        row, inside = torch.broadcast_tensors(row, torch.ones_like(row, dtype=torch.bool) if lanes is None else lanes)
        if self.reads is not None and computed:
            self.reads[table.key].append((row, inside))
        missing = row[inside & (table.place[row] < 0)]
        if missing.numel():
            self.unrecorded.setdefault(table.key, set()).update(missing.unique().tolist())

    def _table(self, name: str) -> Storage:
        t = self.tables[name]
        key = self.table_key(name)
        if key not in self.storages:
            width = math.prod(t.shape[1:])
            raw = torch.frombuffer(bytearray(base64.b64decode(t.values)), dtype=torch.float32).double().view(len(t.rows), width)
            if t.shape[0] * width > aten.MAX_ELEMENTS:
                raise UnsupportedOpError(f"table {name} is too large to evaluate")
            self.storages[key] = Rows(("table", self.number(key)), t.rows, t.shape[0], raw, key)
        return self.storages[key]

    def contents(self, name: str) -> torch.Tensor:
        """A whole buffer in its own layout."""
        root, offset = self.root(name)
        b = self.buffers.get(name) or self.buffers.get(root)
        source = self.source(name)
        if isinstance(source, Lazy) or b is None or not b.size:
            return source.memory if isinstance(source, Storage) else torch.empty(0)
        sizes, strides = [self.size(s) for s in b.size], [int(index_value(s, self.env)) for s in b.stride]
        extent = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        if source.memory.numel() == math.prod(sizes) < extent:  # handed on by an earlier graph, element by element, as the slice that it is
            return source.memory.reshape(sizes)
        return source.memory.as_strided(sizes, strides, offset)

    def place(self, name: str, data: torch.Tensor) -> None:
        """Store a whole result in a buffer."""
        b = self.buffers.get(name)
        if b is None or b.dtype is None:
            return
        root, _ = self.root(name)
        flat = data.reshape(-1)
        flat = flat.double() if flat.is_floating_point() else flat
        val = self.arithmetic.settle(self.arithmetic.round(flat, b.dtype) if flat.is_floating_point() else flat)
        self.live[root] = Storage(("extern", val.id), val.data, val.data)

    def argument(self, arg: Any) -> torch.Tensor:
        """What an argument of a call holds: a buffer, a view of one, or a list of them side by side."""
        if isinstance(arg, list | tuple):
            return torch.cat([self.argument(a).reshape(-1) for a in arg if buffers_of(a)])
        name = arg["b"]
        if "size" in arg:
            _root, base = self.root(name)
            source = self.source(name)
            if isinstance(source, Storage):
                sizes = [self.size(s) for s in arg["size"]]
                strides = [int(index_value(s, self.env)) for s in arg["stride"]]
                return source.memory.as_strided(sizes, strides, base + int(index_value(str(arg.get("offset", "0")), self.env)))
        return self.contents(name)

    def number(self, key: Any) -> int:
        """A small integer for a compound identity, so that identities do not nest."""
        return self._numbers.setdefault(key, len(self._numbers))

    def store(self, name: str, role: str, index: torch.Tensor, data: torch.Tensor, mode: str, content: Any) -> None:
        """A loop's store.

        Args:
            name: the buffer.
            role: the buffer's, in the loop's body.
            index: flat indices, of any shape.
            data: values, of a shape that expands to that of the indices.
            mode: "atomic_add", or empty.
            content: equal for what is known to be equal without a look at the values.
        """
        root, offset = self.root(name)
        old = self.storage(root)
        dtype = (self.buffers[name].dtype if name in self.buffers else None) or "float32"
        key = ("stored", old.id, content, role, offset, old.memory.numel(), dtype)
        if key not in self.storages:
            self.storages[key] = self._stored_over(old, name, index + offset, data, mode, dtype)
        self.live[root] = self.storages[key]

    def _stored_over(self, old: Storage, name: str, index: torch.Tensor, data: torch.Tensor, mode: str, dtype: str) -> Storage:
        """A buffer's storage after a store; the same object for the same content."""
        register = old.register.clone()
        flat = index.reshape(-1)
        value = data.double().expand(index.shape).reshape(-1)
        if flat.numel():
            low, high = (int(x) for x in flat.aminmax())
            if low < 0 or high >= register.numel():
                raise CaptureFileError(f"a store to {name} is outside the buffer", where=f"graph {self.g}")
        if mode == "atomic_add":
            register, memory = (torch.nan_to_num(x).index_add(0, flat, value) for x in (register, old.memory))
        else:
            register[flat] = value
            memory = register
            if old.memory is not old.register or self.arithmetic.rounds:
                memory = old.memory.clone()
                memory[flat] = self.arithmetic.round(value, dtype)
        in_register, in_memory = self.arithmetic.settle(register), self.arithmetic.settle(memory)
        key = ("content", in_register.id, in_memory.id)
        return self.storages.setdefault(key, Storage(self.number(key), in_memory.data, in_register.data))
