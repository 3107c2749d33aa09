"""Compile ranges: where the engine compiled the model more than once, the graphs of one range are picked.

vLLM compiles each piece once per compile range or compile size. Prefill and decode then run different kernels, and may round in
different places. Decode is where rollouts come from, so its range decides the spec; the others are compared with it and reported.
"""

from __future__ import annotations

from pathlib import Path

from graphalign.ir.inference import Graph, InferenceGraph
from graphalign.patch.census import Census, of_inference

MAX_LINES = 8


def split_ranges(capture: InferenceGraph) -> list[tuple[int, InferenceGraph]]:
    """One capture per compile range, with the token count it was compiled for, fewest tokens (decode) first.

    Two graphs that read the same parameters and layers are one piece of the model in two ranges; graphs come in the order of compilation.
    """
    pieces: dict[frozenset[str] | int, list[Graph]] = {}
    for n, graph in enumerate(capture.graphs):
        pieces.setdefault(_piece(graph) or n, []).append(graph)
    count = max((len(p) for p in pieces.values()), default=0)
    if count < 2:
        return [(_tokens(capture.graphs[0]) if capture.graphs else 0, capture)]
    # a piece that was compiled less often (attention, compiled once for all ranges) belongs to the later ranges too
    ranges = [tuple(p[min(k, len(p) - 1)] for p in pieces.values()) for k in range(count)]
    split = [(min(_tokens(g) for g in graphs), capture.model_copy(update={"graphs": graphs})) for graphs in ranges]
    return sorted(split, key=lambda r: r[0])


def _piece(graph: Graph) -> frozenset[str]:
    """What tells the pieces of the model apart: the parameters and attention layers that a graph reads."""
    return frozenset(i.source for i in graph.inputs if i.role in ("parameter", "layer") or (i.role == "other" and "." in i.source))


def _tokens(graph: Graph) -> int:
    """Number of tokens that a graph was compiled for: its symbol's hint, or the size of its token ids."""
    if graph.tokens in graph.symbols:
        return graph.symbols[graph.tokens]
    sizes = [i.size[-1] for i in graph.inputs if i.role == "tensor" and i.size and i.size[-1].isdecimal()]
    return int(sizes[0]) if sizes else 0


def decode_range(capture: InferenceGraph, rules: Path) -> tuple[InferenceGraph, tuple[str, ...]]:
    """The capture of the decode range alone, and in words where other ranges round differently.

    Raises:
        CaptureFileError: the capture is inconsistent.
    """
    ranges = split_ranges(capture)
    tokens, decode = ranges[0]
    if len(ranges) == 1:
        return capture, ()
    base = of_inference(decode, rules)
    notes = [f"{len(ranges)} compile ranges; the one of {tokens} tokens (decode) decides about sites"]
    for other_tokens, other in ranges[1:]:
        differ = _differing(base, of_inference(other, rules))
        if not differ:
            notes.append(f"the range of {other_tokens} tokens rounds in the same places")
            continue
        notes.append(f"the range of {other_tokens} tokens rounds differently on {len(differ)} kinds of edge")
        notes += [f"  {line}" for line in differ[:MAX_LINES]]
    return decode, tuple(notes)


def _differing(decode: Census, other: Census) -> list[str]:
    """Edges that both ranges have, with other roundings."""
    out = []
    for (producer, consumer, slot), layers in sorted(decode.edges.items()):
        a = {r for v in layers.values() for r in v}
        b = {r for v in other.edges.get((producer, consumer, slot), {}).values() for r in v}
        if b and a != b:
            out.append(f"{producer} → operand {slot} of {consumer}: {_words(a)} in decode, {_words(b)} there")
    return out


def _words(roundings: set[tuple[str, ...]]) -> str:
    return " or ".join(" then ".join(r) or "unrounded" for r in sorted(roundings))
