"""Evaluating the training graph: the recorded ATen ops, in float64, on shared random anchor outputs.

What depends on positions, token ids and buffers only (rotary tables, masks) is executed natively in its recorded dtypes,
because a table's FP32 angles at position 32767 are far from their float64 counterparts, and the engine computed its own
table in FP32 too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphalign.errors import CaptureFileError, UnsupportedOpError
from graphalign.evaluate import aten
from graphalign.evaluate.trace_training import Tracer, decode_constant, is_identity
from graphalign.evaluate.values import Arithmetic, Val, by_expert, round_to
from graphalign.ir.args import references
from graphalign.ir.dataflow import LOW_PRECISION, Op
from graphalign.ir.training import Node, TrainingGraph

Replace = Callable[[Op, Val], Val]
ROUTING = 2
"""A composite's routing: weights and expert numbers."""


@dataclass(frozen=True)
class Edits:
    """Roundings to change while evaluating: operands, as (consumer op, slot)."""

    keep: frozenset[tuple[int, int]] = frozenset()
    """Operands read unrounded."""
    round: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Operands rounded once more, to this format."""

    def touches(self, at: tuple[int, int]) -> bool:
        """Whether an operand is edited."""
        return at in self.keep or at in self.round


@dataclass
class Run:
    """One evaluation. After `run()`, `values` holds every op's result before any store, by op index."""

    capture: TrainingGraph
    tracer: Tracer
    arithmetic: Arithmetic
    snapped: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Table op index to the values both sides use for it."""
    replace: Replace | None = None
    edits: Edits = field(default_factory=Edits)
    values: dict[int, Val] = field(default_factory=dict)
    operands: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Operands of anchors and outputs, as the consumer reads them: (op, slot) to tensor."""
    unsupported: dict[int, str] = field(default_factory=dict)
    """Op index to why it could not be evaluated."""

    def run(self) -> Run:
        """Evaluate everything, in order."""
        self.native = native_constants(self.capture, self.tracer, self.arithmetic)
        self.env: dict[int, Val] = {}
        self.node_of: dict[int, int] = self.tracer.origin
        self.op_value: dict[int, int] = {}
        for n, node in enumerate(self.capture.nodes):
            op_id = self.tracer.op_of_node.get(n)
            if op_id is None:
                continue
            op = self.tracer.ops[op_id]
            outs = [o.id for o in node.outputs if o is not None]
            if op.kind == "anchor":
                self._record_operands(op, node)
                shape = tuple(node.outputs[0].shape) if node.outputs and node.outputs[0] else ()
                val = self._anchor(op, shape, node)
                self.values[op_id] = val
                self.env.update((o, val) for o in outs)
            else:
                self._compute(op, node, outs)
        for op in self.tracer.ops:
            if op.kind == "output" and (result := self._try(op.key[0])) is not None:
                self.operands[op.id, 0] = result.data
        return self

    def _anchor(self, op: Op, shape: tuple[int, ...], node: Node) -> Val:
        if op.target == "attention" and aten.base(node.op) in aten.ATTENTIONS and len(shape) == 4:
            # the kernel gives [batch, heads, tokens, size]; an anchor's values are token-major on both sides
            b, h, t, d = shape
            val = self.arithmetic.anchor(anchor_name(op.key), (b, t, h, d), op.dtype)
            key = ("heads first", val.id)
            return self.arithmetic.intern(key) or self.arithmetic.put(key, val.data.transpose(1, 2))
        return self.arithmetic.anchor(anchor_name(op.key), shape, op.dtype)

    def _record_operands(self, op: Op, node: Node) -> None:
        values = list(references(node.args, "v"))
        slot = 0
        for v in values:
            edges = self.tracer.refs.get(v) or (self.tracer.edges(v) if v in self.tracer.constant else ())
            if slot < len(op.operands) and edges == op.operands[slot]:
                val = self._operand(op, slot, v)
                if val is not None:
                    self.operands[op.id, slot] = val.data
                slot += 1
        canonical(self.operands, op, self.arithmetic.tokens)

    def _operand(self, op: Op, slot: int, value: int) -> Val | None:
        """What `op` reads at `slot`, with the edits applied."""
        try:
            if (op.id, slot) in self.edits.keep:
                return Val(-1, self._unrounded(value))
            val = self.value(value)
        except UnsupportedOpError as e:
            self.unsupported[op.id] = str(e)
            return None
        if (fmt := self.edits.round.get((op.id, slot))) is not None:
            return Val(-1, round_to(val.data, fmt))
        return val

    def _try(self, value: int) -> Val | None:
        try:
            return self.value(value)
        except UnsupportedOpError:
            return None

    def value(self, v: int) -> Val:
        """The content of a value as a reader sees it, computed on demand through casts and views."""
        if v in self.env:
            return self.env[v]
        if v in self.tracer.weights:
            name = self.tracer.weights[v]
            i = next(i for i in self.capture.inputs if i.value.id == v)
            n = torch.Size(i.value.shape).numel()
            if n > aten.MAX_ELEMENTS:
                raise UnsupportedOpError(f"{name} is too large to be evaluated element by element", where=str(i.value.shape))
            key = ("parameter", self.arithmetic.name(name), i.value.shape, i.value.dtype)
            val = self.arithmetic.intern(key) or self.arithmetic.put(
                key, self.arithmetic.parameter(name, torch.arange(n), i.value.dtype).view(i.value.shape)
            )
        elif v in self.native:
            val = self._constant(v)
        else:
            n = self.node_of.get(v, -1)
            if n < 0:
                raise CaptureFileError(f"the capture reads value {v}, which nothing computes", where="training capture")
            op = self.tracer.op_of_node.get(n)
            if op is not None:
                raise UnsupportedOpError(f"{self.capture.nodes[n].op} was not evaluated")
            val = self._transparent(v, n, self.value, rounds=True)
        self.env[v] = val
        return val

    def _constant(self, v: int) -> Val:
        table = self.tracer.table_of_value.get(v)
        if table is not None and table in self.snapped:
            return self.arithmetic.new(self.snapped[table])
        data = self.native[v]
        if self._cast_of_table(v):
            return self._transparent(v, self.node_of[v], self.value, rounds=True)
        data = data.double() if data.is_floating_point() else data
        return self.arithmetic.new(data)

    def _cast_of_table(self, v: int) -> bool:
        """Whether a constant is a cast or view of a table, not a table itself."""
        tables = self.tracer.table_of_value
        return v not in tables and v in self.node_of and any(u in tables for u in self._ancestors(v))

    def _ancestors(self, v: int) -> Iterable[int]:
        while v in self.node_of and aten.base(self.capture.nodes[self.node_of[v]].op) in aten.TRANSPARENT:
            tensors = list(references(self.capture.nodes[self.node_of[v]].args, "v"))
            if len(tensors) != 1:
                return
            v = tensors[0]
            yield v

    def _unrounded(self, v: int) -> torch.Tensor:
        """The content of a value had nothing been rounded since its producers computed it."""
        n = self.node_of.get(v, -1)
        op = self.tracer.op_of_node.get(n)
        first = self.capture.nodes[n].outputs[0] if op is not None else None
        if op is not None and first is not None and first.id == v:
            return self.values[op].data
        if n < 0 or op is not None or (v in self.native and not self._cast_of_table(v)):
            return self.value(v).data
        return self._transparent(v, n, lambda u: Val(-1, self._unrounded(u)), rounds=False).data

    def _transparent(self, v: int, n: int, read: Callable[[int], Val], *, rounds: bool) -> Val:
        node = self.capture.nodes[n]
        name = aten.base(node.op)
        position = next(i for i, o in enumerate(node.outputs) if o is not None and o.id == v)
        out = node.outputs[position]
        assert out is not None
        tensors = list(references(node.args, "v"))
        if name == "embedding" and tensors and tensors[0] in self.tracer.weights:
            return self._embedding(tensors[0], tensors[1], out.shape)
        if name == "copy":
            source = read(tensors[1])
            return Val(source.id, self.arithmetic.round(source.data.expand(out.shape), out.dtype))
        args = {u: read(u) for u in tensors}
        if name in (
            "_to_copy",
            "to",
            "clone",
            "contiguous",
            "detach",
            "alias",
            "dropout",
            "native_dropout",
            "lift_fresh",
            "positive",
        ) or is_identity(name, node):
            val = args[tensors[0]]
            if out.dtype.startswith(("float", "bfloat")) != val.data.is_floating_point():
                val = Val(-1, val.data.double() if not val.data.is_floating_point() else val.data.to(getattr(torch, out.dtype)))
            if not (rounds and self.arithmetic.rounds and out.dtype in LOW_PRECISION):
                return val
            return Val(-1, self.arithmetic.round(val.data, out.dtype))
        key = ("aten", node.op, repr(node.args if not tensors else _shape_args(node.args, args)), repr(node.kwargs), position)
        memo = all(a.id >= 0 for a in args.values()) and not self.arithmetic.rounds
        if memo and (found := self.arithmetic.intern(key)) is not None:
            return found
        result = call(node, {u: a.data for u, a in args.items()})
        data = result[position] if isinstance(result, tuple | list) else result
        return self.arithmetic.put(key, data) if memo else Val(-1, self.arithmetic.round(data, out.dtype) if rounds else data)

    def _embedding(self, weight: int, ids: int, shape: tuple[int, ...]) -> Val:
        i = next(i for i in self.capture.inputs if i.value.id == weight)
        width = i.value.shape[-1]
        rows = self.native[ids].reshape(-1, 1).long()
        data = self.arithmetic.parameter(i.name, rows * width + torch.arange(width), i.value.dtype)
        return self.arithmetic.new(data.view(shape))

    def _compute(self, op: Op, node: Node, outs: list[int]) -> None:
        slot, read = 0, []
        for v in self.tracer.operand_values(node):
            if self.tracer.edges(v):
                read.append(self._operand(op, slot, v))
                slot += 1
            else:
                read.append(self._try(v))
        ordered = [a for a in read if a is not None]
        if len(ordered) < len(read):
            self.unsupported.setdefault(op.id, "an operand could not be evaluated")
            return
        memo = all(a.id >= 0 for a in ordered) and not self.arithmetic.rounds
        key = ("aten", node.op, repr(_positional(node, ordered)))
        try:
            found = [self.arithmetic.intern((*key, k)) for k in range(len(node.outputs))] if memo else [None]
            if all(x is not None for x in found):
                results = [x for x in found if x is not None]
            else:
                result = call(node, [a.data for a in ordered])
                tensors = list(result) if isinstance(result, tuple | list) else [result]
                results = [self.arithmetic.put((*key, k), x) if memo else Val(-1, x) for k, x in enumerate(tensors)]
        except UnsupportedOpError as e:
            self.unsupported[op.id] = str(e)
            return
        val = results[0] if self.replace is None else self.replace(op, results[0])
        self.values[op.id] = val
        for o, x in zip(node.outputs, [val, *results[1:]], strict=False):
            if o is not None:
                rounds = self.arithmetic.rounds and o.dtype in LOW_PRECISION and x.data.is_floating_point()
                self.env[o.id] = Val(-1, self.arithmetic.round(x.data, o.dtype)) if rounds else x


