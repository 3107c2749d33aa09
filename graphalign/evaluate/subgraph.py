"""A part of the training graph, evaluated by itself: with given inputs, in its own formats or in FP64."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from graphalign.dataflow.trace_training import decode_constant
from graphalign.errors import UnsupportedOpError
from graphalign.evaluate.aten import base
from graphalign.evaluate.run_training import call
from graphalign.ir.args import references
from graphalign.ir.paths import pattern_of
from graphalign.ir.training import Input, Node, TrainingGraph

Weights = Callable[[str, tuple[int, ...]], torch.Tensor]
"""A parameter's content by its name and shape."""
_REFERENCE = re.compile(r"\{'v': \d+\}")
DEEP = 1 << 14
"""Ops in a row that are followed from a result to its inputs."""


class Subgraph:
    """Evaluates values of a capture on demand.

    Args:
        capture: the training graph.
        given: values that are known, by id, float32 or integer.
        weights: gives parameters.
        native: keep the recorded formats; otherwise all is computed in float64.
    """

    def __init__(self, capture: TrainingGraph, given: Mapping[int, torch.Tensor], weights: Weights, *, native: bool) -> None:
        self.capture, self.weights, self.native = capture, weights, native
        self.node_of = {o.id: n for n, node in enumerate(capture.nodes) for o in node.outputs if o is not None}
        self.inputs: dict[int, Input] = {i.value.id: i for i in capture.inputs}
        dtypes = {i.value.id: i.value.dtype for i in capture.inputs}
        dtypes |= {o.id: o.dtype for node in capture.nodes for o in node.outputs if o is not None}
        self.env = {v: self._held(x, dtypes[v]) for v, x in given.items()}

    def value(self, v: int) -> torch.Tensor:
        """The content of a value.

        Raises:
            UnsupportedOpError: an op that is not known, or a run-time input that is not given.
        """
        with _deep():
            return self._value(v)

    def signature(self, v: int) -> str:
        """What makes a value: equal texts mean equal functions of what is given, up to the layer in parameters' names."""
        number: dict[int, int] = {}
        lines: list[str] = []
        given = {at: slot for slot, at in enumerate(self.env)}

        def visit(at: int) -> int:
            if at not in number:
                number[at] = -1
                text = f"given {given[at]}" if at in given else input_text(self.inputs[at]) if at in self.inputs else node_text(at)
                number[at] = len(lines)
                lines.append(text)
            return number[at]

        def input_text(i: Input) -> str:
            return f"{i.kind} {pattern_of(i.name)} {i.value.dtype} {i.value.shape} {i.data}"

        def node_text(at: int) -> str:
            node = self.capture.nodes[self.node_of[at]]
            read = [visit(u) for a in (node.args, *node.kwargs.values()) for u in references(a, "v")]
            outputs = [o and (o.id == at, o.dtype, o.shape) for o in node.outputs]
            return f"{node.op} {_REFERENCE.sub('v', repr((node.args, node.kwargs)))} {read} {outputs}"

        with _deep():
            visit(v)
        return "\n".join(lines)

    def _value(self, v: int) -> torch.Tensor:
        if v not in self.env:
            if (i := self.inputs.get(v)) is not None:
                self.env[v] = self._input(i)
            else:
                node = self.capture.nodes[self.node_of[v]]
                result = self._call(node)
                results = result if isinstance(result, tuple | list) else [result]
                self.env.update((o.id, x) for o, x in zip(node.outputs, results, strict=False) if o is not None)
                if v not in self.env:
                    raise UnsupportedOpError(f"{node.op} gave no value {v}")
        return self.env[v]

    def _input(self, i: Input) -> torch.Tensor:
        if i.kind == "parameter":
            return self._held(self.weights(i.name, i.value.shape), i.value.dtype)
        if i.data is None or i.kind == "input":
            raise UnsupportedOpError(f"it reads the {i.kind} {i.name}, which the engine's op is not given")
        data: torch.Tensor = decode_constant(i.data, i.value.dtype, i.value.shape)
        return data if self.native or not data.is_floating_point() else data.double()

    def _call(self, node: Node) -> torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor]:
        read = [*references(node.args, "v"), *(v for a in node.kwargs.values() for v in references(a, "v"))]
        tensors = [self._value(v) for v in read]
        if base(node.op) == "_grouped_mm" and len(tensors) == 3 and not self.native:
            return _grouped_mm(*tensors)
        return call(node, tensors, native=self.native)  # type: ignore[no-any-return]

    def _held(self, data: torch.Tensor, dtype: str) -> torch.Tensor:
        return data.to(getattr(torch, dtype)) if self.native or not data.is_floating_point() else data.double()


@contextmanager
def _deep() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEEP))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`aten._grouped_mm` of rows [rows, k] in groups that end at `offsets`, each with its matrix of [groups, k, n]; any dtype."""
    ends = offsets.tolist()
    parts = [a[start:end] @ b[g] for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*parts, a.new_zeros(a.shape[0] - (ends[-1] if ends else 0), b.shape[-1])])
