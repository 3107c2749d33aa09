"""What pydantic cannot see in a capture: references that lead nowhere, sizes that cannot be, content that does not fit.

Captures come from other machines, so both are checked once, before anything is evaluated.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterable
from typing import Any

from graphalign.errors import CaptureFileError
from graphalign.ir.args import references
from graphalign.ir.inference import Body, InferenceGraph, Parameter, Segment, Table
from graphalign.ir.training import Input, TrainingGraph

MAX_TOKENS = 4096
"""Most tokens of a recorded forward; a few are enough."""
MAX_NUMEL = 1 << 42
"""Most elements of any tensor."""
_ARGUMENTS = {"load": 2, "store": 3, "store_reduction": 3, "get_index": 1, "constant": 1, "to_dtype": 1, "getitem": 2, "reduction": 3}
"""Least number of arguments, where it is not 1."""
_ITEM = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_HINT = "capture it again; do not trust this file"


def _refuse(what: str, where: str) -> CaptureFileError:
    return CaptureFileError(what, where=where[:200], hint=_HINT)


def verify_inference(graph: InferenceGraph) -> None:
    """Check an inference capture.

    Raises:
        CaptureFileError: it cannot be what an engine compiled.
    """
    roles = {key: _verify_body(key, body) for key, body in graph.bodies.items()}
    for p in graph.parameters:
        _numel(p.shape, p.name)
        for s in p.segments:
            if not 0 <= s.dim < max(len(p.shape), 1) or s.start < 0 or s.length < 0 or (p.shape and s.start + s.length > p.shape[s.dim]):
                raise _refuse(f"a piece of parameter {p.name} lies outside of it", str(s))
            _verify_shards(p, s)
            if s.order and (sum(max(count, 0) for *_, count in s.order) != s.length or sorted(s.rows()) != list(range(s.length))):
                raise _refuse(f"the rows of {s.checkpoint} in {p.name} are not its rows in another order", str(s.order)[:100])
    for t in graph.tables:
        _verify_table(t)
    for g in graph.graphs:
        known = {b.name for b in g.buffers} | {i.name for i in g.inputs}
        for k in g.kernels:
            for n in k.nodes:
                if n.kind == "loop" and n.body in roles and roles[n.body] > len(n.buffers):
                    raise _refuse(f"node {n.name} names fewer buffers than its loop body uses", f"graph {g.name}")
                if missing := [b for b in n.buffers if b not in known]:
                    raise _refuse(f"node {n.name} uses {missing[0]}, which is neither an input nor a buffer", f"graph {g.name}")


def _verify_shards(p: Parameter, s: Segment) -> None:
    for x in s.shards:
        dim = x.dim + len(s.index)
        held = s.length if dim == s.dim else p.shape[dim] if x.dim >= 0 and dim < len(p.shape) else -1
        along = [y for y in s.shards if y.dim == x.dim]  # several runs, where the checkpoint merges what the engine splits
        whole = sum(y.length for y in along) == held and {y.size for y in along} == {x.size}
        if not whole or x.start < 0 or x.length < 0 or x.start + x.length > x.size or x.size > MAX_NUMEL:
            raise _refuse(f"parameter {p.name} cannot hold the part of {s.checkpoint} that the capture says", str(x))


def _verify_body(key: str, body: Body) -> int:
    """Number of buffers that a body uses."""
    used = 0
    for ops in (body.ops, *body.subblocks.values()):
        for op in ops:
            if len(op) != 4 or not isinstance(op[0], str) or not isinstance(op[1], str) or not isinstance(op[2], list | tuple):
                raise _refuse(f"loop body {key} holds something that is no op", repr(op))
            name, target, args, kwargs = op
            if not isinstance(kwargs, dict) or len(args) < _ARGUMENTS.get(target, 0 if target == "output" else 1):
                raise _refuse(f"op {name} of loop body {key} lacks arguments", repr(op))
            if target in ("load", "store", "store_reduction"):
                role = args[0].get("b") if isinstance(args[0], dict) else None
                if not isinstance(role, str) or not re.fullmatch(r"b\d{1,6}", role):
                    raise _refuse(f"op {name} of loop body {key} names no buffer", repr(op))
                used = max(used, int(role[1:]) + 1)
    return used


def _verify_table(t: Table) -> None:
    width = _numel(t.shape[1:], t.name)
    if not t.shape or t.shape[0] < 1 or list(t.rows) != sorted(set(t.rows)) or (t.rows and not 0 <= t.rows[0] <= t.rows[-1] < t.shape[0]):
        raise _refuse(f"the rows of table {t.name} lie outside of it", str(t.rows[:8]))
    if _bytes(t.values, t.name) != 4 * width * len(t.rows):
        raise _refuse(f"table {t.name} does not hold as many values as its shape says", str(t.shape))


def verify_training(graph: TrainingGraph) -> None:
    """Check a training capture.

    Raises:
        CaptureFileError: it cannot be what a trainer executed.
    """
    if not 1 <= graph.header.tokens <= MAX_TOKENS:
        raise _refuse(f"a capture of {graph.header.tokens} tokens; 1 to {MAX_TOKENS} are accepted", "header.tokens")
    known: set[int] = set()
    for i in graph.inputs:
        _verify_input(i)
        known.add(i.value.id)
    for n in graph.nodes:
        where = f"{n.op} in {n.module or 'the model'}"
        _known([*n.args, *n.kwargs.values()], known, where)
        for o in n.outputs:
            if o is not None:
                _numel(o.shape, where)
                known.add(o.id)
    for v in graph.outputs:
        if v not in known:
            raise _refuse(f"the output is value {v}, which nothing computes", "outputs")


def _verify_input(i: Input) -> None:
    n = _numel(i.value.shape, i.name)
    if i.data is not None:
        if i.value.dtype in _ITEM and _bytes(i.data, i.name) != n * _ITEM[i.value.dtype]:
            raise _refuse(f"the content of {i.name} does not fit its shape", f"{i.value.dtype}{list(i.value.shape)}")


def _known(args: Iterable[Any], known: set[int], where: str) -> None:
    for v in references(list(args), "v"):
        if not isinstance(v, int) or v not in known:
            raise _refuse(f"an op reads value {v!r} before anything computes it"[:160], where)


def _numel(shape: Iterable[int], where: str) -> int:
    shape = tuple(shape)
    n = math.prod(shape) if all(0 <= s < MAX_NUMEL for s in shape) and len(shape) <= 16 else -1
    if not 0 <= n <= MAX_NUMEL:
        raise _refuse("a tensor has an impossible shape", f"{where}: {list(shape)[:8]}")
    return n


def _bytes(text: str, where: str) -> int:
    try:
        return len(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        raise _refuse("a tensor's content is not base64", where) from None
