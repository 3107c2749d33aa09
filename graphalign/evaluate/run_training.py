"""Evaluating the training graph: the recorded ATen ops, in float64, on shared random anchor outputs.

What depends on positions, token ids and buffers only (rotary tables, masks) is executed natively in its recorded dtypes,
because a table's FP32 angles at position 32767 are far from their float64 counterparts, and the engine computed its own
table in FP32 too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphalign.dataflow.identity import anchor_name
from graphalign.dataflow.trace_training import Tracer, decode_constant, is_identity
from graphalign.errors import CaptureFileError, UnsupportedOpError
from graphalign.evaluate import aten
from graphalign.evaluate.shards import Part
from graphalign.evaluate.values import Arithmetic, Val, by_expert, round_to
from graphalign.ir.args import references
from graphalign.ir.dataflow import LOW_PRECISION, Op
from graphalign.ir.training import Node, TrainingGraph

Replace = Callable[[Op, Val], Val]
ROUTING = 2
"""A composite's routing: weights and expert numbers."""


Arranged = dict[tuple[int, int], tuple[int, torch.Tensor]]
"""Operand of an anchor to its axis of tokens, and, for each token, the places of its elements in ascending order of value."""


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
    arranged: Arranged = field(default_factory=dict)
    """For operands that were sorted, see `canonical`."""
    unsupported: dict[int, str] = field(default_factory=dict)
    """Op index to why it could not be evaluated."""
    native: dict[int, torch.Tensor] | None = None
    """`native_constants`, if known already."""
    memo: dict[object, Val] | None = field(default_factory=dict)
    """Results by what they were computed from; None: nothing is remembered, for a short evaluation over a finished one."""

    def __post_init__(self) -> None:
        self.inputs = {i.value.id: i for i in self.capture.inputs}
        self.env: dict[int, Val] = {}
        """Value id to what it is."""
        self.node_of = self.tracer.origin
        self._lists: dict[object, list[Val]] = {}

    def run(self) -> Run:
        """Evaluate everything, in order."""
        if self.native is None:
            self.native = native_constants(self.capture, self.tracer, self.arithmetic)
        for n, node in enumerate(self.capture.nodes):
            op_id = self.tracer.op_of_node.get(n)
            if op_id is None:
                continue
            op = self.tracer.ops[op_id]
            outs = [o.id for o in node.outputs if o is not None]
            if op.kind == "anchor":
                self._record_operands(op, n)
                shape = tuple(node.outputs[0].shape) if node.outputs and node.outputs[0] else ()
                val = self._anchor(op, shape, node)
                self.values[op_id] = val
                self.env.update((o, val) for o in outs)
            else:
                self._compute(op, n, outs)
        for op in self.tracer.ops:
            if op.kind == "output" and (result := self._try(op.key[0])) is not None:
                self.operands[op.id, 0] = result.data
        return self

    def _anchor(self, op: Op, shape: tuple[int, ...], node: Node) -> Val:
        heads_first = op.detail.get("heads_first") or (op.target == "attention" and aten.base(node.op) in aten.ATTENTIONS)
        if heads_first and len(shape) == 4:
            # the kernel gives [batch, heads, tokens, size]; an anchor's values are token-major on both sides
            b, h, t, d = shape
            val = self._own(op, self.arithmetic.anchor(anchor_name(op.key), (b, t, h, d), op.dtype))
            key = ("heads first", val.id)
            return self.arithmetic.intern(key) or self.arithmetic.put(key, val.data.transpose(1, 2))
        name = anchor_name(op.key)
        val = self._own(op, self.arithmetic.anchor(name, shape, op.dtype))
        if (factor := self.arithmetic.factors.get(name)) is not None:
            return self._remember(("scaled", val.id, factor), lambda: val.data * factor)
        return val

    def _logits(self, head: int) -> Val:
        """What the last GEMM gives before its kernel rounds: code behind the model can have the logits in FP32."""
        op = replace(self.tracer.ops[head], dtype="float32")
        node = self.capture.nodes[op.detail["node"]]
        return self._anchor(op, tuple(node.outputs[0].shape) if node.outputs and node.outputs[0] else (), node)

    def _own(self, op: Op, val: Val) -> Val:
        """An anchor's output, as far as the engine's rank computes it; heads come before the last dimension."""
        part = self.arithmetic.shards.output(op)
        return val if part is None else self._hidden(val, part, val.data.dim() - (2 if op.target == "attention" else 1))

    def _hidden(self, val: Val, part: Part, dim: int) -> Val:
        return self._remember(("own", val.id, part, dim), lambda: part.hide(val.data, dim))

    def _record_operands(self, op: Op, n: int) -> None:
        for slot, v in self.tracer.slots(n):
            val = self._operand(op, slot, v)
            if val is not None:
                self.operands[op.id, slot] = val.data
        canonical(self.operands, op, self.arithmetic.tokens, self.arranged)

    def _operand(self, op: Op, slot: int, value: int) -> Val | None:
        """What `op` reads at `slot`, with the edits applied."""
        try:
            if (op.id, slot) in self.edits.keep:
                return self.unrounded(value)
            val = self.value(value)
        except UnsupportedOpError as e:
            self.unsupported[op.id] = str(e)
            return None
        if (fmt := self.edits.round.get((op.id, slot))) is not None:
            return self._remember(("edited", val.id, fmt), lambda: round_to(val.data, fmt))
        return val

    def _remember(self, key: object, compute: Callable[[], torch.Tensor]) -> Val:
        """A result; looked up if it was computed before. The key says from what, by identities."""
        if self.memo is None:
            return Val(-1, compute())
        if not self.arithmetic.share or (known := self.memo.get(key)) is None:
            known = self.memo[key] = self._settled(compute())
        return known

    def _settled(self, data: torch.Tensor) -> Val:
        """A computed value. Content counts where values round: the residual stream comes back to what it was (`stream_term`)."""
        return self.arithmetic.settle(data) if self.arithmetic.rounds else self.arithmetic.new(data)

    def _rounded(self, val: Val, dtype: str) -> Val:
        """A value as it is stored in `dtype`."""
        if not self.arithmetic.rounds or dtype not in LOW_PRECISION or not val.data.is_floating_point():
            return val

        def compute() -> torch.Tensor:
            data = self.arithmetic.round(val.data, dtype)
            return val.data if torch.equal(data, val.data) else data

        return self._remember(("rounded", val.id, dtype), compute)

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
            name, i = self.tracer.weights[v], self.inputs[v]
            n = torch.Size(i.value.shape).numel()
            if n > aten.MAX_ELEMENTS:
                raise UnsupportedOpError(f"{name} is too large to be evaluated element by element", where=str(i.value.shape))
            key = ("parameter", self.arithmetic.name(name), i.value.shape, i.value.dtype)
            val = self.arithmetic.intern(key) or self.arithmetic.put(
                key, self.arithmetic.parameter(name, torch.arange(n), i.value.dtype).view(i.value.shape)
            )
            for dim, part in self.arithmetic.shards.parameters.get(name, {}).items():
                val = self._hidden(val, part, dim)
        elif v in self.constants:
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

    @property
    def constants(self) -> Mapping[int, torch.Tensor]:
        """What depends on positions, token ids and buffers only, by value id."""
        return self.native or {}

    def _constant(self, v: int) -> Val:
        table = self.tracer.table_of_value.get(v)
        if table is not None and table in self.snapped:
            return self.arithmetic.settle(self.snapped[table])
        if self._cast_of_table(v):
            return self._transparent(v, self.node_of[v], self.value, rounds=True)
        data = self.constants[v]
        return self.arithmetic.settle(
            data.double() if data.is_floating_point() else data.to(torch.complex128) if data.is_complex() else data
        )

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

    def unrounded(self, v: int) -> Val:
        """The content of a value had nothing been rounded since its producers computed it."""
        n = self.node_of.get(v, -1)
        op = self.tracer.op_of_node.get(n)
        first = self.capture.nodes[n].outputs[0] if op is not None else None
        if op is not None and first is not None and first.id == v:
            return self.values[op] if op != self.tracer.head else self._logits(op)
        if n < 0 or op is not None or (v in self.constants and not self._cast_of_table(v)):
            return self.value(v)
        return self._transparent(v, n, self.unrounded, rounds=False)

    def _transparent(self, v: int, n: int, read: Callable[[int], Val], *, rounds: bool) -> Val:
        node = self.capture.nodes[n]
        name = aten.base(node.op)
        position = next(i for i, o in enumerate(node.outputs) if o is not None and o.id == v)
        out = node.outputs[position]
        assert out is not None
        tensors = self.tracer.reads(n)
        if name == "embedding" and tensors and tensors[0] in self.tracer.weights:
            return self._embedding(tensors[0], tensors[1], out.shape)
        if name == "copy":
            source = read(tensors[1])
            if source.data.shape != out.shape:
                source = self._remember(("expanded", source.id, out.shape), lambda: read(tensors[1]).data.expand(out.shape))
            return self._rounded(source, out.dtype)
        args = {u: read(u) for u in tensors}
        if name in CASTS or is_identity(name, node):
            val = args[tensors[0]]
            if out.dtype.startswith(("float", "bfloat")) != val.data.is_floating_point():
                val = self._remember(("cast", val.id, out.dtype), lambda: _cast(args[tensors[0]].data, out.dtype))
            return self._rounded(val, out.dtype) if rounds else val
        key = (self.tracer.signature(n), position, tuple(args[u].id for u in tensors))

        def compute() -> torch.Tensor:
            result = call(node, {u: a.data for u, a in args.items()})
            made: torch.Tensor = result[position] if isinstance(result, tuple | list) else result
            return made

        result = self._remember(key, compute)
        return self._rounded(result, out.dtype) if rounds else result

    def _embedding(self, weight: int, ids: int, shape: tuple[int, ...]) -> Val:
        i = self.inputs[weight]
        width = i.value.shape[-1]
        rows = self.constants[ids].reshape(-1, 1).long()
        data = self.arithmetic.parameter(i.name, rows * width + torch.arange(width), i.value.dtype)
        return self.arithmetic.settle(data.view(shape))

    def _compute(self, op: Op, n: int, outs: list[int]) -> None:
        node = self.capture.nodes[n]
        read = [self._try(v) if slot is None else self._operand(op, slot, v) for slot, v in self.tracer.op_slots(n)]
        ordered = [a for a in read if a is not None]
        if len(ordered) < len(read):
            self.unsupported.setdefault(op.id, "an operand could not be evaluated")
            return
        try:
            results = self._results(n, ordered)
        except UnsupportedOpError as e:
            self.unsupported[op.id] = str(e)
            return
        val = results[0] if self.replace is None else self.replace(op, results[0])
        self.values[op.id] = val
        for o, x in zip(node.outputs, [val, *results[1:]], strict=False):
            if o is not None:
                self.env[o.id] = self._rounded(x, o.dtype)

    def _results(self, n: int, operands: list[Val]) -> list[Val]:
        """All results of an op."""
        key = (self.tracer.signature(n), tuple(a.id for a in operands))
        if self.memo is not None and self.arithmetic.share and key in self._lists:
            return self._lists[key]
        result = call(self.capture.nodes[n], [a.data for a in operands])
        tensors = list(result) if isinstance(result, tuple | list) else [result]
        if self.memo is None:
            return [Val(-1, x) for x in tensors]
        self._lists[key] = [self._settled(x) for x in tensors]
        return self._lists[key]