def canonical(operands: dict[tuple[int, int], torch.Tensor], op: Op, tokens: int) -> None:
    """Put a composite's operands in a form that both sides share: experts in order, a core's elements sorted per token."""
    slots = op.detail.get("routing", ())
    if len(slots) == ROUTING and all((op.id, s) in operands for s in slots):
        w, i = (operands[op.id, s] for s in slots)
        if w.numel() == i.numel() and w.numel() % tokens == 0:
            operands[op.id, slots[0]], operands[op.id, slots[1]] = by_expert(w, i, tokens)
    if op.detail.get("own"):
        for slot in range(len(op.operands)):
            data = operands.get((op.id, slot))
            axis = next((d for d, n in enumerate(data.shape) if n == tokens), None) if data is not None else None
            if data is not None and axis is not None:
                operands[op.id, slot] = data.movedim(axis, 0).reshape(tokens, -1).sort(-1).values


def anchor_name(key: tuple[Any, ...]) -> str:
    """The name an anchor's random output hangs on: kind, checkpoint names, occurrence."""
    return "|".join(str(k) for k in key)


def native_constants(capture: TrainingGraph, tracer: Tracer, arithmetic: Arithmetic) -> dict[int, torch.Tensor]:
    """Everything that depends on positions, token ids and buffers only, executed in its recorded dtypes.

    Returns:
        Value id to tensor.
    """
    env: dict[int, torch.Tensor] = {}
    for i in capture.inputs:
        if i.kind == "input":
            ids = arithmetic.positions if "position" in i.name else arithmetic.token_ids
            dtype = getattr(torch, i.value.dtype)
            if torch.Size(i.value.shape).numel() == len(ids):
                env[i.value.id] = torch.tensor(ids, dtype=dtype).view(i.value.shape)
        elif i.data is not None:
            env[i.value.id] = decode_constant(i.data, i.value.dtype, i.value.shape)
    for node in capture.nodes:
        outs = [o for o in node.outputs if o is not None]
        if not outs or not all(o.id in tracer.constant for o in outs):
            continue
        tensors = [*references(node.args, "v"), *(v for a in node.kwargs.values() for v in references(a, "v"))]
        if not all(v in env for v in tensors):
            continue
        try:
            result = call(node, [env[v] for v in tensors], native=True)
        except UnsupportedOpError:
            continue
        results = result if isinstance(result, tuple | list) else [result]
        for o, x in zip(node.outputs, results, strict=False):
            if o is not None and isinstance(x, torch.Tensor):
                env[o.id] = x
    return env


