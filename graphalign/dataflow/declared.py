"""Opaque ops whose inside a rule declares: each call becomes the loop that the kernel runs, and is evaluated and compared as one.

The vocabulary is closed; so far it has two functions. `reduce_add_rms_norm`: see `fused_norm`. `rope`: for every pair of elements x, y
of a head, and the row of the table (cosines, then sines) at the token's position, it stores x·cos − y·sin and y·cos + x·sin: products
and sum in FP32, one rounding at the store. A pair is (i, i + half) with `neox`, else (2i, 2i + 1).

A call that the declaration does not cover (another device, other settings, an unusual layout) stays opaque.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from graphalign.dataflow.fused_norm import expand_norm
from graphalign.dataflow.opaque import Computes, FusedNorm, OpaqueOp
from graphalign.ir.inference import Body, Buffer, Graph, InferenceGraph, Kernel, Node

DECLARED = "declared"
"""The kind of kernel that a declared call becomes."""


def expand(capture: InferenceGraph, rules: dict[str, OpaqueOp]) -> InferenceGraph:
    """The same capture, with loops in place of the calls that rules declare."""
    device = str(capture.header.target.get("device", ""))
    declared = {r.op: r.computes for r in rules.values() if r.computes is not None and r.computes.device in ("", device)}
    called = {n.op for g in capture.graphs for k in g.kernels for n in k.nodes if n.kind == "extern"}
    if not declared.keys() & called:
        return capture
    bodies = dict(capture.bodies)
    graphs = tuple(_Expander(g, declared, bodies).run() for g in capture.graphs)
    return capture.model_copy(update={"graphs": graphs, "bodies": bodies})


class _Expander:
    """One graph. What a call rotates in place gets a new buffer, which whatever comes later reads instead."""

    def __init__(self, graph: Graph, declared: dict[str, Computes | FusedNorm], bodies: dict[str, Body]) -> None:
        self.graph, self.declared, self.bodies = graph, declared, bodies
        self.buffers = {b.name: b for b in graph.buffers}
        self.inputs = {i.name: i for i in graph.inputs}
        self.added: list[Buffer] = []
        self.now: dict[str, str] = {}
        """Rotated buffer to the buffer that holds it now."""

    def run(self) -> Graph:
        """The graph with loops."""
        kernels: list[Kernel] = []
        for kernel in self.graph.kernels:
            nodes = tuple(self._current(n) for n in kernel.nodes)
            loops = self._loops(nodes[0]) if len(nodes) == 1 else None
            if loops is None:
                kernels.append(kernel.model_copy(update={"nodes": nodes}))
            else:
                kernels.append(Kernel(name=kernel.name, kind=DECLARED, generated=nodes[0].op, nodes=loops))
        exports = tuple(e.model_copy(update={"tensor": self._rename(e.tensor)}) for e in self.graph.exports)
        outputs = tuple(self.now.get(o, o) for o in self.graph.outputs)
        update = {"kernels": tuple(kernels), "buffers": (*self.graph.buffers, *self.added), "outputs": outputs, "exports": exports}
        return self.graph.model_copy(update=update)

    def _current(self, node: Node) -> Node:
        if not self.now:
            return node
        args = tuple((name, self._rename(value)) for name, value in node.args)
        names = {f: tuple(self.now.get(b, b) for b in getattr(node, f)) for f in ("buffers", "forwarded", "reloaded")}
        return node.model_copy(update={"args": args, **names})

    def _rename(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: self.now.get(v, v) if k == "b" else v for k, v in value.items()}
        return [self._rename(v) for v in value] if isinstance(value, list | tuple) else value

    def _loops(self, node: Node) -> tuple[Node, ...] | None:
        """The loops of one call; None if it stays opaque."""
        rule = self.declared.get(node.op) if node.kind == "extern" else None
        args = dict(node.args)
        if rule is None or any(args.get(name, value) != value for name, value in rule.only.items()):
            return None
        if isinstance(rule, FusedNorm):
            return self._norm(node, rule)
        head, neox = args.get(rule.head_size), args.get(rule.neox)
        positions, table = (self.inputs.get(_buffer(args.get(a))) for a in (rule.positions, rule.table))
        if not isinstance(head, int) or not isinstance(neox, bool) or positions is None or table is None:
            return None
        rotary = table.size[-1] if len(table.size) == 2 and table.size[-1].isdecimal() else "0"
        if len(positions.size) != 1 or not 0 < int(rotary) <= head or int(rotary) % 2:
            return None
        found = [self._rows(a, head) for name in rule.values if (a := args.get(name)) is not None]
        rows = [r for r in found if r is not None]
        if len(rows) < len(found) or not rows:
            return None
        loops: list[Node] = []
        fresh: dict[str, str] = {}

        def loop(body: Body, buffers: tuple[str, ...]) -> None:
            self.bodies[key := f"declared {hash_of(body)}"] = body
            loops.append(Node(name=f"{node.name}.{len(loops)}", kind="loop", outputs=buffers[-1:], module=node.module,
                              origins=node.origins, source=node.source, body=key, buffers=buffers))  # fmt: skip

        for r in rows:
            if r.base not in fresh:
                fresh[r.base] = f"{node.name}.{r.base}"
                new = self.buffers[r.base].model_copy(update={"name": fresh[r.base], "layout": "FixedLayout"})
                self.buffers[new.name] = new
                self.added.append(new)
                covered = sum(x.heads * int(rotary) for x in rows if x.base == r.base)
                if r.flat or covered != r.stride:  # what is not rotated is handed on as it is
                    loop(_copy(r), (r.base, new.name))
            loop(_rope(r, head, int(rotary), neox), (r.base, positions.name, table.name, fresh[r.base]))
        self.now = {k: fresh.get(v, v) for k, v in self.now.items()} | fresh
        return tuple(loops)

    def _norm(self, node: Node, rule: FusedNorm) -> tuple[Node, ...] | None:
        made = expand_norm(self.graph, node, rule, {**self.inputs, **self.buffers})
        if made is None:
            return None
        self.bodies |= made.bodies
        self.buffers |= {b.name: b for b in made.buffers}
        self.added += made.buffers
        self.now = {k: made.now.get(v, v) for k, v in self.now.items()} | made.now
        return tuple(made.nodes)

    def _rows(self, arg: Any, head: int) -> _Rows | None:
        """A tensor of rows of heads, in a buffer of nothing but rows or in a flat one; None for anything else."""
        b = self.buffers.get(_buffer(arg))
        if b is None or b.view_of is not None:
            return None
        size, stride = ([str(x) for x in arg.get(name, own)] for name, own in (("size", b.size), ("stride", b.stride)))
        offset = str(arg.get("offset", "0"))
        if len(size) not in (2, 3) or len(stride) != len(size) or not all(x.isdecimal() for x in (*size[1:], *stride, offset)):
            return None
        heads, rest = divmod(int(size[1]) * (int(size[2]) if len(size) == 3 else 1), head)
        inner = ["1"] if len(size) == 2 else [str(head), "1"]
        if rest or stride[1:] != inner or (len(size) == 3 and size[2] != str(head)):
            return None
        rows = _Rows(b.name, size[0], heads, int(stride[0]), int(offset), b.size[0] if len(b.size) == 1 else "")
        if rows.flat:
            return rows if b.stride == ("1",) else None
        return rows if b.size[0] == size[0] and _width(b) == rows.stride and rows.offset + heads * head <= rows.stride else None


@dataclass(frozen=True)
class _Rows:
    base: str
    tokens: str
    heads: int
    stride: int
    """Elements of the buffer per token."""
    offset: int
    flat: str
    """Number of elements of a buffer of one dimension (a slice that Inductor copied with its gaps), else empty."""


def _width(b: Buffer) -> int:
    """Elements per row of a contiguous buffer, -1 for another."""
    width = 1
    for n, s in zip(reversed(b.size[1:]), reversed(b.stride[1:]), strict=True):
        if not n.isdecimal() or s != str(width):
            return -1
        width *= int(n)
    return width if b.stride[0] == str(width) else -1


def _buffer(arg: Any) -> str:
    return str(arg["b"]) if isinstance(arg, dict) and "b" in arg else ""


def hash_of(body: Body) -> str:
    """A key that equal bodies share."""
    return hashlib.sha256(body.model_dump_json().encode()).hexdigest()[:16]


def _op(name: str, target: str, *args: Any) -> tuple[Any, ...]:
    """An op of a loop body; a plain text is a node's name."""
    return (name, target, [{"n": a} if isinstance(a, str) and target != "get_index" else a for a in args], {})


