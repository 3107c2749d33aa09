"""What one rank of a tensor-parallel engine holds of the trainer's values, as the capture records it for every parameter.

Elements that another rank holds are unknown (NaN) on the training side, from the anchors that a rank computes only a part of to the
anchors that read such a part. What has no partner because it is elsewhere is decided by that, never by how values compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from graphalign.dataflow.identity import nearest_anchors
from graphalign.errors import CaptureFileError
from graphalign.evaluate.storage import UNKNOWN
from graphalign.ir.dataflow import Dataflow, Op
from graphalign.ir.inference import InferenceGraph, Segment

QUERY_KEY_VALUE = 3
HINT = "capture it again; do not trust this file"
BATCHED = 4
"""Dimensions of an attention's query, key, value on the training side: batch, heads, tokens, size."""


@dataclass(frozen=True)
class Part:
    """Runs of elements along one dimension, in the order in which the engine holds them."""

    runs: tuple[tuple[int, int], ...]
    """(first, length). Several where one checkpoint tensor merges what the engine splits one by one (query, key and value)."""
    size: int
    """Of the whole dimension."""

    @property
    def length(self) -> int:
        """Number of elements."""
        return sum(n for _, n in self.runs)

    def places(self) -> list[int]:
        """The elements' indices."""
        return [first + i for first, n in self.runs for i in range(n)]

    def take(self, data: torch.Tensor, dim: int) -> torch.Tensor:
        """The rank's part of a whole tensor.

        Raises:
            CaptureFileError: the tensor has another size than the recorded whole.
        """
        if not data.dim() or data.shape[dim] != self.size:
            raise CaptureFileError(
                f"the capture records a part of {self.size} elements along a dimension of {list(data.shape)}",
                where=f"first element and length of its runs: {self.runs}",
                hint=HINT,
            )
        parts = [data.narrow(dim, first, n) for first, n in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def hide(self, data: torch.Tensor, dim: int) -> torch.Tensor:
        """A whole tensor with all elements unknown but the rank's."""
        return torch.full_like(data, UNKNOWN).index_copy(dim, torch.tensor(self.places()), self.take(data, dim))

    def of(self, count: int) -> Part | None:
        """The same part counted in `count` equal units (heads); None if it is no whole number of them."""
        if any(x * count % self.size for run in self.runs for x in run):
            return None
        return Part(tuple((first * count // self.size, n * count // self.size) for first, n in self.runs), count)

    def within(self, start: int, size: int) -> Part:
        """The part of some of the elements, counted from the first of these."""
        runs = ((max(first, start), min(first + n, start + size)) for first, n in self.runs)
        return Part(tuple((a - start, b - a) for a, b in runs if a < b), size)


def part_of(segment: Segment, dim: int) -> Part | None:
    """The part along a dimension of the checkpoint tensor; None if it is whole."""
    found = [x for x in segment.shards if x.dim == dim]
    return Part(tuple((x.start, x.length) for x in found), found[0].size) if found else None


@dataclass(frozen=True)
class Shards:
    """What the rank computes and reads of every anchor. Empty for an engine of one rank."""

    outputs: Mapping[str, Part] = field(default_factory=dict)
    """Checkpoint tensor of a GEMM whose output features the rank computes a part of."""
    inputs: Mapping[str, Part] = field(default_factory=dict)
    """Checkpoint tensor of a GEMM that sums over a part of its input features; the ranks' sums are added afterwards."""
    heads: Mapping[tuple[object, ...], tuple[Part, ...]] = field(default_factory=dict)
    """Key of an attention to its part of the heads of query, key and value."""
    parameters: Mapping[str, Mapping[int, Part]] = field(default_factory=dict)
    """Checkpoint tensor to its parts, by dimension."""

    def output(self, op: Op) -> Part | None:
        """The part of a training anchor's output that the rank computes: of a GEMM's features, an attention's heads. None if all of it."""
        if op.target == "gemm":
            return self.outputs.get(str(op.key[1]))
        return self.heads[op.key][0] if op.target == "attention" and op.key in self.heads else None

    def reads(self, op: Op) -> tuple[Part, ...]:
        """The parts of its operands that a training anchor's counterpart reads; empty if it reads all."""
        if op.target == "gemm" and (part := self.inputs.get(str(op.key[1]))) is not None:
            return (part,)
        return self.heads.get(op.key, ()) if op.target == "attention" else ()

    def operand(self, op: Op, slot: int, data: torch.Tensor) -> torch.Tensor:
        """The rank's part of what a training anchor reads, in the trainer's layout."""
        parts = self.reads(op)
        if not parts or slot >= len(parts) or (op.target == "attention" and data.dim() != BATCHED):
            return data
        return parts[slot].take(data, 1 if op.target == "attention" else data.dim() - 1)


def read_shards(capture: InferenceGraph, inference: Dataflow, training: Dataflow, heads: Mapping[int, tuple[int, int, int]]) -> Shards:
    """Collect the recorded parts.

    Args:
        capture: the engine's side.
        inference: the same, traced.
        training: the trainer's side, traced.
        heads: training attention (op) to its numbers of heads of query, key and value.

    Raises:
        CaptureFileError: recorded parts contradict each other.
    """
    parameters: dict[str, dict[int, Part]] = {}
    for p in capture.parameters:
        for s in p.segments:
            parts = {x.dim: part for x in s.shards if (part := part_of(s, x.dim)) is not None}
            if not s.index and parameters.setdefault(s.checkpoint, parts) != parts:
                raise CaptureFileError(f"two parameters hold different parts of {s.checkpoint}", where=p.name, hint=HINT)
    parameters = {name: parts for name, parts in parameters.items() if parts}
    if not parameters:
        return Shards()
    outputs: dict[str, Part] = {}
    inputs: dict[str, Part] = {}
    for op in inference.ops:
        if op.target != "gemm":
            continue
        for checkpoint in op.key[1:-1]:
            own = parameters.get(checkpoint, {})
            if 0 in own and not op.detail.get("gathered"):
                outputs[checkpoint] = own[0]
            if 1 in own:
                inputs[checkpoint] = own[1]
    engines = {op.key: str(op.detail.get("layer")) for op in inference.ops if op.target == "attention"}
    layers = {a.layer: (a.heads, a.kv_heads) for a in capture.attention}
    held: dict[tuple[object, ...], tuple[Part, ...]] = {}
    for op in training.ops:
        if op.target == "attention" and op.id in heads and op.key in engines and len(op.operands) >= QUERY_KEY_VALUE:
            found = _heads(op, training, heads[op.id], outputs, layers.get(engines[op.key], (None, None)))
            if found:
                held[op.key] = found
    return Shards(outputs, inputs, held, parameters)


def _heads(op: Op, flow: Dataflow, counts: Iterable[int], outputs: Mapping[str, Part], engine: tuple[int | None, int | None]
           ) -> tuple[Part, ...]:  # fmt: skip
    """The rank's heads of an attention's query, key and value, from the parts of the GEMMs above them; empty if it has all."""
    where, counts = op.module or op.name, list(counts)
    above = [nearest_anchors(flow.ops, [op.operands[slot]]) for slot in range(len(counts))]
    merged = above[0] if above[0] == above[1] == above[2] and len(above[0]) == 1 else ()  # heads of query, key, value, side by side
    parts: list[Part] = []
    for slot, count in enumerate(counts):
        whole = Part(((0, count),), count)
        if merged:
            all_heads = outputs[merged[0]].of(sum(counts)) if merged[0] in outputs else None
            found = {all_heads and all_heads.within(sum(counts[:slot]), count)} if merged[0] in outputs else set()
        else:
            found = {outputs[n].of(count) for n in above[slot] if n in outputs}
        if len(found) > 1 or None in found:
            raise CaptureFileError("the parts of an attention's projections are no whole number of the same heads", where=where, hint=HINT)
        parts.append(found.pop() or whole if found else whole)
    if all(p.length == p.size for p in parts):
        return ()
    q, k, v = parts
    if k != v or not k.length or q.length % k.length or q.size % k.size:
        raise CaptureFileError("the parts of an attention's key and value do not fit each other", where=where, hint=HINT)
    here, group = q.length // k.length, q.size // k.size
    if any(head // group != k.places()[i // here] for i, head in enumerate(q.places())):
        raise CaptureFileError("an attention's query heads would read the keys of other heads than the trainer's", where=where, hint=HINT)
    if any(n is not None and n != p.length for n, p in zip(engine, (q, k), strict=True)):
        raise CaptureFileError(
            f"the engine's attention has {engine[0]} and {engine[1]} heads, its projections' parts {q.length} and {k.length}",
            where=where,
            hint=HINT,
        )
    return q, k, v
