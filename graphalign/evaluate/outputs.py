"""What anchors of the inference side give, and calls that combine the ranks of a tensor-parallel engine."""

from __future__ import annotations

from typing import Any

import torch

from graphalign.dataflow.identity import anchor_name
from graphalign.dataflow.opaque import OpaqueOp
from graphalign.evaluate.interpret import parameter
from graphalign.evaluate.memory import Memory
from graphalign.evaluate.shards import Part
from graphalign.evaluate.storage import UNKNOWN, Lazy
from graphalign.evaluate.values import Val
from graphalign.ir.dataflow import Op
from graphalign.ir.inference import Buffer


def output_of(memory: Memory, op: Op, b: Buffer) -> Val:
    """An anchor's output: one random block per checkpoint tensor of a merged GEMM, side by side."""
    shape = tuple(memory.size(s) for s in b.size)
    segments = op.detail.get("segments")
    if op.target == "gemm" and segments:
        occurrence = op.key[-1]
        held = op.detail["parts"]
        parts = [_features(memory, anchor_name(("gemm", c, occurrence)), shape[:-1], n, op, held.get(c)) for c, _, n in segments]
        if shape and sum(length for *_, length in segments) == shape[-1]:
            key = ("merged", tuple(p.id for p in parts))
            return memory.arithmetic.intern(key) or memory.arithmetic.put(key, torch.cat([p.data for p in parts], -1))
        if shape and not held and all(at + n <= shape[-1] for _, at, n in segments):  # a vocabulary filled up with zeros
            whole_key = ("filled up", tuple(p.id for p in parts), shape)
            filled = torch.zeros(shape, dtype=torch.float64)
            for (_, start, length), p in zip(segments, parts, strict=True):
                filled[..., start : start + length] = p.data
            return memory.arithmetic.intern(whole_key) or memory.arithmetic.put(whole_key, filled)
    name = anchor_name(op.key)
    heads, size = memory.arithmetic.heads.get(name, (0, 0))
    part = memory.arithmetic.shards.output(op) if op.target == "attention" else None
    whole = torch.Size(shape).numel()
    rows = memory.arithmetic.tokens * (part.length if part else heads)
    if rows and (part or whole > rows * size) and whole % rows == 0:  # some heads; values filled up with zeros to the size of the keys
        real = memory.arithmetic.anchor(name, (memory.arithmetic.tokens, heads, size), op.dtype)
        own = part.take(real.data, 1) if part else real.data
        filled = torch.nn.functional.pad(own, (0, whole // rows - size)).reshape(shape)
        held = ("filled up", real.id, shape, part)
        return memory.arithmetic.intern(held) or memory.arithmetic.put(held, filled)
    return memory.arithmetic.anchor(name, shape, op.dtype)


def _features(memory: Memory, name: str, rows: tuple[int, ...], length: int, op: Op, part: Part | None) -> Val:
    """Output features of a GEMM with one checkpoint tensor; of all of them, if the rank computes a part."""
    if part is None or part.length != length:
        known = memory.arithmetic.anchor(name, (*rows, length), op.dtype)
        order = op.detail["orders"].get(name.split("|")[1])
        key = ("ordered", known.id, tuple(order or ()))
        return known if order is None else memory.arithmetic.intern(key) or memory.arithmetic.put(key, known.data[..., order])
    whole = memory.arithmetic.anchor(name, (*rows, part.size), op.dtype)
    held = ("part", whole.id, part)
    return memory.arithmetic.intern(held) or memory.arithmetic.put(held, part.take(whole.data, -1))


def handed_on(memory: Memory, rule: OpaqueOp, args: dict[str, Any], producer: Op) -> torch.Tensor | None:
    """What a call that combines the ranks returns: the whole of what it reads, see `dataflow.partial`. None where it writes an argument.

    Args:
        memory: the buffers; an argument that is written is stored here.
        rule: the call's.
        args: its arguments.
        producer: what made the values that it reads.
    """
    if rule.kind == "embedding":
        rows = memory.argument(args[rule.input]).reshape(-1).long()
        source, width = memory.source(args[rule.weight]["b"]), memory.size(memory.inputs[args[rule.weight]["b"]].size[-1])
        assert isinstance(source, Lazy)
        here = (rows >= args["org_vocab_start_index"]) & (rows < args["org_vocab_end_index"])
        index = (rows - args["org_vocab_start_index"]).clamp(min=0)[:, None] * width + torch.arange(width)
        found = parameter(memory.arithmetic, source, index)
        memory.place(args[rule.out]["b"], torch.where(here[:, None], found, 0.0))
        return None
    data = memory.argument(args[rule.input])
    if rule.kind == "gather":
        checkpoint, _, _ = producer.detail["segments"][0]
        part = producer.detail["parts"].get(checkpoint)
        whole = memory.arithmetic.anchor(
            anchor_name(producer.key), (*data.shape[:-1], part.size if part else data.shape[-1]), producer.dtype
        )
        missing = data.shape[-1] * int(args["world_size"]) - whole.data.shape[-1]  # the last rank's rows that fill the vocabulary up
        data = torch.nn.functional.pad(whole.data, (0, missing), value=UNKNOWN)
    return data
