"""Evaluating the inference graph: kernels in order, loop bodies interpreted over index tensors.

A body is evaluated once per distinct inputs: equal layers cost a dictionary look-up.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphalign.dataflow.externs import buffers_of
from graphalign.dataflow.trace_inference import ADDED, Tracer
from graphalign.errors import CaptureFileError, UnsupportedOpError
from graphalign.evaluate import aten
from graphalign.evaluate.interpret import Interpreter
from graphalign.evaluate.outputs import hand_on, output_of
from graphalign.evaluate.picks import Pick
from graphalign.evaluate.run_training import Arranged, canonical
from graphalign.evaluate.storage import UNKNOWN, Lazy, Rows, Storage, laid_out
from graphalign.evaluate.values import Arithmetic, Val, draw, seed_of
from graphalign.ir.dataflow import Op
from graphalign.ir.indexing import evaluate as index_value
from graphalign.ir.inference import VALUE, Body, Buffer, Export, Graph, InferenceGraph, Node

Replace = Callable[[Val], Val]


@dataclass
class Run:
    """One evaluation. After `run()`, `values` holds every op's result before any store, by op index."""

    capture: InferenceGraph
    tracer: Tracer
    arithmetic: Arithmetic
    replace: Replace | None = None
    values: dict[int, Val] = field(default_factory=dict)
    operands: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Operands of anchors and outputs: (op, slot) to a flat or shaped tensor in the buffer's layout."""
    arranged: Arranged = field(default_factory=dict)
    """For operands that were sorted, see `canonical`."""
    unsupported: dict[int, str] = field(default_factory=dict)
    picks: dict[int, Pick] = field(default_factory=dict)
    """Identity of a value to why what picked it took one side only."""
    only: set[tuple[int, str]] | None = None
    """Evaluate these loop nodes (graph, name) only; everything else stays unknown."""
    reads: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] | None = None
    """If given, it is filled: tables, by `table_key`, to the rows that loops read at indices that they computed from what they loaded,
    and to the lanes that are not masked out."""
    unrecorded: dict[Any, set[int]] = field(default_factory=dict)
    """Tables, by `table_key`, to the rows that were read and that the capture does not hold."""
    _nodes: dict[Any, dict[str, Val | str]] = field(default_factory=dict)
    _stored: dict[Any, list[tuple[str, torch.Tensor, torch.Tensor, str, int]]] = field(default_factory=dict)
    _numbers: dict[Any, int] = field(default_factory=dict)

    def run(self) -> Run:
        """Evaluate all graphs in order."""
        self.tables = {t.name: t for t in self.capture.tables}
        self.parameters = {p.name: p for p in self.capture.parameters}
        self.storages: dict[Any, Storage] = {}
        self.exported: dict[str, Storage] = {}
        for g, graph in enumerate(self.capture.graphs):
            self._graph(g, graph)
        for op in self.tracer.ops:
            if op.kind == "table" and op.key[0] in self.tables and (missing := self.unrecorded.get(self.table_key(op.key[0]))):
                some = ", ".join(str(n) for n in sorted(missing)[:3])
                self.unsupported[op.id] = f"it is read at rows that the capture does not hold ({some}{', …' if len(missing) > 3 else ''})"
        return self

    def _graph(self, g: int, graph: Graph) -> None:
        passed = graph.passed()
        self.g, self.buffers, self.inputs = g, {b.name: b for b in (*passed, *graph.buffers)}, {i.name: i for i in graph.inputs}
        self.env: dict[str, int] = dict(graph.symbols)
        if graph.tokens:  # another symbol of the same size counts tokens too: Dynamo does not know that they are equal
            count = graph.symbols.get(graph.tokens)
            self.env.update({s: self.arithmetic.tokens for s, n in graph.symbols.items() if n == count})
            self.env[graph.tokens] = self.arithmetic.tokens
        for i in graph.inputs:
            if i.role == "symbol":
                self.env.setdefault(i.name, self.env.get(i.source, 0))
        self.symbols = tuple(sorted(self.env.items()))
        self.live: dict[str, Storage] = {}
        for b in passed:
            if (known := self.exported.get(self.inputs[b.name].source)) is not None:
                self.live[b.name] = known
        self.results: dict[str, list[torch.Tensor]] = {}
        for kernel in graph.kernels:
            for node in kernel.nodes:
                if self.only is not None and (g, node.name) not in self.only:
                    continue
                if node.kind == "loop":
                    self._loop(node)
                else:
                    self._anchor(node)
        for e in graph.exports:
            self._export(e)
        if self.only is not None:
            return
        for op in self.tracer.ops:
            if op.kind == "output" and op.key[0] == g:
                self.operands[op.id, 0] = self._contents(op.key[1])
            elif op.target == "logprobs" and op.detail["graph"] == g:
                self.operands[op.id, 0] = self._contents(op.detail["buffer"])

    def _export(self, e: Export) -> None:
        """Hand a tensor on to later graphs: its storage from its first element on."""
        name = str(e.tensor.get("b"))
        root, offset = self._root(name)
        source = self._source(name) if name in self.inputs else self.live.get(root)
        if not isinstance(source, Storage):
            return
        offset += int(index_value(str(e.tensor.get("offset", "0")), self.env))
        key = ("exported", source.id, offset)
        if key not in self.storages:
            memory = source.memory[offset:].clone() if offset else source.memory  # `as_strided` counts from a tensor's storage
            self.storages[key] = Storage(source.id if offset == 0 else self._number(key), memory, memory)
        self.exported[VALUE + e.name] = self.storages[key]

    # -- storage --------------------------------------------------------------------------------------------------------

    def _size(self, text: str) -> int:
        n = int(index_value(text, self.env))
        if not 0 <= n <= aten.MAX_ELEMENTS:
            raise CaptureFileError(f"a buffer of the capture has the impossible size {n}", where=text)
        return n

    def _root(self, name: str) -> tuple[str, int]:
        """The buffer whose storage `name` lives in, and the offset of `name` in it."""
        offset, seen = 0, set()
        while (b := self.buffers.get(name)) is not None and b.view_of is not None and b.view_of != name and name not in seen:
            seen.add(name)
            offset += int(index_value(b.offset, self.env)) if b.layout == "NonOwningLayout" else 0
            name = b.view_of
        return name, offset

    def _storage(self, root: str) -> Storage:
        if root not in self.live:
            b = self.buffers.get(root)
            if b is None:
                raise CaptureFileError(f"the capture reads {root}, which nothing wrote", where=f"graph {self.g}")
            n = self._extent(b)
            if ("empty", n) not in self.storages:
                empty = torch.full((n,), UNKNOWN, dtype=torch.float64)
                self.storages["empty", n] = Storage(("empty", n), empty, empty)
            self.live[root] = self.storages["empty", n]
        return self.live[root]

    def _extent(self, b: Buffer) -> int:
        sizes, strides = [self._size(s) for s in b.size], [int(index_value(s, self.env)) for s in b.stride]
        if any(s == 0 for s in sizes):
            return 0
        n = 1 + sum((s - 1) * t for s, t in zip(sizes, strides, strict=False))
        if not 0 <= n <= aten.MAX_ELEMENTS:
            raise CaptureFileError(f"buffer {b.name} has an impossible extent", where=str(b.size))
        return n

    def _source(self, name: str) -> Storage | Lazy:
        """What a load of `name` reads."""
        name = self.tracer.copies.get((self.g, name), name)
        i = self.inputs.get(name)
        if i is None:
            return self._storage(self._root(name)[0])
        if name in self.live:  # written by an extern call, or another graph's export
            return self.live[name]
        if i.source.startswith(VALUE):
            return self._storage(name)
        p = self.parameters.get(i.source) if i.role == "parameter" else None
        if p is not None and p.segments and p.learned:
            pieces = tuple((self.arithmetic.name(s.checkpoint), s.dim, s.start, s.length, s.index, s.order, s.shards) for s in p.segments)
            return Lazy(("parameter", pieces, p.shape, i.dtype or p.dtype), p, i.dtype or p.dtype)
        if i.source in self.tables:
            storage = self._table(i.source)
        elif "position" in i.source:
            size, stride = tuple(map(self._size, i.size)), tuple(int(index_value(s, self.env)) for s in i.stride)
            data = laid_out(self.arithmetic.positions, size, stride)
            storage = Storage(("positions", size), data, data)
        elif i.dtype in ("int32", "int64") and "id" in i.source:
            data = torch.tensor(self.arithmetic.token_ids, dtype=torch.float64)
            storage = Storage(("ids",), data, data)
        else:
            n = 1
            for s in i.size:
                n *= self._size(s)
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
            self.storages[key] = Rows(("table", self._number(key)), t.rows, t.shape[0], raw, key)
        return self.storages[key]

    def _contents(self, name: str) -> torch.Tensor:
        """A whole buffer in its own layout."""
        root, offset = self._root(name)
        b = self.buffers.get(name) or self.buffers.get(root)
        source = self._source(name)
        if isinstance(source, Lazy) or b is None or not b.size:
            return source.memory if isinstance(source, Storage) else torch.empty(0)
        sizes, strides = [self._size(s) for s in b.size], [int(index_value(s, self.env)) for s in b.stride]
        extent = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        if source.memory.numel() == math.prod(sizes) < extent:  # handed on by an earlier graph, element by element, as the slice that it is
            return source.memory.reshape(sizes)
        return source.memory.as_strided(sizes, strides, offset)

    # -- anchors --------------------------------------------------------------------------------------------------------

    def _anchor(self, node: Node) -> None:
        args = dict(node.args)
        if node.op == "inductor.multi_output":
            self._pick(node, args)
            return
        if (self.g, node.name) in self.tracer.partial.handed_on:
            hand_on(self, node, args)
            return
        op_id = self.tracer.ids.get((self.g, node.name, ""))
        if op_id is None:
            return
        op = self.tracer.ops[op_id]
        if op.kind == "op":
            self._aten(op, node, args)
            return
        rule = self.tracer.rules.get(node.op)
        names = (
            [rule.input] if rule and rule.kind == "gemm" else list(rule.operands) if rule and rule.operands else [n for n, _ in node.args]
        )
        slot = 0
        for n in names:
            arg = args.get(n)
            if not buffers_of(arg):
                continue
            if slot < len(op.operands):
                self.operands[op.id, slot] = self._argument(arg)
                slot += 1
        canonical(self.operands, op, self.arithmetic.tokens, self.arranged)
        written = [b for n in ([rule.out] if rule and rule.out else node.mutates) for b in buffers_of(args.get(n))] or list(node.outputs)
        for o in written:
            root, _ = self._root(o)
            b = self.buffers.get(root)
            if b is None or b.dtype is None or not b.size:
                continue
            val = output_of(self, op, b)
            self.values[op.id] = val
            if (added := self.tracer.ids.get((self.g, node.name, ADDED))) is not None and rule is not None:
                total = self.arithmetic.settle(val.data + self._argument(args[rule.bias]).reshape(val.data.shape))
                self.values[added] = total if self.replace is None else self.replace(total)
                self._place(o, self.values[added].data)
                continue
            self.live[root] = Storage(("anchor", val.id), val.data.reshape(-1), val.data.reshape(-1))

    def _pick(self, node: Node, args: dict[str, Any]) -> None:
        """One output of an extern call with several."""
        sources = buffers_of(args.get("self"))
        path = args.get("indices") or []
        results = self.results.get(sources[0]) if sources else None
        if results is None or (path and not 0 <= path[0] < len(results)):
            return
        for o in node.outputs:
            self._place(o, results[path[0] if path else 0])

    def _place(self, name: str, data: torch.Tensor) -> None:
        """Store a whole result in a buffer."""
        b = self.buffers.get(name)
        if b is None or b.dtype is None:
            return
        root, _ = self._root(name)
        flat = data.reshape(-1)
        flat = flat.double() if flat.is_floating_point() else flat
        val = self.arithmetic.settle(self.arithmetic.round(flat, b.dtype) if flat.is_floating_point() else flat)
        self.live[root] = Storage(("extern", val.id), val.data, val.data)

    def _aten(self, op: Op, node: Node, args: dict[str, Any]) -> None:
        """An ATen kernel called as it is, on what its operands hold in memory."""
        try:
            given = {k: self._decode(a) for k, a in args.items()}
            if any(isinstance(x, torch.Tensor) and x.is_floating_point() and bool(x.isnan().any()) for x in given.values()):
                raise UnsupportedOpError("an operand could not be evaluated")
            with torch.no_grad():
                result = aten.resolve(node.op)(**{k: x for k, x in given.items() if x is not None})
        except (UnsupportedOpError, RuntimeError, TypeError, ValueError, IndexError) as e:
            self.unsupported[op.id] = f"{node.op} could not be evaluated: {str(e).splitlines()[0]}"
            return
        results = [x for x in (result if isinstance(result, tuple | list) else [result]) if isinstance(x, torch.Tensor)]
        first = results[0].double() if results[0].is_floating_point() else results[0]
        self.values[op.id] = self.arithmetic.settle(first)
        for o in node.outputs:
            self.results[o] = results
            if not isinstance(result, tuple | list):
                self._place(o, results[0])

    def _decode(self, a: Any) -> Any:
        """An argument of an ATen kernel."""
        if isinstance(a, dict):
            if "b" in a or "size" in a:
                x = self._argument(a)
                return x.view([self._size(s) for s in self.buffers[a["b"]].size]) if "size" not in a and a["b"] in self.buffers else x
            if "f" in a:
                return float(a["f"])
            if "e" in a:
                return int(index_value(a["e"], self.env))
            if "dtype" in a:
                dtype = getattr(torch, str(a["dtype"]), None)
                return torch.float64 if isinstance(dtype, torch.dtype) and dtype.is_floating_point else dtype
            return None
        return [self._decode(x) for x in a] if isinstance(a, list | tuple) else a

    def _argument(self, arg: Any) -> torch.Tensor:
        if isinstance(arg, list | tuple):
            return torch.cat([self._argument(a).reshape(-1) for a in arg if buffers_of(a)])
        name = arg["b"]
        if "size" in arg:
            _root, base = self._root(name)
            source = self._source(name)
            if isinstance(source, Storage):
                sizes = [self._size(s) for s in arg["size"]]
                strides = [int(index_value(s, self.env)) for s in arg["stride"]]
                return source.memory.as_strided(sizes, strides, base + int(index_value(str(arg.get("offset", "0")), self.env)))
        return self._contents(name)

    # -- loops ----------------------------------------------------------------------------------------------------------

    def _loop(self, node: Node) -> None:
        if any((self.g, b) in self.tracer.copies for b in node.outputs):
            return
        body = self.capture.bodies[node.body or ""]
        binding = {f"b{i}": b for i, b in enumerate(node.buffers)}
        inputs = []
        for role, name in binding.items():
            root, offset = self._root(name)
            source = self._source(name) if name in self.inputs or root in self.live else None
            inputs.append(
                (
                    role,
                    source.id if source else None,
                    offset,
                    name in node.forwarded,
                    (self.buffers[name].dtype if name in self.buffers else ""),
                )
            )
        key = (node.body, self.symbols, tuple(inputs)) if self.arithmetic.share else (self.g, node.name)
        if key not in self._nodes:
            self._nodes[key], self._stored[key] = self._interpret(body, binding, node)
        for name, val in self._nodes[key].items():
            op = self.tracer.ids.get((self.g, node.name, name))
            if op is None or op < 0:
                continue
            if isinstance(val, str):
                self.unsupported[op] = val
            else:
                self.values[op] = val
        for role, index, data, mode, identity in self._stored[key]:
            # known content makes equal layers equal, whatever led to it
            content = (node.body, "value", identity) if identity else (node.body, "inputs", self._number(key))
            self._store(binding[role], role, index, data, mode, content)

    def _number(self, key: Any) -> int:
        """A small integer for a compound identity, so that identities do not nest."""
        return self._numbers.setdefault(key, len(self._numbers))

    def _store(self, name: str, role: str, index: torch.Tensor, data: torch.Tensor, mode: str, content: Any) -> None:
        root, offset = self._root(name)
        old = self._storage(root)
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
        return self.storages.setdefault(key, Storage(self._number(key), in_memory.data, in_register.data))

    def _interpret(self, body: Body, binding: dict[str, str], node: Node) -> tuple[dict[str, Val | str], list[Any]]:
        return Interpreter(self, body, binding, node).run()


def computed_tables(capture: InferenceGraph, tracer: Tracer, arithmetic: Arithmetic) -> dict[str, torch.Tensor]:
    """The tables that the engine's kernels compute from positions (rotary cosines in some models).

    Returns:
        Name of the table's op to its float64 content, in the kernel's own layout. Empty if there are none.
    """
    if not tracer.computed:
        return {}
    run = Run(capture, tracer, arithmetic, only=set(tracer.computed.values())).run()
    return {tracer.ops[i].name: run.values[i].data for i in tracer.computed if i in run.values}
