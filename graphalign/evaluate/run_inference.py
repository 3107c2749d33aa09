"""Evaluating the inference graph: loop bodies interpreted over index tensors, in float64.

A body is evaluated once per distinct inputs: equal layers cost a dictionary look-up.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from graphalign.errors import CaptureFileError, UnsupportedOpError
from graphalign.evaluate import aten, loop_ops
from graphalign.evaluate.run_training import anchor_name, canonical
from graphalign.evaluate.trace_inference import Tracer, _buffers
from graphalign.evaluate.values import Arithmetic, Val, draw, seed_of
from graphalign.ir.args import references
from graphalign.ir.dataflow import LOW_PRECISION, Op
from graphalign.ir.indexing import evaluate as index_value
from graphalign.ir.inference import VALUE, Body, Buffer, Export, Graph, InferenceGraph, Node, Parameter

Replace = Callable[[Val], Val]
UNKNOWN = float("nan")


@dataclass
class Storage:
    """Flat content of a buffer: what memory holds, and what registers held when it was stored."""

    id: Any
    memory: torch.Tensor
    register: torch.Tensor


@dataclass
class _Lazy:
    """A parameter: elements are made when they are read."""

    id: Any
    parameter: Parameter
    dtype: str


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
    unsupported: dict[int, str] = field(default_factory=dict)
    only: set[tuple[int, str]] | None = None
    """Evaluate these loop nodes (graph, name) only; everything else stays unknown."""
    _nodes: dict[Any, dict[str, Val | str]] = field(default_factory=dict)
    _stored: dict[Any, list[tuple[str, torch.Tensor, torch.Tensor, str, int]]] = field(default_factory=dict)
    _numbers: dict[Any, int] = field(default_factory=dict)

    def run(self) -> Run:
        """Evaluate all graphs in order."""
        self.tables = {t.name: t for t in self.capture.tables}
        self.storages: dict[Any, Storage] = {}
        self.exported: dict[str, Storage] = {}
        for g, graph in enumerate(self.capture.graphs):
            self._graph(g, graph)
        return self

    def _graph(self, g: int, graph: Graph) -> None:
        passed = graph.passed()
        self.g, self.buffers, self.inputs = g, {b.name: b for b in (*passed, *graph.buffers)}, {i.name: i for i in graph.inputs}
        self.env: dict[str, int] = dict(graph.symbols)
        if graph.tokens:
            self.env[graph.tokens] = self.arithmetic.tokens
        for i in graph.inputs:
            if i.role == "symbol":
                self.env.setdefault(i.name, self.env.get(i.source, 0))
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

    def _export(self, e: Export) -> None:
        """Hand a tensor on to later graphs: its storage from its first element on."""
        name = str(e.tensor.get("b"))
        root, offset = self._root(name)
        source = self._source(name) if name in self.inputs else self.live.get(root)
        if not isinstance(source, Storage):
            return
        offset += int(index_value(str(e.tensor.get("offset", "0")), self.env))
        memory = source.memory[offset:].clone() if offset else source.memory  # `as_strided` counts from a tensor's storage
        identity = source.id if offset == 0 else self._number(("exported", source.id, offset))
        self.exported[VALUE + e.name] = Storage(identity, memory, memory)

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
            empty = torch.full((n,), UNKNOWN, dtype=torch.float64)
            self.live[root] = Storage(("empty", n), empty, empty)
        return self.live[root]

    def _extent(self, b: Buffer) -> int:
        sizes, strides = [self._size(s) for s in b.size], [int(index_value(s, self.env)) for s in b.stride]
        if any(s == 0 for s in sizes):
            return 0
        n = 1 + sum((s - 1) * t for s, t in zip(sizes, strides, strict=False))
        if not 0 <= n <= aten.MAX_ELEMENTS:
            raise CaptureFileError(f"buffer {b.name} has an impossible extent", where=str(b.size))
        return n

    def _source(self, name: str) -> Storage | _Lazy:
        """What a load of `name` reads."""
        i = self.inputs.get(name)
        if i is None:
            return self._storage(self._root(name)[0])
        if name in self.live:  # written by an extern call, or another graph's export
            return self.live[name]
        if i.source.startswith(VALUE):
            return self._storage(name)
        p = next((p for p in self.capture.parameters if p.name == i.source), None) if i.role == "parameter" else None
        if p is not None and p.segments and p.learned:
            return _Lazy(("parameter", tuple(self.arithmetic.name(s.checkpoint) for s in p.segments), p.shape), p, i.dtype or p.dtype)
        if i.source in self.tables:
            storage = self._table(i.source)
        elif "position" in i.source:
            data = torch.tensor(self.arithmetic.positions, dtype=torch.float64)
            storage = Storage(("positions", name), data, data)
        elif i.dtype in ("int32", "int64") and "id" in i.source:
            data = torch.tensor(self.arithmetic.token_ids, dtype=torch.float64)
            storage = Storage(("ids", name), data, data)
        else:
            n = 1
            for s in i.size:
                n *= self._size(s)
            data = draw(seed_of(self.arithmetic.seed, "input", i.source), torch.arange(n))
            storage = Storage(("input", i.source, n), data, data)
        self.live[name] = storage
        return storage

    def _table(self, name: str) -> Storage:
        t = self.tables[name]
        width = 1
        for s in t.shape[1:]:
            width *= s
        raw = torch.frombuffer(bytearray(base64.b64decode(t.values)), dtype=torch.float32).double().view(len(t.rows), width)
        n = t.shape[0] * width
        if n > aten.MAX_ELEMENTS:
            raise UnsupportedOpError(f"table {name} is too large to evaluate")
        data = torch.full((t.shape[0], width), UNKNOWN, dtype=torch.float64)
        data[list(t.rows)] = raw
        return Storage(("table", name), data.view(-1), data.view(-1))

    def _contents(self, name: str) -> torch.Tensor:
        """A whole buffer in its own layout."""
        root, offset = self._root(name)
        b = self.buffers.get(name) or self.buffers.get(root)
        source = self._source(name)
        if isinstance(source, _Lazy) or b is None or not b.size:
            return source.memory if isinstance(source, Storage) else torch.empty(0)
        sizes, strides = [self._size(s) for s in b.size], [int(index_value(s, self.env)) for s in b.stride]
        return source.memory.as_strided(sizes, strides, offset)

    # -- anchors --------------------------------------------------------------------------------------------------------

    def _anchor(self, node: Node) -> None:
        args = dict(node.args)
        if node.op == "inductor.multi_output":
            self._pick(node, args)
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
            if not _buffers(arg):
                continue
            if slot < len(op.operands):
                self.operands[op.id, slot] = self._argument(arg)
                slot += 1
        canonical(self.operands, op, self.arithmetic.tokens)
        written = [b for n in ([rule.out] if rule and rule.out else node.mutates) for b in _buffers(args.get(n))] or list(node.outputs)
        for o in written:
            root, _ = self._root(o)
            b = self.buffers.get(root)
            if b is None or b.dtype is None or not b.size:
                continue
            val = self._output(op, b)
            self.live[root] = Storage(("anchor", val.id), val.data.reshape(-1), val.data.reshape(-1))
            self.values[op.id] = val

    def _pick(self, node: Node, args: dict[str, Any]) -> None:
        """One output of an extern call with several."""
        sources = _buffers(args.get("self"))
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
        memory = self.arithmetic.round(flat, b.dtype) if flat.is_floating_point() else flat
        self.live[root] = Storage(("extern", self.arithmetic.new(flat).id), memory, memory)

    def _aten(self, op: Op, node: Node, args: dict[str, Any]) -> None:
        """An ATen kernel called as it is, on what its operands hold in memory."""

        def decode(a: Any) -> Any:
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
            return [decode(x) for x in a] if isinstance(a, list | tuple) else a

        try:
            given = {k: decode(a) for k, a in args.items()}
            if any(isinstance(x, torch.Tensor) and x.is_floating_point() and bool(x.isnan().any()) for x in given.values()):
                raise UnsupportedOpError("an operand could not be evaluated")
            with torch.no_grad():
                result = aten.resolve(node.op)(**{k: x for k, x in given.items() if x is not None})
        except (UnsupportedOpError, RuntimeError, TypeError, ValueError, IndexError) as e:
            self.unsupported[op.id] = f"{node.op} could not be evaluated: {str(e).splitlines()[0]}"
            return
        results = [x for x in (result if isinstance(result, tuple | list) else [result]) if isinstance(x, torch.Tensor)]
        first = results[0].double() if results[0].is_floating_point() else results[0]
        self.values[op.id] = self.arithmetic.new(first)
        for o in node.outputs:
            self.results[o] = results
            if not isinstance(result, tuple | list):
                self._place(o, results[0])

    def _argument(self, arg: Any) -> torch.Tensor:
        if isinstance(arg, list | tuple):
            return torch.cat([self._argument(a).reshape(-1) for a in arg if _buffers(a)])
        name = arg["b"]
        if "size" in arg:
            _root, base = self._root(name)
            source = self._source(name)
            if isinstance(source, Storage):
                sizes = [self._size(s) for s in arg["size"]]
                strides = [int(index_value(s, self.env)) for s in arg["stride"]]
                return source.memory.as_strided(sizes, strides, base + int(index_value(str(arg.get("offset", "0")), self.env)))
        return self._contents(name)

    def _output(self, op: Op, b: Buffer) -> Val:
        """An anchor's output: one random block per checkpoint tensor of a merged GEMM, side by side."""
        shape = tuple(self._size(s) for s in b.size)
        segments = op.detail.get("segments")
        if op.target == "gemm" and segments:
            occurrence = op.key[-1]
            parts = [
                self.arithmetic.anchor(anchor_name(("gemm", c, occurrence)), (*shape[:-1], length), op.dtype).data
                for c, _, length in segments
            ]
            data = torch.cat(parts, -1)
            if data.shape == shape:
                key = ("merged", tuple(self.arithmetic.name(c) for c, _, _ in segments), occurrence, shape, op.dtype)
                return self.arithmetic.intern(key) or self.arithmetic.put(key, data)
        return self.arithmetic.anchor(anchor_name(op.key), shape, op.dtype)

    # -- loops ----------------------------------------------------------------------------------------------------------

    def _loop(self, node: Node) -> None:
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
        key = (node.body, tuple(inputs))
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
        new_id = self._number(("stored", old.id, content, role, offset, old.memory.numel()))
        if new_id not in self.storages:
            dtype = (self.buffers[name].dtype if name in self.buffers else None) or "float32"
            register, memory = old.register.clone(), old.memory.clone()
            flat = (index + offset).reshape(-1)
            value = data.double().expand(index.shape).reshape(-1)
            if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= register.numel()):
                raise CaptureFileError(f"a store to {name} is outside the buffer", where=f"graph {self.g}")
            if mode == "atomic_add":
                register, memory = (torch.nan_to_num(x).index_add(0, flat, value) for x in (register, memory))
            else:
                register[flat] = value
                memory[flat] = self.arithmetic.round(value, dtype)
            self.storages[new_id] = Storage(new_id, memory, register)
        self.live[root] = self.storages[new_id]

    def _interpret(self, body: Body, binding: dict[str, str], node: Node) -> tuple[dict[str, Val | str], list[Any]]:
        return _Interpreter(self, body, binding, node).run()


