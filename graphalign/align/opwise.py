"""Attention that the trainer computes op by op, outside any attention function: made one anchor, as the engine's is.

The pattern is a softmax between two products of activations. Masks and biases that depend on positions only are inside the anchor.
"""

from __future__ import annotations

from typing import Any

from graphalign.align.nodes import HEADS_FIRST, values_read
from graphalign.evaluate.aten import MATMULS, TRANSPARENT, VIEWS, base, is_pointwise
from graphalign.ir.training import Node, TrainingGraph, Value

OP = "aten.scaled_dot_product_attention.default"
SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
FACTOR = frozenset({"mul", "div"})
ALLOWED = frozenset({"nan_to_num"})
"""Between the softmax and the values: what it does to rows that read no key."""
MASKING = frozenset({"add", "sub", "masked_fill", "where"})
"""With tensors that depend on positions only: they are in what `Mask` records."""
LEAST = -9e3
"""A bound below every score that occurs."""


def fold_attention(capture: TrainingGraph) -> TrainingGraph:
    """The capture with one node for each attention that is computed op by op."""
    nodes = [n for n, node in enumerate(capture.nodes) if base(node.op) in SOFTMAX]
    graph = _Graph(capture) if nodes else None
    made = {
        at: (node, gone) for n in nodes if graph is not None and (found := graph.attention(n)) is not None for at, node, gone in [found]
    }
    if not made:
        return capture
    dropped = {n for _, gone in made.values() for n in gone}
    kept = [made[n][0] if n in made else node for n, node in enumerate(capture.nodes) if n in made or n not in dropped]
    return capture.model_copy(update={"nodes": tuple(kept)})


