"""Compile ranges that round differently: two real captures of one model, put together as two ranges of one."""

from __future__ import annotations

from graphalign.ir.inference import Graph, InferenceGraph, Input
from graphalign.patch.ranges import decode_range, split_ranges
from graphalign.rules import rules_dir
from tests.drift.data import capture


def compiled_for(graph: Graph, tokens: int) -> Graph:
    return graph.model_copy(update={"symbols": {**graph.symbols, graph.tokens: tokens}})


def ranges(prefill: str, decode: str) -> InferenceGraph:
    a, b = capture(prefill), capture(decode)
    graphs = (*(compiled_for(g, 8192) for g in a.graphs), *(compiled_for(g, 16) for g in b.graphs))
    return a.model_copy(update={"graphs": graphs, "bodies": {**a.bodies, **b.bodies}})


def test_one_range_is_left_alone() -> None:
    graph = capture("qwen3")
    assert decode_range(graph, rules_dir()) == (graph, ())


def test_the_decode_range_decides_and_others_are_reported() -> None:
    both = ranges(prefill="qwen3.casts", decode="qwen3")
    assert [tokens for tokens, _ in split_ranges(both)] == [16, 8192]
    chosen, notes = decode_range(both, rules_dir())
    assert [g.kernels for g in chosen.graphs] == [g.kernels for g in capture("qwen3").graphs]
    assert notes[0] == "2 compile ranges; the one of 16 tokens (decode) decides about sites"
    assert notes[1].startswith("the range of 8192 tokens rounds differently on ")
    assert any("unrounded in decode, bfloat16 there" in n for n in notes)


def test_pieces_that_all_ranges_share_are_in_each() -> None:
    both = ranges(prefill="qwen3.casts", decode="qwen3")
    layer = Input(name="layer", role="layer", source="model.layers.0.self_attn.attn")
    shared = Graph(name="attention", inputs=(layer,), buffers=(), kernels=(), outputs=(), symbols={"s72": 8192}, tokens="s72")
    split = split_ranges(both.model_copy(update={"graphs": (both.graphs[0], shared, *both.graphs[1:])}))
    assert [(tokens, [g.name for g in c.graphs][1:]) for tokens, c in split] == [(16, ["attention"]), (8192, ["attention"])]


def test_ranges_that_differ_in_kernels_only_round_alike() -> None:
    _, notes = decode_range(ranges(prefill="qwen3.fusion", decode="qwen3"), rules_dir())
    assert notes[1:] == ("the range of 8192 tokens rounds in the same places",)
