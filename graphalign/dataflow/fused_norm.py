"""Declared calls that sum the ranks' parts, add the residual and normalise the sum: one `all_reduce` and three loops.

The sum over the ranks is rounded to the model's dtype, then the residual sum is (it is stored); the norm reads the rounded sum, computes
in FP32 and rounds once at its store. `norm_out` missing: the norm goes into the tensor that was reduced, the residual sum into the
residual. `norm_out` given: there is no residual (vLLM passes zeros), and the summed tensor goes back into the tensor that was reduced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphalign.dataflow.opaque import FusedNorm
from graphalign.ir.inference import Body, Buffer, Graph, Input, Node

REDUCE = "vllm.all_reduce.default"


@dataclass
class Expanded:
    """What one call becomes."""

    nodes: list[Node] = field(default_factory=list)
    bodies: dict[str, Body] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    now: dict[str, str] = field(default_factory=dict)
    """Buffer that the call writes to the buffer that holds its content afterwards."""


def expand_norm(graph: Graph, node: Node, rule: FusedNorm, known: dict[str, Buffer | Input]) -> Expanded | None:
    """The loops of one call; None if it stays opaque.

    Args:
        graph: where the call is.
        node: the call, with its buffers renamed to what holds their content now.
        rule: what the call computes.
        known: buffers and inputs by name.
    """
    args = dict(node.args)
    names = {role: _name(args.get(role_of)) for role, role_of in rule.tensors().items()}
    x, weight = known.get(names["reduced"]), known.get(names["weight"])
    epsilon = args.get(rule.epsilon)
    if x is None or names["residual"] not in known or not isinstance(weight, Input) or not isinstance(epsilon, int | float):
        return None
    if len(x.size) != 2 or x.stride != (x.size[1], "1") or weight.size != x.size[1:] or not x.size[1].isdecimal():
        return None
    alone = bool(names["out"])
    if alone and not _is_zero(graph, names["residual"]):
        return None
    return _Writer(node, x, weight, float(epsilon), float(args.get(rule.bias) or 0.0)).write(names, alone)


def _name(arg: Any) -> str:
    return str(arg["b"]) if isinstance(arg, dict) and set(arg) == {"b"} else ""


def _is_zero(graph: Graph, buffer: str) -> bool:
    """Whether one loop fills a buffer, and with zeros."""
    written = [n for k in graph.kernels for n in k.nodes if n.kind == "loop" and buffer in n.outputs]
    return len(written) == 1 and written[0].buffers == (buffer,)


class _Writer:
    def __init__(self, node: Node, x: Buffer | Input, weight: Input, epsilon: float, bias: float) -> None:
        self.node, self.x, self.weight, self.epsilon, self.bias = node, x, weight, epsilon, bias
        self.out = Expanded()
        self.module = weight.source.rpartition(".")[0] or node.module

    def write(self, names: dict[str, str], alone: bool) -> Expanded:
        tokens, width = self.x.size
        whole, row = ((tokens, width), ()), ((tokens,), (width,))
        total, value, squares, norm = (f"{self.node.name}.{part}" for part in ("sum", "residual", "squares", "norm"))
        self._buffer(total)
        reduce = self.node.model_copy(update={"name": f"{self.node.name}.reduce", "op": REDUCE, "outputs": (total,), "mutates": (),
                                              "module": self.module, "args": (("tensor", {"b": names["reduced"]}),)})  # fmt: skip
        self.out.nodes.append(reduce)
        if alone:
            value = total
        else:
            self._buffer(value)
            self._loop("add", whole, _add(), (total, names["residual"], value))
        self._buffer(squares, "float32", (tokens, "1"))
        self._loop("squares", row, _squares(), (value, squares))
        self._buffer(norm)
        self._loop("norm", whole, _norm(int(width), self.epsilon, self.bias), (value, squares, self.weight.name, norm))
        self.out.now = {names["reduced"]: value, names["out"]: norm} if alone else {names["reduced"]: norm, names["residual"]: value}
        return self.out

    def _buffer(self, name: str, dtype: str | None = None, size: tuple[str, ...] = ()) -> None:
        size = size or self.x.size
        self.out.buffers.append(Buffer(name=name, dtype=dtype or self.x.dtype, size=size, stride=(size[1], "1"), layout="FixedLayout"))

    def _loop(self, name: str, sizes: Any, ops: tuple[Any, ...], buffers: tuple[str, ...]) -> None:
        indexing = {"at": f"{self.x.size[1]}*p0 + p1", "row": "p0", "column": "p1"}
        ranges = tuple(zip(("p0", "p1"), (*sizes[0], *sizes[1]), strict=True))
        key = f"declared {self.node.name} {name}"
        self.out.bodies[key] = Body(var_ranges=ranges, sizes=sizes, indexing=indexing, ops=ops)
        self.out.nodes.append(Node(name=f"{self.node.name}.{name}", kind="loop", outputs=buffers[-1:], module=self.module,
                                   source=self.node.source, body=key, buffers=buffers))  # fmt: skip


def _op(name: str, target: str, *args: Any) -> tuple[Any, ...]:
    """An op of a loop body; a plain text is a node's name."""
    return (name, target, [{"n": a} if isinstance(a, str) and target != "get_index" else a for a in args], {})


def _add() -> tuple[Any, ...]:
    """Buffers: sum over the ranks, residual, new."""
    return (
        _op("at", "get_index", "at"),
        _op("x", "load", {"b": "b0"}, "at"),
        _op("y", "load", {"b": "b1"}, "at"),
        _op("add", "add", "x", "y"),
        _op("store", "store", {"b": "b2"}, "at", "add", None),
        _op("output", "output", "store"),
    )


def _squares() -> tuple[Any, ...]:
    """Buffers: what is normalised, its sum of squares by row."""
    kind = {"dtype": "float32"}
    return (
        _op("at", "get_index", "at"),
        _op("x", "load", {"b": "b0"}, "at"),
        _op("mul", "mul", "x", "x"),
        ("reduction", "reduction", [kind, kind, "sum", {"n": "mul"}], {}),
        _op("row", "get_index", "row"),
        _op("store", "store_reduction", {"b": "b1"}, "row", "reduction"),
        ("output", "output", [None], {}),
    )


def _norm(width: int, epsilon: float, bias: float) -> tuple[Any, ...]:
    """Buffers: what is normalised, its sum of squares by row, weight, new."""
    kind = {"dtype": "float32"}
    scaled = "weight" if not bias else "biased"
    shift = [] if not bias else [_op("bias", "constant", bias, kind), _op("biased", "add", "bias", "weight")]
    return (
        _op("at", "get_index", "at"),
        _op("row", "get_index", "row"),
        _op("column", "get_index", "column"),
        _op("x", "load", {"b": "b0"}, "at"),
        _op("total", "load", {"b": "b1"}, "row"),
        _op("width", "constant", float(width), kind),
        _op("mean", "truediv", "total", "width"),
        _op("epsilon", "constant", epsilon, kind),
        _op("add", "add", "mean", "epsilon"),
        _op("rsqrt", "rsqrt", "add"),
        _op("mul", "mul", "x", "rsqrt"),
        _op("weight", "load", {"b": "b2"}, "column"),
        *shift,
        _op("mul_1", "mul", "mul", scaled),
        _op("store", "store", {"b": "b3"}, "at", "mul_1", None),
        _op("output", "output", "store"),
    )
