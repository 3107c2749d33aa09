"""Compile ranges: where the engine compiled the model more than once, the graphs of one range are picked.

vLLM compiles each piece once per compile range and once per compile size. Prefill and decode then run different kernels, and may
round in different places. Decode is where rollouts come from, so its range decides the spec: the one of fewest tokens. The others are
compared with it and reported. What was compiled for one exact size can only be evaluated with as many tokens.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from graphalign.dataflow.census import Census, of_inference
from graphalign.ir.inference import Graph, InferenceGraph

Range = tuple[int, int]
"""First and last token count; equal for one exact size, and for a capture that says no more than the count it was compiled with."""
MAX_LINES = 4
MAX_EXACT = 64
"""Largest exact size for which the training side is captured with as many tokens."""


def split_ranges(capture: InferenceGraph) -> list[tuple[Range, InferenceGraph]]:
    """One capture per compile range, fewest tokens (decode) first.

    Graphs say which range they are for. Where they do not, two that read the same parameters and layers are one piece of the model
    in two ranges, told apart by the token count they were compiled with; graphs come in the order of compilation.
    """
    named = sorted({g.range for g in capture.graphs if g.range is not None}, key=lambda r: (r[1], r[0]))
    if named:
        chosen = [(r, tuple(g for g in capture.graphs if g.range in (None, r))) for r in named]
    else:
        pieces: dict[frozenset[str] | int, list[Graph]] = {}
        for n, graph in enumerate(capture.graphs):
            pieces.setdefault(_piece(graph) or n, []).append(graph)
        count = max((len(p) for p in pieces.values()), default=0)
        if count < 2:
            return [((0, 0), capture)]
        # a piece that was compiled less often (attention, compiled once for all ranges) belongs to the later ranges too
        groups = [tuple(p[min(k, len(p) - 1)] for p in pieces.values()) for k in range(count)]
        chosen = sorted((((n := min(map(_tokens, graphs)), n), graphs) for graphs in groups), key=lambda r: r[0])
    return [(r, capture.model_copy(update={"graphs": graphs})) for r, graphs in chosen]


def _piece(graph: Graph) -> frozenset[str]:
    """What tells the pieces of the model apart: the parameters and attention layers that a graph reads."""
    return frozenset(i.source for i in graph.inputs if i.role in ("parameter", "layer") or (i.role == "other" and "." in i.source))


def _tokens(graph: Graph) -> int:
    """Number of tokens that a graph was compiled with: its symbol's hint, or the size of its token ids."""
    if graph.tokens in graph.symbols:
        return graph.symbols[graph.tokens]
    sizes = [i.size[-1] for i in graph.inputs if i.role == "tensor" and i.size and i.size[-1].isdecimal()]
    return int(sizes[0]) if sizes else 0


def exact_size(capture: InferenceGraph) -> int | None:
    """The token count that the graphs of one range are for, None if they serve any."""
    sizes = {g.range[0] for g in capture.graphs if g.range is not None and g.range[0] == g.range[1]}
    return sizes.pop() if sizes else None


def tokens_to_record(capture: InferenceGraph) -> int | None:
    """How many tokens the training side should be captured with, so that the decode range can be evaluated; None if any will do."""
    for _, one in split_ranges(capture):
        size = exact_size(one)
        if size is None or 2 <= size <= MAX_EXACT:  # a forward of one token joins nothing: it has one position, the first
            return size
    return None


def range_words(of: Range) -> str:
    """`1 token`, `17 to 8192 tokens`."""
    first, last = of
    return f"{first} to {last} tokens" if last > first else f"{first} token{'s' if first != 1 else ''}"


def decode_range(capture: InferenceGraph, rules: Path, tokens: int | None = None) -> tuple[InferenceGraph, tuple[str, ...]]:
    """The capture of the decode range alone, and in words where other ranges round differently.

    Args:
        capture: the engine's side, perhaps of several ranges.
        rules: folder of rules.
        tokens: tokens of the training capture; what was compiled for another exact size cannot be evaluated and does not decide.

    Raises:
        CaptureFileError: the capture is inconsistent.
    """
    ranges = split_ranges(capture)
    if len(ranges) == 1:
        return capture, ()
    fitting = [r for r in ranges if exact_size(r[1]) in (None, tokens)]
    of, decode = (fitting or ranges)[0]
    base = of_inference(decode, rules)
    notes = [f"{len(ranges)} compile ranges; the one of {range_words(of)} decides about sites"]
    if (of, decode) != ranges[0]:
        notes[0] += f", because {range_words(ranges[0][0])} exactly cannot be evaluated with the training side's {tokens}"
    for other_of, other in ranges:
        if other_of != of:
            notes += _compared(f"the range of {range_words(other_of)}", base, of_inference(other, rules))
    return decode, tuple(notes)


def _compared(name: str, base: Census, other: Census) -> list[str]:
    """What another range does differently."""
    differ = _differing(base, other)
    notes = [f"{name} rounds differently on {len(differ)} kinds of edge:"] if differ else []
    notes += [f"  {line}" for line in differ[:MAX_LINES]]
    notes += [f"  and {len(differ) - MAX_LINES} more"] if len(differ) > MAX_LINES else []
    a, b = _anchors(base), _anchors(other)
    if a != b:
        counts = ", ".join(f"{op} {a[op]} times and {b[op]} there" for op in sorted({*a, *b}) if a[op] != b[op])
        notes.append(f"{name} calls other ops ({counts}), so how it rounds around them is not known")
    elif not differ:
        notes.append(f"{name} rounds in the same places")
    return notes


def _anchors(census: Census) -> Counter[str]:
    """GEMMs, attention and opaque ops, whose results round at their store."""
    found: Counter[str] = Counter()
    for (target, _), n in census.ops.items():
        if target in ("gemm", "attention", "composite") or ("." in target and not target.startswith(("aten.", "reduction."))):
            found[target] += n
    return found


def _differing(decode: Census, other: Census) -> list[str]:
    """Edges that both ranges have, with other roundings."""
    out = []
    for (producer, consumer, slot), layers in sorted(decode.edges.items()):
        a = {r for v in layers.values() for r in v}
        b = {r for v in other.edges.get((producer, consumer, slot), {}).values() for r in v}
        if b and a != b:
            out.append(f"{producer} → operand {slot} of {consumer}: {_words(a)}, {_words(b)} there")
    return out


def _words(roundings: set[tuple[str, ...]]) -> str:
    return " or ".join(" then ".join(r) or "unrounded" for r in sorted(roundings))
