"""The positions that both sides are asked at, and what the trainer decides by them.

Transformers picks LongRoPE's and dynamic NTK's frequencies by a batch's longest position. A capture has the branch that was taken: values
at positions that take the other one would be of no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx
import torch

from graphalign.errors import BadInputError
from graphalign.evaluate.run_training import native_constants
from graphalign.evaluate.table_rows import recorded_positions, rows_read
from graphalign.evaluate.trace_inference import Tracer
from graphalign.evaluate.trace_training import Tracer as TrainingTracer
from graphalign.evaluate.trace_training import decode_constant
from graphalign.evaluate.values import Arithmetic
from graphalign.ir.args import references
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import Node, TrainingGraph

ASKED = frozenset({"_local_scalar_dense", "is_nonzero", "item", "equal"})
"""Ops that hand a tensor's content to Python."""


def choose_positions(inference: InferenceGraph, tracer: Tracer, tokens: int, shift: int) -> tuple[int, ...]:
    """`tokens` positions spread over the engine's range, such that every row it reads of its tables is recorded, if there are enough.

    Tables of fewer rows (a scalar multiplier) are not indexed by position. `shift` picks another set, for the check.
    The range is the engine's `max_model_len`; of a capture that does not record it, the model's.
    """
    end = inference.reach
    rows: set[int] | None = None
    for t in inference.tables:
        held = {r for r in t.rows if not end or r < end}
        if len(held) >= tokens:
            both = held if rows is None else rows & held
            rows = both if len(both) >= tokens else rows
    available = sorted(rows or [])
    if len(available) < tokens:
        top = end or int(inference.header.model.get("max_position_embeddings") or 2048)
        available = sorted({min(top - 1, i) for i in range(tokens * 4)} | {top - 1})
    picked = _spread(available, tokens, shift)
    arithmetic = Arithmetic(0, picked, (0,) * len(picked))
    if rows_read(inference, tracer, arithmetic).unrecorded:
        known = recorded_positions(inference, tracer, arithmetic, available, tokens)
        picked = _spread(known, tokens, shift) if len(known) >= tokens else picked
    return picked


def _spread(available: Sequence[int], tokens: int, shift: int) -> tuple[int, ...]:
    usable = available[shift : len(available)] if len(available) - shift >= tokens else available
    return tuple(usable[round(i * (len(usable) - 1) / max(tokens - 1, 1))] for i in range(tokens))


# -- what the trainer decides -----------------------------------------------------------------------------------------------


class Decisions:
    """The places where the trainer's Python asks for a number that depends on positions."""

    def __init__(self, capture: TrainingGraph, tracer: TrainingTracer) -> None:
        self.capture, self.tracer = capture, tracer
        self.recorded = next((_ints(i.data, i.value) for i in capture.inputs if _is_positions(i) and i.data is not None), None)
        self.nodes: list[Node] = []
        graph: nx.DiGraph[int] = nx.DiGraph()
        made: dict[int, int] = {}
        for n, node in enumerate(capture.nodes):
            read = list(references(node.args, "v"))
            graph.add_edges_from((v, o.id) for v in read for o in node.outputs if o is not None)
            made.update((o.id, n) for o in node.outputs if o is not None)
        positions = {i.value.id for i in capture.inputs if _is_positions(i)}
        behind = positions.union(*(nx.descendants(graph, v) for v in positions if v in graph))
        above: set[int] = set()
        for node in capture.nodes:
            asked = node.op.split(".")[1:2] and node.op.split(".")[1] in ASKED
            read = list(references(node.args, "v"))
            if asked and read and read[0] in behind and all(v in tracer.constant for v in read):
                self.nodes.append(node)
                above |= {made[u] for v in read for u in ({v} | nx.ancestors(graph, v)) if u in made}
        self.part = capture.model_copy(update={"nodes": tuple(capture.nodes[n] for n in sorted(above))})

    def outcomes(self, positions: Sequence[int]) -> list[Any]:
        """What each of them gets at some positions, one for every recorded token; None if that cannot be evaluated."""
        env = native_constants(self.part, self.tracer, Arithmetic(0, tuple(positions), (0,) * len(positions)))
        found = [[env.get(v) for v in references(node.args, "v")] for node in self.nodes]
        return [[x.tolist() for x in read if x is not None] if all(x is not None for x in read) else None for read in found]

    def changed(self, positions: Sequence[int]) -> list[Node]:
        """Those that get something else at some positions than when the capture was recorded."""
        if not self.nodes or self.recorded is None or len(self.recorded) != len(positions):
            return []
        then, now = self.outcomes(self.recorded), self.outcomes(positions)
        return [node for node, a, b in zip(self.nodes, then, now, strict=True) if a is not None and b is not None and a != b]

    def where(self, node: Node) -> str:
        """A place in words."""
        s = self.capture.sources[node.source] if node.source is not None else None
        return f"{s.file}:{s.line} {s.text}" if s is not None else node.module or node.op


def refuse_other_branch(training: TrainingGraph, tracer: TrainingTracer, positions: Sequence[int], inference: InferenceGraph) -> None:
    """Refuse a training capture that took another branch than it would take at positions of the engine's range.

    Raises:
        BadInputError: it did.
    """
    decisions = Decisions(training, tracer)
    changed = decisions.changed(positions)
    if changed:
        last, end = max(decisions.recorded or [0]), inference.reach
        raise BadInputError(
            f"the trainer was recorded at positions up to {last}; at the engine's, up to {max(positions)}, it computes something else",
            where=decisions.where(changed[0]),
            hint=f"record it with `capture training --max-model-len {end or max(positions) + 1}`",
        )


def branch_notes(training: TrainingGraph, tracer: TrainingTracer, positions: Sequence[int]) -> tuple[str, ...]:
    """In words, for each decision of the trainer that falls otherwise in shorter batches: these were not compared."""
    decisions = Decisions(training, tracer)
    first = tuple(range(len(positions)))
    out = []
    for node in decisions.changed(first):
        n = decisions.nodes.index(node)
        then = decisions.outcomes(decisions.recorded or ())[n]
        longest = _first(lambda last: decisions.outcomes((*first[:-1], last))[n] == then, first[-1], max(positions))  # noqa: B023
        out.append(
            f"the trainer decides by a batch's longest position ({decisions.where(node)}): it was compared as it is from {longest} on, "
            f"up to {max(positions)}; what it computes for shorter batches was not compared, and the engine need not do the same there"
        )
    return tuple(dict.fromkeys(out))


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The least number up to `high` from which on something holds, which does not at `low` and does at `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _is_positions(i: Any) -> bool:
    return i.kind == "input" and "position" in i.name


def _ints(data: str, value: Any) -> list[int]:
    return [int(x) for x in torch.as_tensor(decode_constant(data, value.dtype, value.shape)).reshape(-1).tolist()]