def _copy(r: _Rows) -> Body:
    """Buffers: old, new."""
    ops = (
        _op("at", "get_index", "at"),
        _op("load", "load", {"b": "b0"}, "at"),
        _op("store", "store", {"b": "b1"}, "at", "load", None),
        _op("output", "output", "store"),
    )
    if r.flat:
        return Body(var_ranges=(("p0", r.flat),), sizes=((r.flat,), ()), indexing={"at": "p0"}, ops=ops)
    extents = (r.tokens, str(r.stride))
    return Body(var_ranges=(("p0", extents[0]), ("p1", extents[1])), sizes=(extents, ()), indexing={"at": f"{r.stride}*p0 + p1"}, ops=ops)


def _rope(r: _Rows, head: int, rotary: int, neox: bool) -> Body:
    """Buffers: old, positions, table, new."""
    half = rotary // 2
    base = f"{r.stride}*p0 + {head}*p1 + {r.offset}"
    x, y = (f"{base} + p2", f"{base} + p2 + {half}") if neox else (f"{base} + 2*p2", f"{base} + 2*p2 + 1")
    cos = f"{rotary}*indirect0 + p2"
    indexing = {"at_x": x, "at_y": y, "token": "p0", "at_cos": cos, "at_sin": f"{cos} + {half}"}
    ops = (
        *(_op(name, "get_index", name) for name in ("at_x", "at_y", "token")),
        _op("x", "load", {"b": "b0"}, "at_x"),
        _op("y", "load", {"b": "b0"}, "at_y"),
        _op("position", "load", {"b": "b1"}, "token"),
        _op("set_indirect0", "set_indirect0", "position"),
        _op("at_cos", "get_index", "at_cos"),
        _op("cos", "load", {"b": "b2"}, "at_cos"),
        _op("at_sin", "get_index", "at_sin"),
        _op("sin", "load", {"b": "b2"}, "at_sin"),
        _op("mul", "mul", "x", "cos"),
        _op("mul_1", "mul", "y", "sin"),
        _op("sub", "sub", "mul", "mul_1"),
        _op("mul_2", "mul", "y", "cos"),
        _op("mul_3", "mul", "x", "sin"),
        _op("add", "add", "mul_2", "mul_3"),
        _op("store", "store", {"b": "b3"}, "at_x", "sub", None),
        _op("store_1", "store", {"b": "b3"}, "at_y", "add", None),
        _op("output", "output", "store_1"),
    )
    extents = (r.tokens, str(r.heads), str(half))
    ranges = tuple(zip(("p0", "p1", "p2"), extents, strict=True))
    return Body(var_ranges=ranges, sizes=(extents, ()), indexing=indexing, ops=ops)
