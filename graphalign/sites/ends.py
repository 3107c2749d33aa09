"""Naming the ends of a training edge so that the name survives: module pattern, function, op, ordinal, source."""

from __future__ import annotations

from collections import Counter

from graphalign.evaluate import aten
from graphalign.ir.dataflow import Dataflow, Op
from graphalign.ir.paths import layer_of, pattern_of
from graphalign.ir.training import Source, TrainingGraph
from graphalign.sites.report import End

__all__ = ["Ends", "layer_of", "pattern_of"]


class Ends:
    """Makes `End`s of one training graph."""

    def __init__(self, training: TrainingGraph, flow: Dataflow) -> None:
        self.training, self.flow = training, flow
        self.ordinals = self._number()

    def _number(self) -> dict[int, int]:
        """Ordinal of every op among equal ATen ops of the same function and module, over all nodes that ran.

        The steps of an op that was taken apart have the op's ordinal.
        """
        steps = {op.detail["node"]: op.detail["step"] for op in self.flow.ops if "step" in op.detail}
        seen: Counter[tuple[str, str, str]] = Counter()
        ordinal: dict[int, int] = {}
        for n, node in enumerate(self.training.nodes):
            function = self.training.sources[node.source].function if node.source is not None else ""
            made = steps.get(n)
            key = (node.module, function, aten.base(node.op if made is None else made.op))
            ordinal[n] = seen[key]
            seen[key] += made is None or made.last
        return {op.id: ordinal.get(op.detail.get("made" if op.detail.get("outside") else "node", -1), 0) for op in self.flow.ops}

    def end(self, op_id: int, slot: int | None = None) -> End:
        """One end of an edge; `slot` for a consumer's operand."""
        op = self.flow.ops[op_id]
        s = self.source(op)
        named = op.kind == "parameter" or (op.kind == "table" and not op.detail.get("outside"))
        what = op.kind if named or op.kind not in ("op", "anchor", "table") else op.target
        if (made := op.detail.get("step")) is not None:
            what = made.op if made.last and slot is None else made.name
        if op.target == "gemm" and slot is not None:
            what = op.detail.get("op", what)  # a patch edits this op's operand
        base = End(module=pattern_of(op.target if named else op.module), op=what, ordinal=self.ordinals[op.id], operand=slot)
        if s is None:
            return base
        span = {"line": s.line, "column": s.column, "end_line": s.end_line, "end_column": s.end_column}
        return base.model_copy(update={"function": s.function, "file": s.file, "text": s.text, **span})

    def source(self, op: Op) -> Source | None:
        """The source expression of an op."""
        known = isinstance(op.source, int) and 0 <= op.source < len(self.training.sources)
        return self.training.sources[op.source] if known and isinstance(op.source, int) else None