def single(x: Any) -> Any:
    """A floating operand in FP32: what depends on positions and tables only is computed as the engine computes it."""
    return x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def computed_tables(capture: InferenceGraph, tracer: Tracer, arithmetic: Arithmetic) -> dict[str, torch.Tensor]:
    """The tables that the engine's kernels compute from positions (rotary cosines in some models).

    Returns:
        Name of the table's op to its float64 content, in the kernel's own layout. Empty if there are none.
    """
    if not tracer.computed:
        return {}
    run = Run(capture, tracer, arithmetic, only=set(tracer.computed.values())).run()
    return {tracer.ops[i].name: run.values[i].data for i in tracer.computed if i in run.values}


@dataclass
class _Interpreter:
    run_: Run
    body: Body
    binding: dict[str, str]
    node: Node

    def run(self) -> tuple[dict[str, Val | str], list[Any]]:
        self.results: dict[str, Val | str] = {}
        self.stores: list[Any] = []
        self.identities: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []  # an identity is an address: it must stay taken
        self.pending: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.lanes: torch.Tensor | None = None
        """Inside a masked block: the lanes that are not masked out."""
        n = len(self.body.var_ranges)
        self.env: dict[str, Any] = dict(self.run_.env)
        self.shape: list[int] = []
        total = 1
        for d, (name, extent) in enumerate(self.body.var_ranges):
            size = self.run_._size(extent)
            total *= max(size, 1)
            self.shape.append(size)
            self.env[name] = torch.arange(size).view([-1 if i == d else 1 for i in range(n)])
        if total > aten.MAX_ELEMENTS:
            raise CaptureFileError("a loop of the capture is too large to evaluate", where=self.node.name)
        pointwise = len(self.body.sizes[0])
        self.reduced = tuple(range(pointwise, n))
        self.block(self.body.ops, {}, "")
        return self.results, self.stores

    def index(self, name: str) -> torch.Tensor:
        text = self.body.indexing.get(name)
        if text is None:
            raise CaptureFileError(f"no index expression called {name}", where=self.node.name)
        x = index_value(text, self.env)
        return x.long() if isinstance(x, torch.Tensor) else torch.full([1] * max(len(self.shape), 1), int(x))

    def block(self, ops: tuple[Any, ...], env: dict[str, Any], prefix: str) -> Any:
        last = None
        for name, target, args, kwargs in ops:
            last = self.op(prefix, name, target, args, kwargs, env)
        return last

    def op(self, prefix: str, name: str, target: str, args: Any, kwargs: Any, env: dict[str, Any]) -> Any:
        _run, _rounding = self.run_, self.run_.arithmetic

        def arg(a: Any) -> Any:
            if isinstance(a, dict):
                if "n" in a:
                    return env.get(a["n"])
                if "f" in a:
                    return float(a["f"])
                if "e" in a:
                    return index_value(a["e"], self.env)
                return a
            if isinstance(a, list | tuple):
                return [arg(x) for x in a]
            return a

        if target == "output":
            vals = [env[n] for a in args for n in references(a, "n") if n in env]
            return vals[0] if vals else None
        if target == "get_index":
            env[name] = self.index(args[0])
            return env[name]
        if target.startswith("set_indirect"):
            x = arg(args[0])
            symbol = target.replace("set_", "")
            self.env[symbol] = x.long() if isinstance(x, torch.Tensor) else x
            return None
        if target == "check_bounds":
            return None
        if target == "constant":
            c = arg(args[0])
            env[name] = torch.as_tensor(c, dtype=torch.float64 if isinstance(c, float) else None)
            return env[name]
        if target == "index_expr":
            x = arg(args[0])
            dtype = args[1].get("dtype", "int64") if len(args) > 1 and isinstance(args[1], dict) else "int64"
            env[name] = x.double() if dtype.startswith(("float", "bfloat")) else x
            return env[name]
        if target == "load":
            found = self.load(self.binding[args[0]["b"]], arg(args[1]))
            if self.lanes is not None and found.is_floating_point():
                found = torch.where(self.lanes, found, UNKNOWN)  # a masked-out lane reads what is never used
            env[name] = found
            return env[name]
        if target in ("store", "store_reduction"):
            value = arg(args[2])
            if value is None:
                return None
            index = arg(args[1])
            shape = np.broadcast_shapes(tuple(index.shape), tuple(value.shape))
            buffer = self.binding[args[0]["b"]]
            self.pending[buffer] = (index.expand(shape), value)
            mode = next((a for a in args[3:] if isinstance(a, str)), kwargs.get("mode") or "")
            identity = self.identities.get(id(value), 0)
            self.stores.append((args[0]["b"], index.expand(shape), value, mode if isinstance(mode, str) else "", identity))
            return value
        if target == "to_dtype":
            x = arg(args[0])
            dtype = next(
                (a["dtype"] for a in args if isinstance(a, dict) and "dtype" in a),
                kwargs.get("dtype", {}).get("dtype", "float32") if isinstance(kwargs.get("dtype"), dict) else "float32",
            )
            env[name] = self.cast(x, dtype, rounds=kwargs.get("use_compute_types", True) is False)
            return env[name]
        if target == "getitem":
            pair = arg(args[0])
            env[name] = pair[args[1]] if isinstance(pair, list | tuple) else pair
            return env[name]
        if target.startswith("masked_subblock"):
            mask, other = torch.as_tensor(arg(args[0])).bool(), arg(args[1])
            outer, self.lanes = self.lanes, mask if self.lanes is None else mask & self.lanes
            inner = self.block(self.body.subblocks.get(target, ()), dict(env), f"{target}.")
            self.lanes = outer
            if inner is None:
                return None
            fill = torch.as_tensor(float(other) if not isinstance(other, torch.Tensor) else other, dtype=torch.float64)
            env[name] = torch.where(mask, inner.double() if inner.is_floating_point() else inner, fill)
            return env[name]
        if target == "reduction":
            env[name] = self.reduction(prefix, name, args, arg)
            return env[name]
        operands = [arg(a) for a in args]
        if any(o is None for o in operands):
            self.results[prefix + name] = "an operand could not be evaluated"
            return None
        constant = (self.run_.g, self.node.name, prefix + name) in self.run_.tracer.constant
        result = loop_ops.apply(target, [single(o) for o in operands] if constant else operands)
        if result is None:
            self.results[prefix + name] = f"loop op {target} is not known"
            env[name] = None
            return None
        env[name] = self.keep(prefix + name, result.double() if constant and result.is_floating_point() else result, constant)
        return env[name]

    def keep(self, name: str, data: torch.Tensor, constant: bool = False) -> torch.Tensor:
        run = self.run_
        val = run.arithmetic.new(data)
        if run.replace is not None and data.is_floating_point() and not constant:
            val = run.replace(val)
        self.results[name] = val
        self.identities[id(val.data)] = val.id
        self.alive.append(val.data)
        return val.data

    def cast(self, x: Any, dtype: str, *, rounds: bool) -> Any:
        if x is None:
            return None
        if dtype == "bool":
            return x.bool() if isinstance(x, torch.Tensor) else bool(x)
        if dtype.startswith(("int", "uint")):
            return x.trunc().long() if x.is_floating_point() else x
        x = x.double()
        return self.run_.arithmetic.round(x, dtype) if rounds and dtype in LOW_PRECISION else x

    def reduction(self, prefix: str, name: str, args: Any, arg: Any) -> Any:
        kind = next((a for a in args if isinstance(a, str)), "")
        value = arg(args[-1])
        if value is None:
            return None
        if isinstance(value, list):
            self.results[prefix + name] = f"reduction {kind} of several values is not known"
            return None
        value = value.double() if value.dtype != torch.bool else value
        full = [max(a, b) for a, b in zip(self.shape, [1] * (len(self.shape) - value.dim()) + list(value.shape), strict=True)]
        for d in self.reduced:
            full[d] = self.shape[d]
        value = value.expand(full)
        result = loop_ops.reduce(kind, value, self.reduced)
        if result is None:
            self.results[prefix + name] = f"reduction {kind} is not known"
            return None
        if isinstance(result, tuple):
            self.results[prefix + name] = self.run_.arithmetic.new(result[0])
            return list(result)
        return self.keep(prefix + name, result)

    def load(self, buffer: str, index: torch.Tensor) -> torch.Tensor:
        run = self.run_
        source = run._source(buffer)
        if isinstance(source, _Lazy):
            return self.parameter(source, index)
        _root, offset = run._root(buffer)
        if buffer in self.pending:
            stored_index, value = self.pending[buffer]
            if stored_index.shape == index.shape and torch.equal(stored_index, index):
                dtype = (run.buffers[buffer].dtype if buffer in run.buffers else None) or "float32"
                return value if buffer in self.node.forwarded else run.arithmetic.round(value, dtype)
        data = source.register if buffer in self.node.forwarded else source.memory
        flat = index + offset
        if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= data.numel()):
            flat = flat.clamp(0, max(data.numel() - 1, 0))  # a masked-out lane may read outside
        out = data[flat]
        return out.long() if isinstance(source.id, tuple) and source.id[0] in ("positions", "ids") else out

    def parameter(self, source: _Lazy, index: torch.Tensor) -> torch.Tensor:
        p = source.parameter
        if len(p.segments) == 1 and p.segments[0].start == 0 and not p.segments[0].index:
            return self.run_.arithmetic.parameter(p.segments[0].checkpoint, index, source.dtype)
        strides = [1]
        for extent in reversed(p.shape[1:]):
            strides.insert(0, strides[0] * extent)
        out = torch.full(index.shape, UNKNOWN, dtype=torch.float64)
        for s in p.segments:
            at = (index // strides[s.dim]) % p.shape[s.dim]
            inside = (at >= s.start) & (at < s.start + s.length)
            local = (index - s.start * strides[s.dim]) if s.dim == 0 else index
            out = torch.where(inside, self.run_.arithmetic.parameter(s.checkpoint, local, source.dtype), out)
        return out
