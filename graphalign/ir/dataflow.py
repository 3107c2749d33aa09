"""The form both sides are compared in: operations joined by edges that carry roundings.

Casts, views, stores, loads, concatenations and sign changes are not operations; they are what an edge passes
through. A producer's elements reach a consumer's operand along one or more edges (several after a concatenation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import networkx as nx

from graphalign.ir.graph import met

LOW_PRECISION = frozenset({"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
"""Formats below FP32: storing into one of them is a rounding."""


SELECTIONS = frozenset(
    {"topk", "sort", "amax", "amin", "relu", "abs", "index", "gather", "maximum", "minimum", "reduction.max", "reduction.min"}
)
"""Ops whose results are elements of their operands: storing them in the operands' own format is no rounding."""


@dataclass(frozen=True, slots=True)
class Ref:
    """An edge's tail: where an operand's elements come from."""

    producer: int
    """Index of the producing op."""
    roundings: tuple[str, ...] = ()
    """Formats the value is rounded to on the way, in order, repeats of the same format dropped."""
    via: tuple[str, ...] = ()
    """Buffers (inference) that the value passes through, for evidence."""

    def rounded(self, dtype: str, via: str | None = None) -> Ref:
        """The same edge, rounded once more."""
        roundings = self.roundings
        if dtype in LOW_PRECISION and (not roundings or roundings[-1] != dtype):
            roundings += (dtype,)
        return Ref(self.producer, roundings, (*self.via, via) if via else self.via)

    def through(self, via: str) -> Ref:
        """The same edge, passing through a buffer without a rounding."""
        return Ref(self.producer, self.roundings, (*self.via, via))


Operand = tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """A node: something that makes a new value."""

    id: int
    name: str
    """Unique and readable: `op31.mul_2` or `%812`."""
    kind: str
    """`op`, `anchor`, `parameter`, `table`, `input`, `output`."""
    target: str
    """What it computes: `mul`, `aten.mul.Tensor`, `gemm`, `attention`, a parameter's name."""
    operands: tuple[Operand, ...] = ()
    dtype: str = "float32"
    """Format of its result as the producer leaves it (training), before any edge."""
    module: str = ""
    source: int | str | None = None
    where: str = ""
    """Kernel (inference)."""
    key: tuple[Any, ...] = ()
    """Anchors: canonical identity shared by both sides. Parameters: checkpoint name."""
    detail: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)


def selected_format(target: str, operands: Sequence[Operand]) -> str:
    """The format in which an op's result is exact already, because it only selects among operands rounded to it; empty if none."""
    formats = {r.roundings[-1] if r.roundings else "" for o in operands for r in o}
    return formats.pop() if target in SELECTIONS and len(formats) == 1 else ""


@dataclass(frozen=True)
class Dataflow:
    """One side, as ops in execution order."""

    side: str
    """`training` or `inference`."""
    ops: tuple[Op, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def graph(self) -> nx.MultiDiGraph:
        """The ops by index (attribute `op`), and an edge for each way of a producer's elements into a consumer's operand.

        An edge's key is (operand slot, number in the operand), its attribute `ref` the `Ref` with the roundings on the way.
        """
        graph = nx.MultiDiGraph()
        graph.add_nodes_from((op.id, {"op": op}) for op in self.ops)
        graph.add_edges_from(
            (ref.producer, op.id, (slot, part), {"ref": ref})
            for op in self.ops for slot, operand in enumerate(op.operands) for part, ref in enumerate(operand)
        )  # fmt: skip
        return graph

    @cached_property
    def readers(self) -> dict[int, list[tuple[int, int]]]:
        """Producer index to the (consumer index, operand slot) pairs that read it, ascending."""
        return {i: [(c, slot) for _, c, (slot, _) in self.graph.out_edges(i, keys=True)] for i, n in self.graph.out_degree if n}

    def above(self, starts: Iterable[int], through: Callable[[int], bool]) -> Iterator[int]:
        """Ops met on the way up from `starts`, these included; beyond an op only where `through` holds of it. Lazy, breadth first."""
        up = self.graph.pred
        return met(starts, lambda i: up[i] if through(i) else (), len(self.ops))

    def below(self, starts: Iterable[int], through: Callable[[int], bool]) -> Iterator[int]:
        """The same on the way down."""
        down = self.graph.succ
        return met(starts, lambda i: down[i] if through(i) else (), len(self.ops))

    def is_op(self, i: int) -> bool:
        """Whether it is an op: no anchor, parameter, table, input or output."""
        return self.ops[i].kind == "op"

    def read_by(self, i: int, slots: Iterable[int] | None = None) -> list[int]:
        """Producers of an op's operands, or of some of them, in order, as often as they are read."""
        operands = self.ops[i].operands
        return [r.producer for o in (operands if slots is None else (operands[s] for s in slots)) for r in o]

    def text(self) -> str:
        """One op per line: name, target, operands with their roundings."""

        def show(operand: Operand) -> str:
            parts = [self.ops[r.producer].name + "".join(f"!{x}" for x in r.roundings) for r in operand]
            return parts[0] if len(parts) == 1 else "{" + " ".join(parts) + "}"

        return "\n".join(
            f"{op.name} = {op.kind} {op.target}({', '.join(show(o) for o in op.operands)})" + (f"  # {op.module}" if op.module else "")
            for op in self.ops
        )

    def verify(self) -> None:
        """Raise ValueError unless ids are positions and every edge points backwards."""
        for i, op in enumerate(self.ops):
            if op.id != i or any(not 0 <= r.producer < i for o in op.operands for r in o):
                raise ValueError(f"{self.side} dataflow is not in execution order at {op.name}")
