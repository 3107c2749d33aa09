"""Module paths and the numbers in them: the one place that knows what a layer number is.

A layer's number is the first path segment that is a number: `model.layers.12.mlp.experts.3` is in layer 12.
"""

from __future__ import annotations

import functools
import re

_FIRST = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
_ANY = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")
_INSIDE = re.compile(r"(?<![\w.])((?:[A-Za-z_]\w*\.)+)(\d+)(?=[^\w]|$)")
"""A path in a longer text, up to its first number."""


@functools.lru_cache(maxsize=1 << 16)
def layer_of(path: str) -> int | None:
    """The layer that a module or tensor is in; None outside the layers."""
    m = _FIRST.search(path)
    return int(m.group(1)) if m else None


@functools.lru_cache(maxsize=1 << 16)
def pattern_of(path: str) -> str:
    """A path with its layer number as `*`."""
    return _FIRST.sub(lambda m: m.group(0).replace(m.group(1), "*"), path, count=1)


def unit_of(path: str) -> str:
    """The layer's own path, `model.layers.12`; outside the layers the path itself."""
    m = _FIRST.search(path)
    return path[: m.end()] if m else path


def in_layer(path: str, other: str) -> str:
    """A path with the layer number of another, if both have one."""
    m, n = _FIRST.search(path), layer_of(other)
    return path if m is None or n is None else f"{path[: m.start(1)]}{n}{path[m.end(1) :]}"


@functools.lru_cache(maxsize=1 << 16)
def role_of(name: str) -> str:
    """A name without any of its numbers (layers, experts, occurrences): the same in every layer."""
    return _ANY.sub("*", name)


@functools.lru_cache(maxsize=1 << 16)
def in_turn(name: str, turns: int) -> str:
    """A name, or several paths in one text, with layer numbers modulo `turns`: layers that far apart share names."""
    return _INSIDE.sub(lambda m: f"{m.group(1)}{int(m.group(2)) % turns}", name)


def ranges(numbers: tuple[int, ...]) -> str:
    """Layer numbers, ascending, in words: `0-5, 7`."""
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)
