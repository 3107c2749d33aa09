"""From a captured training graph to its dataflow: ops, and edges with the rounding of every eager store."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphalign.dataflow.identity import nearest_anchors
from graphalign.evaluate.aten import ATTENTIONS, FACTORIES, MATMULS, TRANSPARENT, UNMOVED, base
from graphalign.evaluate.parts import Made
from graphalign.ir.args import references
from graphalign.ir.dataflow import Dataflow, Op, Operand, Ref, selected_format
from graphalign.ir.paths import layer_of
from graphalign.ir.training import Node, TrainingGraph

QUERY_KEY_VALUE = 3
"""Operands of an attention anchor that are compared: query, key, value; then sinks."""


@dataclass
class Tracer:
    """Builds the dataflow of one capture."""

    capture: TrainingGraph
    steps: Mapping[int, Made] = field(default_factory=dict)
    """Value id to the step of a fused op that makes it; ops that make one have it as `detail["step"]`."""
    ops: list[Op] = field(default_factory=list)
    refs: dict[int, Operand] = field(default_factory=dict)
    """Value id to the edges a reader of it gets."""
    constant: set[int] = field(default_factory=set)
    """Value ids that depend on positions, token ids and buffers only."""
    op_of_node: dict[int, int] = field(default_factory=dict)
    """Node index to op index, for nodes that are ops or anchors."""
    table_of_value: dict[int, int] = field(default_factory=dict)
    """Value id of a constant that is read by the model's arithmetic to its op index."""
    dtype: dict[int, str] = field(default_factory=dict)
    head: int | None = None
    """Op index of the last GEMM."""
    origin: dict[int, int] = field(default_factory=dict)
    """Value id to the node that makes it."""
    weights: dict[int, str] = field(default_factory=dict)
    """Value id to the parameter that it is, or is a view or cast of."""
    numel: dict[int, int] = field(default_factory=dict)
    """Value id to its number of elements."""
    _occurrences: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _readers: dict[int, list[int]] | None = None
    _reads: dict[int, list[int]] = field(default_factory=dict)
    _operands: dict[int, list[int]] = field(default_factory=dict)
    _slots: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    _op_slots: dict[int, list[tuple[int | None, int]]] = field(default_factory=dict)
    _signature: dict[int, int] = field(default_factory=dict)
    _signatures: dict[str, int] = field(default_factory=dict)

    def run(self) -> Dataflow:
        """Trace the capture."""
        self.numel |= {i.value.id: math.prod(i.value.shape) for i in self.capture.inputs}
        for i in self.capture.inputs:
            self.dtype[i.value.id] = i.value.dtype
            if i.kind == "parameter":
                op = self.add(name=i.name, kind="parameter", target=i.name, dtype=i.value.dtype, key=(i.name,))
                self.refs[i.value.id] = (Ref(op.id).rounded(i.value.dtype),)
                self.weights[i.value.id] = i.name
            else:
                self.constant.add(i.value.id)
        for n, node in enumerate(self.capture.nodes):
            self._node(n, node)
        for v in self.capture.outputs:
            if v in self.refs:
                self.add(name=f"output.{v}", kind="output", target="output", operands=(self.refs[v],), key=(v,))
        for op in self.ops:
            if op.kind == "table":
                op.detail["outside"] = self._rounded_outside(op)
        flow = Dataflow("training", tuple(self.ops), self.capture.header.notes)
        flow.verify()
        return flow

    def readers(self) -> dict[int, list[int]]:
        """Value id to the nodes that read it, ascending."""
        if self._readers is None:
            self._readers = {}
            for n in range(len(self.capture.nodes)):
                for v in self.operand_values(n):
                    self._readers.setdefault(v, []).append(n)
        return self._readers

    def add(self, **kw: Any) -> Op:
        op = Op(id=len(self.ops), **kw)
        self.ops.append(op)
        return op

    def edges(self, value: int) -> Operand:
        """Edges that a reader of a value gets; a constant becomes a table producer when the first reader comes.

        A value without elements (the half that full rotary leaves unrotated) hands on nothing, whatever it is a slice of.
        """
        if self.numel.get(value) == 0:
            return ()
        if value in self.refs:
            return self.refs[value]
        if value not in self.constant or self._undefined(value):
            return ()
        return self._table(value)

    def _undefined(self, value: int) -> bool:
        """Whether nothing was written there yet."""
        return value in self.origin and base(self.capture.nodes[self.origin[value]].op) in ("empty", "new_empty", "empty_like")

    def _table(self, value: int) -> Operand:
        # walk back through casts and views of the constant to what was computed; the casts are the edge's roundings
        chain: list[int] = []
        v = value
        while v not in self.table_of_value and v in self.origin:
            node = self.capture.nodes[self.origin[v]]
            tensors = list(references(node.args, "v"))
            if (
                base(node.op) not in TRANSPARENT
                or base(node.op) in ("cat", "stack", "embedding", "index_select", "index", "gather")
                or len(tensors) != 1
            ):
                break
            chain.append(v)
            v = tensors[0]
        if v not in self.table_of_value:
            made = self.capture.nodes[self.origin[v]] if v in self.origin else None
            name = next((i.name for i in self.capture.inputs if i.value.id == v), f"{made.module if made else ''}%{v}")
            op = self.add(name=f"table.{name}", kind="table", target=node.op if made else name, dtype=self.dtype.get(v, "float32"),
                          module=node.module if made else "", source=node.source if made else None, key=(v,),
                          detail={"made": self.origin.get(v), "cast_in": set()})  # fmt: skip
            self.table_of_value[v] = op.id
        ref = Ref(self.table_of_value[v]).rounded(self.dtype.get(v, "float32"))
        for u in reversed(chain):
            if (rounded := ref.rounded(self.dtype[u])) != ref:
                self.ops[ref.producer].detail["cast_in"].add(self.capture.nodes[self.origin[u]].module)
            ref = rounded
        return (ref,)

    def _rounded_outside(self, op: Op) -> bool:
        """Whether a table is computed and rounded in one module outside the layers, which has no modules inside and runs once."""
        made = op.detail.get("made")
        if made is None or not op.module or layer_of(op.module) is not None or op.detail["cast_in"] != {op.module}:
            return False
        node = self.capture.nodes[made]
        again = sum(n.module == node.module and n.op == node.op and n.source == node.source for n in self.capture.nodes)
        inside = any(n.module.startswith(f"{node.module}.") for n in self.capture.nodes)
        return node.source is not None and again == 1 and not inside

    def _node(self, n: int, node: Node) -> None:
        name = base(node.op)
        tensors = list(dict.fromkeys(self.operand_values(n)))
        outs = [o for o in node.outputs if o is not None]
        for o in outs:
            self.dtype[o.id] = o.dtype
            self.numel[o.id] = math.prod(o.shape)
            self.origin[o.id] = n
        if not node.op.startswith("graphalign.") and (name in FACTORIES or all(v in self.constant for v in tensors)):
            self.constant.update(o.id for o in outs)
            return
        if node.op == "graphalign.attention" or name in ATTENTIONS:
            self._attention(n, node, outs)
        elif node.op == "graphalign.logprobs":
            self._logprobs(n, node, outs)
        elif node.op == "graphalign.composite":
            self._composite(n, node, outs)
        elif name in MATMULS:
            self._matmul(n, node, outs, name)
        elif name in TRANSPARENT or name == "as_strided_scatter":
            self._transparent(node, outs, tensors)
        elif is_identity(name, node):
            first = next(iter(references(node.args, "v")))
            self.refs[outs[0].id] = tuple(r.rounded(outs[0].dtype) for r in self.edges(first))
        elif outs:
            operands = tuple(e for v in self.operand_values(n) if (e := self.edges(v)))
            step = {"step": self.steps[outs[0].id]} if outs[0].id in self.steps else {}
            op = self.add(name=f"%{outs[0].id}", kind="op", target=node.op, operands=operands, dtype=outs[0].dtype,
                          module=node.module, source=node.source, detail={"node": n, **step})  # fmt: skip
            self.op_of_node[n] = op.id
            exact = selected_format(name, operands)
            for o in outs:
                self.refs[o.id] = (Ref(op.id) if exact == o.dtype else Ref(op.id).rounded(o.dtype),)

    def reads(self, n: int) -> list[int]:
        """Value ids among a node's positional arguments, in order, with repeats."""
        if n not in self._reads:
            self._reads[n] = list(references(self.capture.nodes[n].args, "v"))
        return self._reads[n]

    def operand_values(self, n: int) -> list[int]:
        """Value ids that a node reads, in order, with repeats; keyword arguments last."""
        if n not in self._operands:
            node = self.capture.nodes[n]
            more = [v for a in node.kwargs.values() for v in references(a, "v")]
            self._operands[n] = [*self.reads(n), *more] if more else self.reads(n)
        return self._operands[n]

    def slots(self, n: int) -> list[tuple[int, int]]:
        """An anchor's compared operands: (slot, value)."""
        if n not in self._slots:
            op = self.ops[self.op_of_node[n]]
            found: list[tuple[int, int]] = []
            for v in self.reads(n):
                edges = self.refs.get(v) or (self.edges(v) if v in self.constant else ())
                if len(found) < len(op.operands) and edges == op.operands[len(found)]:
                    found.append((len(found), v))
            self._slots[n] = found
        return self._slots[n]

    def op_slots(self, n: int) -> list[tuple[int | None, int]]:
        """What an op reads: (slot, value); no slot for a value that has no edges (it was made from no tensor)."""
        if n not in self._op_slots:
            slot = 0
            found: list[tuple[int | None, int]] = []
            for v in self.operand_values(n):
                has = bool(self.edges(v))
                found.append((slot if has else None, v))
                slot += has
            self._op_slots[n] = found
        return self._op_slots[n]

    def signature(self, n: int) -> int:
        """Equal for nodes that compute the same from equal operands: the op and all its arguments that are no tensors."""
        if n not in self._signature:
            node = self.capture.nodes[n]
            text = repr((node.op, _blank(node.args), [(k, _blank(a)) for k, a in node.kwargs.items()]))
            self._signature[n] = self._signatures.setdefault(text, len(self._signatures))
        return self._signature[n]

    def _overwrites(self, name: str, tensors: list[int]) -> bool:
        """Whether a scatter writes every element of its target: an in-place op's result seen through another view."""
        sizes = [self.numel.get(v) for v in tensors[:2]]
        return name == "as_strided_scatter" and len(sizes) > 1 and sizes[0] == sizes[1]

    def _transparent(self, node: Node, outs: list[Any], tensors: list[int]) -> None:
        name = base(node.op)
        if name in ("embedding", "index_select", "index", "gather"):
            tensors = tensors[:1]
        elif name == "copy" or self._overwrites(name, tensors):
            tensors = list(references(node.args, "v"))[1:2]
        merged: dict[Ref, None] = {}
        for v in tensors:
            merged.update(dict.fromkeys(self.edges(v)))
        for o in outs:
            self.refs[o.id] = tuple(dict.fromkeys(r.rounded(o.dtype) for r in merged))

    def _matmul(self, n: int, node: Node, outs: list[Any], name: str) -> None:
        values = list(references(node.args, "v"))
        sole = {v: self._sole_parameter(v) for v in values}
        weight = next((v for v in reversed(values) if sole[v] is not None), None)
        if name == "addmm":
            activations, bias = values[1:], bool(values[:1])
        else:
            activations, bias = values[:2], len(values) > 2
        operands = tuple(e for v in activations if v != weight and (e := self.edges(v)))
        made: tuple[str, ...] = ()
        if weight is None or sole[weight] is None:
            key = ("opaque", *self._number((node.op, node.module)))
            target = node.op
            made = next((m for v in reversed(values) if (m := self._made_of(v))), ())
        else:
            key, target = ("gemm", *self._number((sole[weight],))), "gemm"
        op = self.add(name=f"%{outs[0].id}", kind="anchor", target=target, operands=operands, dtype=outs[0].dtype, module=node.module,
                      source=node.source, key=key, detail={"node": n, "bias": bias, "op": node.op, "made_of": made})  # fmt: skip
        self.op_of_node[n] = op.id
        self.head = op.id if target == "gemm" else self.head
        self.refs[outs[0].id] = (Ref(op.id).rounded(outs[0].dtype),)

    def _sole_parameter(self, value: int) -> str | None:
        """The parameter that a matrix is, as it is or rounded to BF16, as an engine has it that trains FP32 weights."""
        refs = self.refs.get(value, ())
        names = {self.ops[r.producer].target for r in refs if self.ops[r.producer].kind == "parameter"}
        if len(names) != 1 or any(self.ops[r.producer].kind != "parameter" for r in refs):
            return None
        own = {self.ops[r.producer].dtype for r in refs} | {"bfloat16"}
        return names.pop() if all(own.issuperset(r.roundings) for r in refs) and self._unmoved(value) else None

    def _unmoved(self, value: int) -> bool:
        """Whether every element of a parameter still stands where it stood among the others."""
        while (n := self.origin.get(value)) is not None:
            node, read = self.capture.nodes[n], self.reads(n)
            if (base(node.op) not in UNMOVED and not is_identity(base(node.op), node)) or len(read) != 1:
                return False
            value = read[0]
        return True

    def _made_of(self, value: int) -> tuple[str, ...]:
        """The parameters that a matrix is computed from, if it is computed from nothing else but constants."""
        above = {r.producer for r in self.refs.get(value, ())}
        for op in reversed(self.ops[: max(above, default=-1) + 1]):
            if op.id in above:
                above.update(r.producer for operand in op.operands for r in operand)
        ops = [self.ops[i] for i in above]
        names = tuple(sorted(op.target for op in ops if op.kind == "parameter"))
        return names if all(op.kind in ("op", "parameter", "table") for op in ops) else ()

    def _attention(self, n: int, node: Node, outs: list[Any]) -> None:
        qkv = list(references(node.args, "v"))[:QUERY_KEY_VALUE]
        operands = tuple(self.edges(v) for v in qkv)
        key = ("attention", *self._number(nearest_anchors(self.ops, operands)))
        op = self.add(name=f"%{outs[0].id}", kind="anchor", target="attention", operands=operands, dtype=outs[0].dtype, module=node.module,
                      source=node.source, key=key, detail={"node": n, "parameters": self.capture.parameters(node)})  # fmt: skip
        self.op_of_node[n] = op.id
        for o in outs:
            self.refs[o.id] = (Ref(op.id).rounded(o.dtype),)

    def _logprobs(self, n: int, node: Node, outs: list[Any]) -> None:
        """The end of the tail: an anchor, so that what it reads is compared like any anchor's operand."""
        operands = tuple(self.edges(v) for v in references(node.args, "v"))
        op = self.add(name=f"%{outs[0].id}", kind="anchor", target="logprobs", operands=operands, dtype=outs[0].dtype, module=node.module,
                      source=node.source, key=("logprobs", 0), detail={"node": n})  # fmt: skip
        self.op_of_node[n] = op.id
        self.refs[outs[0].id] = (Ref(op.id),)

    def _composite(self, n: int, node: Node, outs: list[Any]) -> None:
        operands = tuple(self.edges(v) for v in references(node.args, "v"))
        form = {k: tuple(x) if isinstance(x, list) else x for k, x in node.kwargs.items()}
        key = ("composite", *self._number((form.get("owner", node.module),)))
        op = self.add(name=f"%{outs[0].id}", kind="anchor", target="composite", operands=operands, dtype=outs[0].dtype, module=node.module,
                      source=node.source, key=key, detail={"node": n, **form})  # fmt: skip
        self.op_of_node[n] = op.id
        self.refs[outs[0].id] = (Ref(op.id).rounded(outs[0].dtype),)

    def _number(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        n = self._occurrences.get(key, 0)
        self._occurrences[key] = n + 1
        return (*key, n)


def is_identity(name: str, node: Node) -> bool:
    """Multiplying or dividing by one, adding zero: exact, so it makes no new value (Transformers' attention_scaling)."""
    if len(list(references(node.args, "v"))) != 1 or len(node.args) < 2:
        return False
    other = node.args[1]
    if isinstance(other, bool) or not isinstance(other, int | float):
        return False
    return (name in ("mul", "div", "pow") and other == 1) or (name in ("add", "sub") and other == 0)


def _blank(arg: Any) -> Any:
    """An encoded argument without the numbers of the values it refers to."""
    if isinstance(arg, dict):
        return {"v": None} if "v" in arg else arg
    return [_blank(a) for a in arg] if isinstance(arg, list | tuple) else arg


def decode_constant(data: str, dtype: str, shape: tuple[int, ...]) -> Any:
    """A recorded tensor's content as a torch tensor of its own dtype."""
    import torch

    raw = bytearray(base64.b64decode(data))
    t = torch.frombuffer(raw, dtype=getattr(torch, dtype)) if raw else torch.empty(0, dtype=getattr(torch, dtype))
    return t.reshape(shape)
