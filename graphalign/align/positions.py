"""The positions that both sides are asked at, and what the trainer decides by them.

Transformers picks LongRoPE's and dynamic NTK's frequencies by a batch's longest position. A capture has the branch that was taken: values
at positions that take the other one would be of no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graphalign.dataflow.opaque import load_opaque_ops
from graphalign.dataflow.ranges import decode_range, tokens_to_record
from graphalign.dataflow.returns import unwrap
from graphalign.dataflow.trace_inference import Tracer
from graphalign.dataflow.trace_training import Tracer as TrainingTracer
from graphalign.dataflow.trace_training import decode_constant
from graphalign.errors import BadInputError
from graphalign.evaluate.run_training import native_constants
from graphalign.evaluate.table_rows import recorded_positions, rows_read
from graphalign.evaluate.values import Arithmetic
from graphalign.ir.args import references
from graphalign.ir.asked import is_positions, questions
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import Node, TrainingGraph

TOKENS = 8
"""Tokens of a training capture, if the engine does not say how many it is compiled for."""


def choose_positions(inference: InferenceGraph, tracer: Tracer, tokens: int, shift: int, end: int | None = None) -> tuple[int, ...]:
    """`tokens` positions spread over the engine's range, such that every row it reads of its tables is recorded, if there are enough.

    Tables of fewer rows (a scalar multiplier) are not indexed by position. `shift` picks another set, for the check.
    The range is the engine's `max_model_len`; of a capture that does not record it, the model's; and it ends before `end`.
    """
    end = min((n for n in (inference.reach, end) if n), default=None)
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


def reach_of(inference: InferenceGraph, rules: Path) -> int | None:
    """How many positions the trainer should be recorded at: the engine's `max_model_len`, if its tables go as far; None if not recorded.

    A table may have fewer rows (dynamic NTK's, vLLM 0.32): the engine then reads outside it.
    """
    if inference.reach is None or all(len(t.shape) < 2 or t.shape[0] >= inference.reach for t in inference.tables):
        return inference.reach
    tokens = tokens_to_record(inference) or TOKENS
    known = load_opaque_ops(rules)
    decode = unwrap(decode_range(inference, rules, tokens)[0], known)
    tracer = Tracer(decode, known)
    tracer.run()
    return max(choose_positions(decode, tracer, tokens, 0)) + 1


# -- what the trainer decides -----------------------------------------------------------------------------------------------


class Decisions:
    """The places where the trainer's Python asks for a number that depends on positions and on nothing that is learned."""

    def __init__(self, capture: TrainingGraph, tracer: TrainingTracer) -> None:
        self.capture, self.tracer = capture, tracer
        self.recorded = recorded_at(capture)
        found = questions(capture.inputs, capture.nodes)
        found = {n: above for n, above in found.items() if all(v in tracer.constant for v in references(capture.nodes[n].args, "v"))}
        self.nodes = [capture.nodes[n] for n in found]
        above = set[int]().union(*found.values())
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


def refuse_other_branch(training: TrainingGraph, tracer: TrainingTracer, positions: Sequence[int], reach: Callable[[], int]) -> None:
    """Refuse a training capture that took another branch than it would take at positions of the engine's range.

    Args:
        training: the trainer's side.
        tracer: the same, traced.
        positions: at which both sides are to be evaluated.
        reach: tells how many positions to record the trainer at instead.

    Raises:
        BadInputError: it did.
    """
    decisions = Decisions(training, tracer)
    changed = decisions.changed(positions)
    if changed:
        last = max(decisions.recorded or [0])
        raise BadInputError(
            f"the trainer was recorded at positions up to {last}; at the engine's, up to {max(positions)}, it computes something else",
            where=decisions.where(changed[0]),
            hint=f"record it with `capture training --max-model-len {reach()}`",
        )


def range_notes(training: TrainingGraph, tracer: TrainingTracer, positions: Sequence[int], inference: InferenceGraph) -> tuple[str, ...]:
    """In words, which positions were not compared: those behind the last, and shorter batches for which the trainer decides otherwise."""
    out = []
    last, end = max(positions), inference.reach
    if end is not None and last + 1 < end:
        recorded = max(recorded_at(training) or (last,))
        why = f"the trainer was recorded up to {recorded}" if recorded == last else "no rows of the engine's tables are recorded for more"
        out.append(f"positions were compared up to {last}, the engine takes them up to {end - 1} (max_model_len): {why}")
    if training.header.shorter == "same":
        return tuple(out)
    decisions = Decisions(training, tracer)
    first = tuple(range(len(positions)))
    for node in decisions.changed(first):
        n = decisions.nodes.index(node)
        then = decisions.outcomes(decisions.recorded or ())[n]
        longest = _first(lambda last: decisions.outcomes((*first[:-1], last))[n] == then, first[-1], max(positions))  # noqa: B023
        out.append(
            f"the trainer decides by a batch's longest position ({decisions.where(node)}): it was compared as it is from {longest} on, "
            f"up to {last}; what it computes for shorter batches was not compared, and the engine need not do the same there "
            f"(`capture training --max-model-len {longest}` and `diff` compare them)"
        )
    return tuple(dict.fromkeys(out))


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The least number up to `high` from which on something holds, which does not at `low` and does at `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def recorded_at(training: TrainingGraph) -> tuple[int, ...] | None:
    """The positions that the trainer was recorded at; None if the model takes none."""
    for i in training.inputs:
        if is_positions(i) and i.data is not None:
            return tuple(int(x) for x in decode_constant(i.data, i.value.dtype, i.value.shape).reshape(-1).tolist())
    return None
