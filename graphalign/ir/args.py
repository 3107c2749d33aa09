"""How op arguments are written in captures: plain JSON, nothing that could run.

| in the graph | in the file |
| --- | --- |
| tensor of the training graph | `{"v": 12}` |
| buffer or graph input of the inference graph | `{"b": "buf3"}` |
| the same, read through a view | `{"b": "buf0", "size": ["s72", "32"], "stride": ["256", "1"], "offset": "192"}` |
| packed form or handle of an engine parameter (CPU GEMM weights) | `{"param": "model.layers.0.mlp.down_proj.weight"}` |
| result of another op of a loop body | `{"n": "mul_1"}` |
| dtype, device | `{"dtype": "bfloat16"}`, `{"device": "cpu"}` |
| layout, memory format | `{"layout": "strided"}`, `{"memory_format": "contiguous_format"}` |
| dict with string keys | `{"dict": [["key", value]]}` |
| symbolic size or index expression | `{"e": "128*p0 + p1"}` |
| layer name behind an opaque object | `{"layer": "model.layers.0.self_attn.attn"}` |
| inf, -inf, nan | `{"f": "inf"}` |
| anything else that is not JSON | `{"opaque": "its type's name"}` |
| None, bool, int, float, str, list | itself |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def references(arg: Any, key: str) -> Iterator[Any]:
    """All references of one kind (`"v"`, `"b"`, `"n"`) in an encoded argument, in order, with repeats."""
    if isinstance(arg, dict):
        if key in arg:
            yield arg[key]
    elif isinstance(arg, list | tuple):
        for x in arg:
            yield from references(x, key)


def buffers_of(arg: Any) -> list[str]:
    """The buffers that an argument names, itself or in a list."""
    if isinstance(arg, dict):
        return [arg["b"]] if isinstance(arg.get("b"), str) else []
    if isinstance(arg, list | tuple):
        return [b for a in arg for b in buffers_of(a)]
    return []
