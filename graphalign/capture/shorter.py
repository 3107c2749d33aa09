"""Whether a batch of the first few positions runs as one that reaches far: some trainers pick their rotary frequencies by the longest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphalign.capture.recorder import Recording


def alike(a: Recording, b: Recording) -> bool:
    """Whether two recordings are the same ops on the same constants, as far as both go; inputs and how values are numbered do not count."""
    return all(x == y for x, y in zip(_described(a), _described(b), strict=False))


def _described(recording: Recording) -> Iterator[tuple[Any, ...]]:
    given = {i.value.id: i for i in recording.inputs}
    number: dict[int, Any] = {}

    def value(v: int) -> Any:
        if v in given and v not in number:
            i = given[v]
            number[v] = i.name if i.kind in ("parameter", "input") else (i.value.dtype, i.value.shape, i.data)
        return number.setdefault(v, len(number))

    def described(arg: Any) -> Any:
        if isinstance(arg, dict):
            return ("value", value(arg["v"])) if "v" in arg else tuple(sorted((k, repr(x)) for k, x in arg.items()))
        return tuple(described(x) for x in arg) if isinstance(arg, list | tuple) else arg

    for node in recording.nodes:
        read = tuple(described(a) for a in (*node.args, *node.kwargs.values()))
        yield node.op, node.module, tuple(node.kwargs), read, tuple(o and (o.dtype, o.shape, value(o.id)) for o in node.outputs)
