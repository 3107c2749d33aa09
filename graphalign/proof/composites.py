"""Which op of the live trainer makes the result of a composite anchor (fused experts): there the engine's result takes its place.

The live model names no ops. So the op is found by what ran before it: it is the n-th of its kind and size behind a matmul of a named
weight, or that matmul.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from graphalign.align.pair import Pair
from graphalign.dataflow.identity import anchor_name
from graphalign.evaluate.aten import MATMULS, TRANSPARENT, base
from graphalign.ir.args import references
from graphalign.ir.dataflow import Op
from graphalign.ir.training import TrainingGraph

_SAME_START = frozenset({"t", "transpose", "view", "_unsafe_view", "unsqueeze", "permute", "expand", "alias", "detach"})
"""Views of a whole tensor: they start at the same address."""
_IN_ORDER = frozenset({"view", "_unsafe_view", "reshape", "_to_copy", "clone", "unsqueeze", "squeeze", "detach"})
"""Ops that change neither the values, but for casts, nor their order."""
Place = tuple[str, int, str, float, int]
"""Weight of the last matmul, which use of it, base name of the op, elements per token, how many of the kind came before."""


@dataclass
class Counted:
    """Where a run is."""

    uses: Counter[str] = field(default_factory=Counter)
    seen: Counter[tuple[str, float]] = field(default_factory=Counter)
    weight: str = ""

    def matmul(self, weight: str) -> Place:
        """A matmul of a named weight ran: its place."""
        self.weight = weight
        self.uses[weight] += 1
        self.seen.clear()
        return weight, self.uses[weight], "", 0.0, 0

    def op(self, name: str, elements: float) -> Place:
        """Another op ran: its place."""
        n = self.seen[name, elements]
        self.seen[name, elements] += 1
        return self.weight, self.uses[self.weight], name, elements, n


def composite_ends(capture: TrainingGraph, pair: Pair) -> dict[Place, Op]:
    """The composite anchors of the trainer's graph whose result can be replaced, by the place of the op that makes it.

    Args:
        capture: the stock model, as recorded.
        pair: both captures, with composite anchors.
    """
    results = {}
    for op in pair.flow_t.ops:
        if op.kind == "anchor" and op.target == "composite" and anchor_name(op.key) not in pair.factors:
            out = pair.capture_t.nodes[op.detail["node"]].outputs[0]
            if out is not None:
                results[out.id] = op
    made = {o.id: n for n, node in enumerate(capture.nodes) for o in node.outputs if o is not None}
    targets: dict[int, Op] = {}
    for value, op in results.items():
        while value in made and base((node := capture.nodes[made[value]]).op) in _IN_ORDER and (reads := list(references(node.args, "v"))):
            value = reads[0]
        if value in made:
            targets[made[value]] = op
    weights = {i.value.id: i.name for i in capture.inputs if i.kind == "parameter"}
    state, found = Counted(), {}
    for n, node in enumerate(capture.nodes):
        name, read = base(node.op), list(references(node.args, "v"))
        if name in _SAME_START and read and read[0] in weights:
            weights.update((o.id, weights[read[0]]) for o in node.outputs if o is not None)
        first = next((o for o in node.outputs if o is not None), None)
        if name in MATMULS and (weight := next((weights[v] for v in read if v in weights), None)) is not None:
            place = state.matmul(weight)
        elif name not in TRANSPARENT and first is not None and not node.op.startswith("graphalign."):
            place = state.op(name, math.prod(first.shape) / capture.header.tokens)
        else:
            continue
        if n in targets:
            found[place] = targets[n]
    return found


class Ends:
    """Follows a live run and says where a composite anchor ends."""

    def __init__(self, ends: dict[Place, Op], names: dict[int, str], tokens: int) -> None:
        self.ends, self.names, self.tokens = ends, names, tokens
        self.state = Counted()

    def reset(self) -> None:
        """A new run begins."""
        self.state = Counted()

    def follow(self, name: str, args: Any, result: Any) -> Op | None:
        """The composite anchor whose result an op has just made.

        Args:
            name: the op's base name.
            args: its positional arguments.
            result: what it returned.
        """
        if name in MATMULS:
            known = (self.names.get(a.data_ptr()) for a in args if isinstance(a, torch.Tensor))
            if (weight := next((n for n in known if n), None)) is not None:
                return self.ends.get(self.state.matmul(weight))
        first = next((x for x in (result if isinstance(result, tuple | list) else [result]) if isinstance(x, torch.Tensor)), None)
        if name in TRANSPARENT or not name or first is None:
            return None
        return self.ends.get(self.state.op(name, first.numel() / self.tokens))
