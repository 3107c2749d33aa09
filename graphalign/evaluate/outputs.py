"""What anchors of the inference side give, and calls that combine the ranks of a tensor-parallel engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from graphalign.dataflow.identity import anchor_name
from graphalign.evaluate.interpret import parameter
from graphalign.evaluate.shards import Part
from graphalign.evaluate.storage import UNKNOWN, Lazy
from graphalign.evaluate.values import Val
from graphalign.ir.dataflow import Op
from graphalign.ir.inference import Buffer, Node

if TYPE_CHECKING:
    from graphalign.evaluate.run_inference import Run


def output_of(run: Run, op: Op, b: Buffer) -> Val:
    """An anchor's output: one random block per checkpoint tensor of a merged GEMM, side by side."""
    shape = tuple(run._size(s) for s in b.size)
    segments = op.detail.get("segments")
    if op.target == "gemm" and segments:
        occurrence = op.key[-1]
        held = op.detail["parts"]
        parts = [_features(run, anchor_name(("gemm", c, occurrence)), shape[:-1], n, op, held.get(c)) for c, _, n in segments]
        if shape and sum(length for *_, length in segments) == shape[-1]:
            key = ("merged", tuple(p.id for p in parts))
            return run.arithmetic.intern(key) or run.arithmetic.put(key, torch.cat([p.data for p in parts], -1))
        if shape and not held and all(at + n <= shape[-1] for _, at, n in segments):  # a vocabulary filled up with zeros
            whole_key = ("filled up", tuple(p.id for p in parts), shape)
            filled = torch.zeros(shape, dtype=torch.float64)
            for (_, start, length), p in zip(segments, parts, strict=True):
                filled[..., start : start + length] = p.data
            return run.arithmetic.intern(whole_key) or run.arithmetic.put(whole_key, filled)
    name = anchor_name(op.key)
    heads, size = run.arithmetic.heads.get(name, (0, 0))
    part = run.arithmetic.shards.output(op) if op.target == "attention" else None
    whole = torch.Size(shape).numel()
    rows = run.arithmetic.tokens * (part.length if part else heads)
    if rows and (part or whole > rows * size) and whole % rows == 0:  # some heads; values filled up with zeros to the size of the keys
        real = run.arithmetic.anchor(name, (run.arithmetic.tokens, heads, size), op.dtype)
        own = part.take(real.data, 1) if part else real.data
        filled = torch.nn.functional.pad(own, (0, whole // rows - size)).reshape(shape)
        held = ("filled up", real.id, shape, part)
        return run.arithmetic.intern(held) or run.arithmetic.put(held, filled)
    return run.arithmetic.anchor(name, shape, op.dtype)


def _features(run: Run, name: str, rows: tuple[int, ...], length: int, op: Op, part: Part | None) -> Val:
    """Output features of a GEMM with one checkpoint tensor; of all of them, if the rank computes a part."""
    if part is None or part.length != length:
        known = run.arithmetic.anchor(name, (*rows, length), op.dtype)
        order = op.detail["orders"].get(name.split("|")[1])
        key = ("ordered", known.id, tuple(order or ()))
        return known if order is None else run.arithmetic.intern(key) or run.arithmetic.put(key, known.data[..., order])
    whole = run.arithmetic.anchor(name, (*rows, part.size), op.dtype)
    held = ("part", whole.id, part)
    return run.arithmetic.intern(held) or run.arithmetic.put(held, part.take(whole.data, -1))


def hand_on(run: Run, node: Node, args: dict[str, Any]) -> None:
    """A call that combines the ranks: the whole of what it reads, see `partial`."""
    rule = run.tracer.rules[node.op]
    if rule.kind == "embedding":
        rows = run._argument(args[rule.input]).reshape(-1).long()
        source, width = run._source(args[rule.weight]["b"]), run._size(run.inputs[args[rule.weight]["b"]].size[-1])
        assert isinstance(source, Lazy)
        here = (rows >= args["org_vocab_start_index"]) & (rows < args["org_vocab_end_index"])
        index = (rows - args["org_vocab_start_index"]).clamp(min=0)[:, None] * width + torch.arange(width)
        found = parameter(run.arithmetic, source, index)
        run._place(args[rule.out]["b"], torch.where(here[:, None], found, 0.0))
        return
    data = run._argument(args[rule.input])
    if rule.kind == "gather":
        op = run.tracer.ops[run.tracer.partial.handed_on[run.g, node.name][0].producer]
        checkpoint, _, _ = op.detail["segments"][0]
        part = op.detail["parts"].get(checkpoint)
        whole = run.arithmetic.anchor(anchor_name(op.key), (*data.shape[:-1], part.size if part else data.shape[-1]), op.dtype)
        missing = data.shape[-1] * int(args["world_size"]) - whole.data.shape[-1]  # the last rank's rows that fill the vocabulary up
        data = torch.nn.functional.pad(whole.data, (0, missing), value=UNKNOWN)
    for o in node.outputs:
        run.results[o] = [data]
        run._place(o, data)