class _Graph:
    def __init__(self, capture: TrainingGraph) -> None:
        self.capture, self.nodes = capture, capture.nodes
        self.masks = {m.value: m.visible for m in capture.masks}
        self.values: dict[int, Value] = {i.value.id: i.value for i in capture.inputs}
        self.origin: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        self.passive = {i.value.id for i in capture.inputs}
        """Values that are no activations: parameters, and what depends on parameters, positions and buffers only."""
        weights = {i.value.id for i in capture.inputs if i.kind == "parameter"}
        for n, node in enumerate(self.nodes):
            read = _reads(node)
            looked_up = base(node.op) == "embedding" and bool(weights & set(read[:1])) and bool(set(read[1:]) - weights)
            for o in node.outputs:
                if o is not None:
                    self.values[o.id] = o
                    self.origin[o.id] = n
                    if not looked_up and all(v in self.passive for v in read):
                        self.passive.add(o.id)
        needed, self.dead = set(capture.outputs), set[int]()
        for n in range(len(self.nodes) - 1, -1, -1):
            if needed.isdisjoint(o.id for o in self.nodes[n].outputs if o is not None):
                self.dead.add(n)
            else:
                needed.update(_reads(self.nodes[n]))
        for n, node in enumerate(self.nodes):
            for v in _reads(node) if n not in self.dead else ():
                self.readers.setdefault(v, []).append(n)

    def attention(self, softmax: int) -> tuple[int, Node, set[int]] | None:
        """The node at which the attention ends, what stands for it, and the nodes that it stands for."""
        odd: dict[str, None] = {}
        scores, scale = self._up(_reads(self.nodes[softmax])[0], odd)
        context = self._down(softmax, odd)
        if scores is None or context is None:
            return None
        product, (weights, values) = self.nodes[context[0]], context[1]
        query, key = self._products(scores)
        end, result = self._result(context[0])
        if result is None or weights == values:
            return None
        operands = []
        for v in (query, key, values):
            operand, factor = self._operand(v)
            scale = scale * factor if scale is not None else None
            operands.append(operand)
        if any(o is None for o in operands):
            return None
        gone = {end}
        for n in range(end - 1, -1, -1):
            outs = [o.id for o in self.nodes[n].outputs if o is not None]
            read = [r for v in outs for r in self.readers.get(v, ())]
            stays = n in self.dead or any(v in operands or v in self.capture.outputs for v in outs) or all(v in self.passive for v in outs)
            if not stays and all(r in gone for r in read):
                gone.add(n)
        if not {scores, softmax, context[0]} <= gone:
            return None
        for n in sorted(self.dead):  # weights returned for nobody
            if n > scores and any(self.origin.get(v) in gone for v in _reads(self.nodes[n])):
                gone.add(n)
        kwargs: dict[str, Any] = {"scale": scale if scale is not None else "unknown", "odd": list(odd)}
        if (
            seen := next((self.masks[o.id] for o in self.nodes[softmax].outputs if o is not None and o.id in self.masks), None)
        ) is not None:
            kwargs["visible"] = seen
        elif self.masks:
            kwargs["visible"] = {"unknown": "its softmax was not seen in the forward of many tokens"}
        return end, Node(op=OP, args=tuple({"v": v} for v in operands), kwargs=kwargs, outputs=(result,), module=product.module,
                         source=self.nodes[softmax].source), gone  # fmt: skip

    def _products(self, n: int) -> list[int]:
        """A product's factors that are activations."""
        return [v for v in _reads(self.nodes[n]) if v not in self.passive]

    def _ordinary(self, node: Node) -> bool:
        """Whether a step between the scores and the softmax, or behind it, is a mask or a factor."""
        name = base(node.op)
        if name in ("clamp", "clamp_min", "maximum"):
            bound = node.kwargs.get("min", node.args[1] if len(node.args) > 1 else None)
            return isinstance(bound, int | float) and bound <= LEAST and len(node.args) <= 2 and node.kwargs.get("max") is None
        return name in TRANSPARENT | MASKING | FACTOR

    def _up(self, value: int, odd: dict[str, None]) -> tuple[int | None, float | None]:
        """From a softmax's operand to the product of two activations that it comes from, and what the scores are multiplied by."""
        scale: float | None = 1.0
        while (n := self.origin.get(value)) is not None:
            node = self.nodes[n]
            live = self._products(n)
            if base(node.op) in MATMULS:
                alpha = node.kwargs.get("alpha", 1.0)
                return (n, scale * alpha if scale is not None else None) if len(live) == 2 else (None, None)
            if len(live) != 1 or not (base(node.op) in TRANSPARENT or is_pointwise(node.op)):
                break
            if base(node.op) in FACTOR:
                factor = self._factor(node)
                scale = scale * factor if scale is not None and factor is not None else None
            elif not self._ordinary(node):
                odd[base(node.op)] = None
            value = live[0]
        return None, None

    def _factor(self, node: Node) -> float | None:
        """The number that a node multiplies its operand by."""
        number = node.args[1] if len(node.args) > 1 else None
        if isinstance(number, bool) or not isinstance(number, int | float) or not number:
            return None
        return float(number) if base(node.op) == "mul" else 1.0 / number

    def _down(self, n: int, odd: dict[str, None]) -> tuple[int, tuple[int, int]] | None:
        """From a softmax to the product of its result with another activation: the node and its factors."""
        while True:
            outs = [o.id for o in self.nodes[n].outputs if o is not None]
            after = sorted({r for v in outs for r in self.readers.get(v, ())})
            after = [r for r in after if self._products(r)]
            if len(after) != 1:
                return None
            n = after[0]
            live = self._products(n)
            if base(self.nodes[n].op) in MATMULS:
                return (n, (live[0], live[1])) if len(live) == 2 and live[0] in outs else None
            if len(live) != 1 or not (base(self.nodes[n].op) in TRANSPARENT or is_pointwise(self.nodes[n].op)):
                return None
            if base(self.nodes[n].op) not in TRANSPARENT | ALLOWED:
                odd[base(self.nodes[n].op)] = None

    def _result(self, n: int) -> tuple[int, Value | None]:
        """What an attention returns, [batch, heads, tokens, size], and the node that shows it so."""
        tokens = self.capture.header.tokens
        while True:
            first = self.nodes[n].outputs[0]
            if first is None:
                return n, None
            after = self.readers.get(first.id, [])
            if len(first.shape) == HEADS_FIRST and first.shape[2] == tokens:
                stored = self.nodes[after[0]] if len(after) == 1 else None  # a library that computes in FP32 stores what it was given
                if stored is not None and base(stored.op) == "_to_copy" and (last := stored.outputs[0]) is not None:
                    return after[0], last
                return n, first
            if len(after) != 1 or base(self.nodes[after[0]].op) not in VIEWS:
                return n, None
            n = after[0]

    def _operand(self, value: int) -> tuple[int | None, float]:
        """What a factor is made of, before heads were repeated and the library scaled it: [batch, heads, tokens, size] or by token."""
        tokens, factor = self.capture.header.tokens, 1.0
        best = None
        while True:
            shape = self.values[value].shape
            if (len(shape) == HEADS_FIRST and shape[2] == tokens) or (len(shape) < HEADS_FIRST and shape[:-1] in ((1, tokens), (tokens,))):
                best = value
            n = self.origin.get(value)
            if n is None:
                break
            node = self.nodes[n]
            live = self._products(n)
            scaled = node.op == "aten.mul.Scalar"  # a library's; a model's own is `mul.Tensor`
            copied = base(node.op) in VIEWS | {"clone", "contiguous"} or (
                base(node.op) == "_to_copy" and self.values[value].dtype == "float32"
            )
            if len(live) != 1 or not (scaled or copied) or self._smaller(value, live[0]):
                break
            factor *= (self._factor(node) or 1.0) if scaled else 1.0
            value = live[0]
        return best, factor

    def _smaller(self, value: int, than: int) -> bool:
        def numel(v: int) -> int:
            n = 1
            for s in self.values[v].shape:
                n *= s
            return n

        return numel(value) < numel(than)


def _reads(node: Node) -> list[int]:
    return list(dict.fromkeys(values_read(node)))