CASTS = frozenset(["_to_copy", "to", "clone", "contiguous", "detach", "alias", "dropout", "native_dropout", "lift_fresh", "positive"])
"""Ops that keep elements and layout, and perhaps cast."""


def _cast(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """Between integers and float64."""
    return data.to(getattr(torch, dtype)) if data.is_floating_point() else data.double()


def canonical(operands: dict[tuple[int, int], torch.Tensor], op: Op, tokens: int, arranged: Arranged) -> None:
    """Put a composite's operands in a form that both sides share: experts in order, a core's elements sorted per token.

    What was sorted is noted in `arranged`.
    """
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
                operands[op.id, slot], places = data.movedim(axis, 0).reshape(tokens, -1).sort(-1)
                arranged[op.id, slot] = axis, places


def native_constants(capture: TrainingGraph, tracer: Tracer, arithmetic: Arithmetic) -> dict[int, torch.Tensor]:
    """Everything that depends on positions, token ids and buffers only, executed in its recorded dtypes.

    Returns:
        Value id to tensor.
    """
    env: dict[int, torch.Tensor] = {}
    known = {i.value.id: i.value for i in capture.inputs}
    for node in capture.nodes:
        known.update((o.id, o) for o in node.outputs if o is not None)
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
        factory = aten.base(node.op) in aten.FACTORIES  # reads no more than shapes and dtypes
        if not all(v in env or (factory and torch.Size(known[v].shape).numel() <= aten.MAX_ELEMENTS) for v in tensors):
            continue
        given = [env[v] if v in env else torch.zeros(known[v].shape, dtype=getattr(torch, known[v].dtype)) for v in tensors]
        try:
            result = call(node, given, native=True)
        except UnsupportedOpError:
            continue
        results = result if isinstance(result, tuple | list) else [result]
        for o, x in zip(node.outputs, results, strict=False):
            if o is not None and isinstance(x, torch.Tensor):
                env[o.id] = torch.zeros_like(x) if "empty" in aten.base(node.op) else x
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
    take = iter(tensors).__next__ if isinstance(tensors, list) else None
    for o in node.outputs:
        if o is not None and torch.Size(o.shape).numel() > aten.MAX_ELEMENTS:
            raise UnsupportedOpError(f"{node.op} makes a tensor too large to evaluate", where=str(o.shape))
    overload = aten.resolve(node.op)
    args = [_decode(a, node.op, tensors, take, native) for a in node.args]
    given = {k: _decode(a, node.op, tensors, take, native) for k, a in node.kwargs.items()}
    kwargs = {k: x for k, x in given.items() if x is not None and k not in ("pin_memory", "layout", "memory_format", "non_blocking")}
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


def _decode(a: Any, op: str, tensors: Any, take: Callable[[], torch.Tensor] | None, native: bool) -> Any:
    """An encoded argument, with tensors for values: by id, or one after the other."""
    if isinstance(a, dict):
        if "v" in a:
            return take() if take is not None else tensors[a["v"]]
        if "dtype" in a:
            dtype = getattr(torch, a["dtype"], None)
            if not isinstance(dtype, torch.dtype):
                raise UnsupportedOpError(f"unknown dtype {a['dtype']!r}", where=op)
            return dtype if native or not dtype.is_floating_point else torch.float64
        if "f" in a:
            return float(a["f"])
        return torch.device("cpu") if "device" in a else None
    return [_decode(x, op, tensors, take, native) for x in a] if isinstance(a, list | tuple) else a
