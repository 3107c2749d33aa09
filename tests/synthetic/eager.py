"""A program as eager ATen nodes."""

from __future__ import annotations

import random
from typing import Any

from graphalign.ir.training import TrainingGraph
from tests.synthetic.program import BF, FP, HALF, TOKENS, VOCABULARY, WIDTH, Plan, Program, Value


def training(program: Program, plan: Plan, *, order: random.Random | None = None) -> TrainingGraph:
    """The eager graph. `order` shuffles the registration order of the parameters."""
    return _Eager(program, plan, order).graph()


class _Eager:
    def __init__(self, program: Program, plan: Plan, order: random.Random | None) -> None:
        self.program, self.plan = program, plan
        self.inputs: list[dict[str, Any]] = []
        self.nodes: list[dict[str, Any]] = []
        self.next = 0
        self.value_of: dict[int, tuple[int, str]] = {}
        """Program value to (tensor id, dtype)."""
        self.node_of: dict[int, int] = {}
        """Program value to the index of the node that computes it."""
        names = [("embed.weight", (VOCABULARY, WIDTH))]
        names += [(v.parameter, (WIDTH, WIDTH) if v.kind == "gemm" else (WIDTH,)) for v in program.values if v.parameter]
        if order is not None:
            order.shuffle(names)
        self.parameters = {n: self.input("parameter", n, BF, s) for n, s in names}
        self.ids = self.input("input", "input_ids", "int64", (1, TOKENS))

    def input(self, kind: str, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        self.inputs.append({"value": self.value(dtype, shape), "kind": kind, "name": name})
        return self.next - 1

    def value(self, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
        self.next += 1
        return {"id": self.next - 1, "dtype": dtype, "shape": list(shape)}

    def node(self, op: str, args: list[Any], dtype: str, shape: tuple[int, ...], module: str = "") -> int:
        kwargs = {"dtype": {"dtype": dtype}} if op == "aten._to_copy.default" else {}
        self.nodes.append({"op": op, "args": args, "kwargs": kwargs, "outputs": [self.value(dtype, shape)], "module": module})
        return self.next - 1

    def cast(self, t: int, have: str, want: str, shape: tuple[int, ...]) -> int:
        return t if have == want else self.node("aten._to_copy.default", [{"v": t}], want, shape)

    def read(self, c: int, slot: int, want: str | None) -> tuple[int, str]:
        """A tensor for an operand, rounded as the plan says; then as `want`, or as it comes."""
        p = self.program.values[c].args[slot]
        t, dtype = self.value_of[p]
        shape = self.shape(p)
        if self.plan.rounds[p, c, slot]:
            t, dtype = self.cast(t, dtype, BF, shape), BF
        return (self.cast(t, dtype, want, shape), want) if want else (t, dtype)

    def shape(self, v: int) -> tuple[int, ...]:
        return (1, TOKENS, 1 if self.program.values[v].row else WIDTH)

    def graph(self) -> TrainingGraph:
        for v, value in enumerate(self.program.values):
            self.compute(v, value)
        data = {"header": {"versions": {}, "regime": {}, "model": {}, "tokens": TOKENS}, "inputs": self.inputs, "nodes": self.nodes,
                "outputs": [self.value_of[len(self.program.values) - 1][0]], "sources": []}  # fmt: skip
        return TrainingGraph.model_validate(data)

    def compute(self, v: int, value: Value) -> None:
        if value.kind == "embed":
            self.value_of[v] = (
                self.node("aten.embedding.default", [{"v": self.parameters["embed.weight"]}, {"v": self.ids}], BF, self.shape(v)),
                BF,
            )
        elif value.kind == "gemm":
            self.gemm(v, value)
        elif value.kind == "rotate":
            self.rotate(v)
        else:
            self.arithmetic(v, value)

    def gemm(self, v: int, value: Value) -> None:
        x, _ = self.read(v, 0, BF)
        w = self.node("aten.t.default", [{"v": self.parameters[value.parameter]}], BF, (WIDTH, WIDTH), value.module)
        flat = self.node("aten.view.default", [{"v": x}, [TOKENS, WIDTH]], BF, (TOKENS, WIDTH), value.module)
        out = self.node("aten.mm.default", [{"v": flat}, {"v": w}], BF, (TOKENS, WIDTH), value.module)
        self.node_of[v] = len(self.nodes) - 1
        self.value_of[v] = self.node("aten._unsafe_view.default", [{"v": out}, [1, TOKENS, WIDTH]], BF, self.shape(v), value.module), BF

    def rotate(self, v: int) -> None:
        x, dtype = self.read(v, 0, None)
        half = (1, TOKENS, HALF)
        first = self.node("aten.slice.Tensor", [{"v": x}, 2, 0, HALF], dtype, half)
        second = self.node("aten.slice.Tensor", [{"v": x}, 2, HALF, WIDTH], dtype, half)
        second = self.node("aten.neg.default", [{"v": second}], dtype, half)
        self.value_of[v] = self.node("aten.cat.default", [[{"v": second}, {"v": first}], -1], dtype, self.shape(v)), dtype

    def arithmetic(self, v: int, value: Value) -> None:
        consumers = [(c, s) for p, c, s in self.program.edges() if p == v]
        rounds = bool(consumers) and all(self.plan.rounds[v, c, s] for c, s in consumers)
        tensors = [self.read(v, s, None) for s in range(len(value.args))]
        native = rounds and all(d == BF for _, d in tensors)
        dtype = BF if native else FP
        args: list[Any] = [{"v": self.cast(t, d, dtype, self.shape(p))} for (t, d), p in zip(tensors, value.args, strict=True)]
        op, extra = _ATEN[value.kind]
        if value.kind == "weight":
            w = self.parameters[value.parameter]
            args.append({"v": self.cast(w, BF, dtype, (WIDTH,))})
        if value.kind in ("scale", "shift"):
            args.append(value.constant)
        out = self.node(op, args + extra, dtype, self.shape(v), value.module)
        self.node_of[v] = len(self.nodes) - 1
        self.value_of[v] = (self.cast(out, dtype, BF, self.shape(v)), BF) if rounds else (out, dtype)


_ATEN: dict[str, tuple[str, list[Any]]] = {
    "tanh": ("aten.tanh.default", []),
    "sigmoid": ("aten.sigmoid.default", []),
    "silu": ("aten.silu.default", []),
    "square": ("aten.pow.Tensor_Scalar", [2]),
    "rsqrt": ("aten.rsqrt.default", []),
    "mean": ("aten.mean.dim", [[-1], True]),
    "scale": ("aten.mul.Tensor", []),
    "shift": ("aten.add.Tensor", []),
    "weight": ("aten.mul.Tensor", []),
    "mul": ("aten.mul.Tensor", []),
    "add": ("aten.add.Tensor", []),
    "sub": ("aten.sub.Tensor", []),
}


def writes(program: Program, plan: Plan) -> dict[int, int]:
    """Program value to the index of the training node that computes it."""
    eager = _Eager(program, plan, None)
    eager.graph()
    return eager.node_of
