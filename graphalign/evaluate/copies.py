"""Parameters that a kernel copies before a GEMM reads them: `lm_head.weight.to(torch.float32)` is still that weight.

Only a copy of every element to its own place in a format that holds it exactly counts. Anything else (a slice, another order, a
rounding) makes another matrix, and the GEMM that reads it is not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from graphalign.ir.inference import Body, Buffer, Input, Node

HOLDS = {
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float16": ("float16", "float32", "float64"),
    "float32": ("float32", "float64"),
    "float64": ("float64",),
}
"""Formats that hold every number of a format."""
STEPS = frozenset({"get_index", "load", "to_dtype", "identity", "store", "output"})


def copied(
    node: Node, body: Body, inputs: Mapping[str, Input], buffers: Mapping[str, Buffer], known: Mapping[str, str]
) -> tuple[str, str] | None:
    """The buffer that a loop copies a parameter to, and the graph input that is the parameter.

    Args:
        node: a loop.
        body: what it computes.
        inputs, buffers: of the graph, by name.
        known: copies made before, buffer to input.
    """
    if body.subblocks or not {target for _, target, _, _ in body.ops} <= STEPS:
        return None
    loads = [(name, args) for name, target, args, _ in body.ops if target == "load"]
    stores = [args for _, target, args, _ in body.ops if target == "store"]
    if len(loads) != 1 or len(stores) != 1 or any(mode is not None for mode in stores[0][3:]):
        return None
    binding = {f"b{i}": b for i, b in enumerate(node.buffers)}
    source, target = _buffer(loads[0][1][0], binding), _buffer(stores[0][0], binding)
    if _place(body, loads[0][1][1]) is None or _place(body, loads[0][1][1]) != _place(body, stores[0][1]):
        return None
    source = known.get(source, source)
    i, b = inputs.get(source), buffers.get(target)
    if i is None or i.role != "parameter" or b is None or b.view_of is not None:
        return None
    formats = [a["dtype"] for _, t, args, _ in body.ops if t == "to_dtype" for a in args if isinstance(a, dict) and "dtype" in a]
    exact = HOLDS.get(i.dtype or "", ())
    same = (b.size, b.stride) == (i.size, i.stride) and _count([n for _, n in body.var_ranges]) == _count(b.size)
    return (target, source) if same and all(f in exact for f in (*formats, b.dtype)) else None


def _count(sizes: Sequence[str]) -> int | None:
    return math.prod(map(int, sizes)) if all(s.isdecimal() for s in sizes) else None


def _buffer(arg: Any, binding: Mapping[str, str]) -> str:
    role = str(arg["b"]) if isinstance(arg, dict) and "b" in arg else str(arg)
    return binding.get(role, role)


def _place(body: Body, arg: Any) -> str | None:
    """The index expression that a load or store uses."""
    name = arg.get("n") if isinstance(arg, dict) else None
    used = next((args for n, target, args, _ in body.ops if n == name and target == "get_index"), None)
    return body.indexing.get(str(used[0])) if used else None
