"""Which op of the training graph a rounded value belongs to, and what kind of place that is, by structure alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphalign.align.regions import Regions, cut
from graphalign.dataflow.trace_training import Tracer
from graphalign.evaluate.aten import base
from graphalign.ir.dataflow import Dataflow, Op
from graphalign.ir.training import TrainingGraph
from graphalign.sites.ends import Ends, layer_of
from graphalign.sites.report import End

ACTIVATIONS = frozenset({"silu", "gelu", "sigmoid", "tanh", "relu", "relu6", "leaky_relu", "mish", "hardswish", "softplus"})
NORMS = frozenset({"rsqrt", "sqrt", "native_layer_norm", "_fused_rms_norm"})
WHOLE_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})

KINDS = {
    "projection": "a GEMM's output",
    "attention": "an attention's output",
    "normalised": "inside a norm: the input times its reciprocal root mean square",
    "norm output": "a norm's output, its weight multiplied in",
    "activation": "SiLU, GELU, … of a projection",
    "gated product": "an activation times what it gates",
    "rope product": "a query or key times cos or sin",
    "rope sum": "the sum of two such products",
    "residual sum": "the residual stream",
    "table": "cos and sin as they are computed",
    "other": "anything else",
}

Key = tuple[str, str, str, int, str]
"""Module pattern, op, function, ordinal, source: one location, in every layer."""


@dataclass(frozen=True)
class Place:
    """Where a value is made."""

    kind: str
    end: End
    layer: int | None

    @property
    def key(self) -> Key:
        return key_of(self.end)


def key_of(end: End) -> Key:
    """What two ends share that are the same op in different layers, captures or edges."""
    return end.module, end.op, end.function, end.ordinal, end.text


@dataclass
class Places:
    """The places of one training graph."""

    graph: TrainingGraph
    flow: Dataflow = field(init=False)
    regions: Regions = field(init=False)

    def __post_init__(self) -> None:
        self._tracer = Tracer(self.graph)
        self.flow = self._tracer.run()
        self.regions = cut(self.flow)
        self._ends = Ends(self.graph, self.flow)
        facts: dict[int, set[str]] = {}
        for i, region in self.regions.region.items():
            facts.setdefault(region, set()).add(base(self.flow.ops[i].target))
        self._has = facts
        self._kinds: dict[int, str] = {}

    def of(self, value: int) -> Place | None:
        """The place of a value by its id; None for what is no op's own result (a cast of a parameter, of several values)."""
        if value not in self._tracer.refs and value not in self._tracer.constant:
            return None
        producers = {r.producer for r in self._tracer.edges(value)}
        if len(producers) != 1:
            return None
        i = producers.pop()
        if i >= len(self.flow.ops) or self.flow.ops[i].kind not in ("op", "anchor", "table"):
            return None  # a table that nothing reads is numbered only now
        op = self.flow.ops[i]
        return Place(self.kind(op), self._ends.end(i), layer_of(op.module))

    def kind(self, op: Op) -> str:
        """One of `KINDS`."""
        if op.id not in self._kinds:
            self._kinds[op.id] = self._kind(op)
        return self._kinds[op.id]

    def _kind(self, op: Op) -> str:
        name = base(op.target)
        if op.kind == "table":
            return "table"
        if op.kind == "anchor":
            return {"gemm": "projection", "attention": "attention"}.get(op.target, "other")
        if op.id in self.regions.sums or op.id in self.regions.partial:
            return "residual sum"
        if name in ACTIVATIONS:
            return "activation"
        if name in WHOLE_NORMS:
            return "norm output"
        operands = [[self.flow.ops[r.producer] for r in operand] for operand in op.operands]
        if name == "mul" and any(p.kind == "op" and base(p.target) in ACTIVATIONS for o in operands for p in o):
            return "gated product"
        if self._feeds_attention(op):
            if name == "mul" and sum(all(p.kind == "table" for p in o) for o in operands) == 1:
                return "rope product"
            if name in ("add", "sub") and any(p.kind == "op" and self.kind(p) == "rope product" for o in operands for p in o):
                return "rope sum"
        if self._has.get(self.regions.region.get(op.id, -1), set()) & NORMS and name in ("mul", "add", "div"):
            if any(base(p.target) in ("rsqrt", "sqrt") for o in operands for p in o):
                return "normalised"
            if any(self._is_weight(p) for o in operands for p in o):
                return "norm output"
        return "other"

    def _feeds_attention(self, op: Op) -> bool:
        ends = self.regions.outputs.get(self.regions.region.get(op.id, -1), ())
        return any(self.flow.ops[i].target == "attention" for i, _ in ends)

    def _is_weight(self, op: Op) -> bool:
        """A parameter, or one that was shifted (`1 + weight`)."""
        if op.kind == "parameter":
            return True
        return op.kind == "op" and bool(op.operands) and all(self.flow.ops[r.producer].kind == "parameter" for o in op.operands for r in o)