def call(node: Node, tensors: Mapping[int, torch.Tensor] | list[torch.Tensor], *, native: bool = False) -> Any:
    """Run one recorded op on given tensors.

    Args:
        node: the recorded op.
        tensors: by value id, or in the order the arguments refer to them.
        native: keep recorded dtypes; otherwise floating dtype arguments become float64.

    Raises:
        UnsupportedOpError: outside the closed vocabulary, or torch refuses.
    """
    queue = iter(tensors) if isinstance(tensors, list) else None

    def decode(a: Any) -> Any:
        if isinstance(a, dict):
            if "v" in a:
                return next(queue) if queue is not None else tensors[a["v"]]
            if "dtype" in a:
                dtype = getattr(torch, a["dtype"], None)
                if not isinstance(dtype, torch.dtype):
                    raise UnsupportedOpError(f"unknown dtype {a['dtype']!r}", where=node.op)
                return dtype if native or not dtype.is_floating_point else torch.float64
            if "f" in a:
                return float(a["f"])
            if "device" in a:
                return torch.device("cpu")
            return None
        if isinstance(a, list | tuple):
            return [decode(x) for x in a]
        return a

    for o in node.outputs:
        if o is not None and torch.Size(o.shape).numel() > aten.MAX_ELEMENTS:
            raise UnsupportedOpError(f"{node.op} makes a tensor too large to evaluate", where=str(o.shape))
    overload = aten.resolve(node.op)
    args = [decode(a) for a in node.args]
    kwargs = {
        k: x
        for k, a in node.kwargs.items()
        if (x := decode(a)) is not None and k not in ("pin_memory", "layout", "memory_format", "non_blocking")
    }
    if not native and aten.base(node.op) in ("_softmax", "_log_softmax"):
        args[-1] = False
    if aten.base(node.op) in ("as_strided", "as_strided_scatter") and args and isinstance(args[0], torch.Tensor):
        args[0] = args[0].contiguous()  # the recorder means indices into the flattened argument
    if aten.base(node.op) in ("view", "_unsafe_view") and len(args) > 1 and isinstance(args[1], list):
        overload = torch.ops.aten.reshape.default  # an evaluated value need not have the recorded strides
    if aten.base(node.op) in aten.FACTORIES and any(
        isinstance(x, int) and abs(x) > aten.MAX_ELEMENTS for a in args for x in (a if isinstance(a, list) else [a])
    ):
        raise UnsupportedOpError(f"{node.op} makes a tensor too large to evaluate")
    try:
        with torch.no_grad():
            return overload(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as e:
        raise UnsupportedOpError(f"{node.op} could not be evaluated: {str(e).splitlines()[0]}") from None


def _shape_args(args: Any, vals: Mapping[int, Val]) -> Any:
    if isinstance(args, dict):
        return ("val", vals[args["v"]].id) if "v" in args else tuple(args.items())
    if isinstance(args, list | tuple):
        return tuple(_shape_args(a, vals) for a in args)
    return args


def _positional(node: Node, vals: list[Val]) -> Any:
    queue = iter(vals)

    def go(a: Any) -> Any:
        if isinstance(a, dict):
            return ("val", next(queue).id) if "v" in a else tuple(a.items())
        if isinstance(a, list | tuple):
            return tuple(go(x) for x in a)
        return a

    return go(list(node.args)), tuple((k, go(v)) for k, v in node.kwargs.items())
