"""Compile ranges that round differently: captures of several ranges, and two captures put together as two ranges of one."""

from __future__ import annotations

from graphalign.align.pair import prepare
from graphalign.dataflow.ranges import decode_range, exact_size, split_ranges, tokens_to_record
from graphalign.drift.compare import drift
from graphalign.drift.snapshot import of_inference
from graphalign.ir.inference import Graph, InferenceGraph, Input
from graphalign.rules import rules_dir
from graphalign.sites.find import diff, diff_pair
from tests.breadth.captured import captures
from tests.drift.data import capture, renamed, report, structure


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
    assert [of for of, _ in split_ranges(both)] == [(16, 16), (8192, 8192)]
    chosen, notes = decode_range(both, rules_dir())
    assert [g.kernels for g in chosen.graphs] == [g.kernels for g in capture("qwen3").graphs]
    assert notes[0] == "2 compile ranges; the one of 16 tokens decides about sites"
    assert notes[1].startswith("the range of 8192 tokens rounds differently on ")
    assert any(n.endswith("unrounded, bfloat16 there") for n in notes)


def test_pieces_that_all_ranges_share_are_in_each() -> None:
    both = ranges(prefill="qwen3.casts", decode="qwen3")
    layer = Input(name="layer", role="layer", source="model.layers.0.self_attn.attn")
    shared = Graph(name="attention", inputs=(layer,), buffers=(), kernels=(), outputs=(), symbols={"s72": 8192}, tokens="s72")
    split = split_ranges(both.model_copy(update={"graphs": (both.graphs[0], shared, *both.graphs[1:])}))
    assert [(of[0], [g.name for g in c.graphs][1:]) for of, c in split] == [(16, ["attention"]), (8192, ["attention"])]


def test_ranges_that_differ_in_kernels_only_round_alike() -> None:
    _, notes = decode_range(ranges(prefill="qwen3.fusion", decode="qwen3"), rules_dir())
    assert notes[1:] == ("the range of 8192 tokens rounds in the same places",)


# -- recorded: Cohere on a simulated H100, compiled for 8 tokens exactly and for any number (graphalign/drift/DRIFT.md) ----------------


def test_a_recorded_capture_has_both_ranges_and_the_one_of_fewest_tokens_decides() -> None:
    both = capture("cohere.ranges")
    assert both.header.target["compile_sizes"] == [8]
    assert [(of, exact_size(one)) for of, one in split_ranges(both)] == [((8, 8), 8), ((1, 16384), None)]
    assert tokens_to_record(both) == 8
    found = report("cohere.ranges")
    assert found.notes[:3] == (
        "2 compile ranges; the one of 8 tokens decides about sites",
        "the range of 1 to 16384 tokens rounds differently on 1 kinds of edge:",
        "  add in model.layers.* → operand 1 of add in model.layers.*: unrounded, unrounded or bfloat16 there",
    )
    assert {g.name: sum(s.count for s in g.sites) for g in found.groups} == {"residual_layernorm": 15, "residual_stream": 7, "swiglu": 5}
    assert found.stats["check"]["lowest_with_sites"] == 1.0
    for bucket in (found.leftovers, found.undetermined, found.conflicting, found.unpatchable, found.semantic):
        assert bucket == ()


def test_the_other_range_alone_has_other_sites() -> None:
    prefill = dict(split_ranges(capture("cohere.ranges")))[1, 16384]
    found = diff(prefill, captures("cohere")[1])
    assert {g.name: sum(s.count for s in g.sites) for g in found.groups}["residual_stream"] == 5
    assert not [n for n in found.notes if "range" in n]


def test_an_exact_size_is_not_compared_with_another_number_of_tokens() -> None:
    both, rules = capture("cohere.ranges"), rules_dir()
    chosen, notes = decode_range(both, rules, tokens=6)
    assert {g.range for g in chosen.graphs} == {(1, 16384)}
    assert notes[0].endswith("decides about sites, because 8 tokens exactly cannot be evaluated with the training side's 6")
    assert notes[1].startswith("the range of 8 tokens rounds differently on ")


def test_one_token_exactly_calls_other_ops_and_that_is_said() -> None:
    """Inductor turns matrix-vector products into reductions of its own, whose FP32 results are never stored in BF16."""
    one = capture("exact.one")
    assert [of for of, _ in split_ranges(one)] == [(1, 1), (1, 16384)]
    assert tokens_to_record(one) is None
    assert decode_range(one, rules_dir(), tokens=8)[1] == (
        "2 compile ranges; the one of 1 to 16384 tokens decides about sites, because 1 token exactly cannot be evaluated"
        " with the training side's 8",
        "the range of 1 token calls other ops (gemm 8 times and 0 there), so how it rounds around them is not known",
    )


def test_drift_of_captures_compares_range_by_range() -> None:
    both = structure("cohere.ranges")
    assert drift(both, of_inference(renamed(capture("cohere.ranges")), "renamed", rules_dir())).items == ()
    graphs = [g.model_copy(update={"kernels": g.kernels[:-1]}) if g.range == (1, 16384) else g for g in capture("cohere.ranges").graphs]
    cut = capture("cohere.ranges").model_copy(update={"graphs": tuple(graphs)})
    items = [i for i in drift(both, of_inference(cut, "cut", rules_dir())).items if i.moved]
    assert items
    assert all(i.what.startswith("1 to 16384 tokens: ") for i in items)
    only = split_ranges(capture("cohere.ranges"))[0][1]
    gone = [i for i in drift(both, of_inference(only, "one", rules_dir())).items if i.moved]
    assert [(i.topic, i.change, i.what) for i in gone] == [("setting", "vanished", "graphs for 1 to 16384 tokens")]


def test_whatever_compares_captures_chooses_the_range() -> None:
    """`check` and `gap` once traced all ranges as one model."""
    inference, training = capture("cohere.ranges"), captures("cohere")[1]
    pair = prepare(inference, training, rules_dir())
    assert {g.range for g in pair.capture_i.graphs} == {(8, 8)}
    assert pair.ranges[0] == "2 compile ranges; the one of 8 tokens decides about sites"
    assert diff_pair(pair, rules_dir()).notes == diff(inference, training).notes
