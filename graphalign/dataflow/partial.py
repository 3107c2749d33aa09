"""Sums that one rank of a tensor-parallel engine computes a part of.

A GEMM that sums over a part of its input features leaves one rank's part of its result; `all_reduce` adds the ranks' parts, each
rounded when it was stored. In exact arithmetic that is the trainer's GEMM, so the anchor stands for the whole sum, and `all_reduce`
hands it on like a copy. In between, parts may be added to each other and multiplied by what all ranks have; a part that is read by
anything else stands for nothing the trainer computes, and its anchor is not matched. Likewise `all_gather` behind a GEMM hands on
the whole result, and the rows of an embedding that other ranks hold come with its `all_reduce`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from graphalign.ir.dataflow import Op, Operand
from graphalign.ir.graph import met
from graphalign.ir.inference import VALUE, Buffer, Input, Parameter

PART = "part of a sum"
"""What an anchor is whose part is read before it is summed."""
SUMMED_OVER = 1
"""Dimension of a checkpoint tensor [output features, input features] that a GEMM sums over."""


@dataclass
class Partial:
    """Which values are one rank's part of a sum, while a capture is traced."""

    buffers: set[str] = field(default_factory=set)
    """Of the current graph."""
    exported: set[str] = field(default_factory=set)
    entered: set[int] = field(default_factory=set)
    """Ops whose part was read as if it were whole."""
    summed: set[int] = field(default_factory=set)
    """Ops whose parts are summed by an `all_reduce`."""
    handed_on: dict[tuple[int, str], Operand] = field(default_factory=dict)
    """(graph, node) of calls that hand on the whole of what they read, to that."""

    def holds(self, inputs: Mapping[str, Input], buffers: Mapping[str, Buffer], name: str) -> bool:
        """Whether a buffer or input of a graph holds a part."""
        seen: set[str] = set()
        while name not in seen:
            if name in self.buffers:
                return True
            seen.add(name)
            i, b = inputs.get(name), buffers.get(name)
            if i is not None and i.source.startswith(VALUE):
                return i.source.removeprefix(VALUE) in self.exported
            name = b.view_of if b is not None and b.view_of else name
        return False

    def settle(self, ops: list[Op]) -> list[str]:
        """Take the anchors whose parts do not become whole out of the comparison.

        Returns:
            What was found and what is not compared, in words.
        """
        names = {"parameter": "embedding", "gemm": "GEMM", "composite": "fused MoE"}
        parts = [ops[i] for i in sorted(self.summed)]
        kinds = Counter(names.get(op.target if op.kind == "anchor" else op.kind, "other value") for op in parts)
        listed = " and ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in sorted(kinds.items()))
        notes = [f"residue, not compared: all_reduce adds the ranks' parts of {listed}, each rounded when it is stored"] if listed else []
        lost = met(self.entered, lambda i: [r.producer for o in ops[i].operands for r in o] if ops[i].kind == "op" else (), len(ops))
        found = [ops[i] for i in sorted(lost) if ops[i].kind == "anchor"]
        for op in found:
            ops[op.id] = replace(op, target=PART, key=(PART, *op.key))
        return notes + [f"one rank's part of {op.module or op.name} is read before the ranks' parts are summed" for op in found]


def sums_a_part(parameters: list[Parameter]) -> bool:
    """Whether a GEMM or fused experts with these weights compute one rank's part of a sum."""
    return any(s.dim == SUMMED_OVER or bool(x.index) for p in parameters for x in p.segments for s in x.shards)
