"""What a recorded simulated capture gives: Qwen3 (6 tiny layers) on an H100, against the recorded trainer with TRL's log-softmax."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphalign.ir.files import read_json
from graphalign.ir.inference import TAIL, VALUE, InferenceGraph
from graphalign.patch.make import make_spec
from graphalign.sites.between import compare_targets
from graphalign.sites.find import diff
from graphalign.sites.report import Report
from tests.breadth.captured import captures
from tests.breadth.captured import report as recorded

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def capture() -> InferenceGraph:
    return read_json(HERE / "data" / "qwen3.h100.inf.json.gz", InferenceGraph, kind="inference capture")


@pytest.fixture(scope="module")
def report(capture: InferenceGraph) -> Report:
    return diff(capture, captures("qwen3_tail")[1])


def test_it_says_that_it_is_simulated_and_how(capture: InferenceGraph) -> None:
    assert capture.header.simulated
    assert capture.header.target["key"] == "h100"
    assert capture.header.notes[0].startswith("simulated NVIDIA H100")
    simulation = capture.header.compile["simulation"]
    assert simulation["overrides"]["benchmark_combo_kernel"] is False
    assert any("device guard" in s for s in simulation["stand_ins"])
    assert "FMA contraction" in simulation["not_simulated"]


def test_it_holds_vllms_defaults_for_the_device(capture: InferenceGraph) -> None:
    compiled, target = capture.header.compile, capture.header.target
    assert compiled["mode"] == 3
    assert compiled["custom_ops"] == ["none"]
    assert {"vllm::unified_attention_with_output", "vllm::unified_kv_cache_update"} <= set(compiled["splitting_ops"])
    assert compiled["inductor"]["combo_kernels"] is True
    assert [k for k, v in compiled["pass_config"].items() if v is True] == ["eliminate_noops"]
    assert target["max_num_batched_tokens"] == 16384  # of the LLM class on 70 GiB and more
    assert {g.symbols[g.tokens] for g in capture.graphs if g.name != TAIL} == {16384}
    assert set(target["gemm"]) == {"aten.mm.out"}


def test_equal_pieces_were_lowered_once(capture: InferenceGraph) -> None:
    simulation = capture.header.compile["simulation"]
    assert simulation["pieces"] == 7
    assert len(simulation["lowered"]) == 3
    assert [g.name for g in capture.graphs].index(TAIL) == len(capture.graphs) - 1 == 13


def test_equal_pieces_have_names_of_their_own(capture: InferenceGraph) -> None:
    second, third = capture.graphs[2], capture.graphs[4]
    assert [n.body for k in second.kernels for n in k.nodes] == [n.body for k in third.kernels for n in k.nodes]
    down = "model.layers.{}.mlp.down_proj"
    for graph, layer in ((second, 0), (third, 1)):
        assert down.format(layer) + ".weight" in {i.source for i in graph.inputs}
        assert down.format(layer) in {n.module for k in graph.kernels for n in k.nodes}
    names = [n.name for g in capture.graphs for k in g.kernels for n in k.nodes]
    assert len(names) == len(set(names))


def test_every_value_that_is_read_was_handed_on_before(capture: InferenceGraph) -> None:
    known: set[str] = set()
    for graph in capture.graphs:
        read = {i.source.removeprefix(VALUE) for i in graph.inputs if i.source.startswith(VALUE)}
        assert read <= known
        known |= {e.name for e in graph.exports}
    assert capture.graphs[-1].outputs


def test_every_parameter_is_traced_to_the_checkpoint(capture: InferenceGraph) -> None:
    assert all(p.segments for p in capture.parameters if p.learned)
    merged = next(p for p in capture.parameters if p.name == "model.layers.3.self_attn.qkv_proj.weight")
    assert [s.checkpoint.split(".")[-2] for s in merged.segments] == ["q_proj", "k_proj", "v_proj"]
    assert len(capture.tables) == 1
    assert len(capture.tables[0].rows) > 60


def test_everything_aligns_and_the_sites_reproduce_the_engine(report: Report) -> None:
    for entries in (report.leftovers, report.undetermined, report.conflicting, report.unpatchable, report.semantic):
        assert entries == ()
    assert report.stats["check"]["equal_with_sites"] == 1.0
    assert report.stats["check"]["equal_stock"] < 0.9
    assert {g.name for g in report.groups} == {"norm_weight", "rope", "swiglu", "residual_rmsnorm", "residual_stream", "logprob_tail"}
    assert all(g.kind == "keep" for g in report.groups)


def test_the_residual_stream_is_rounded_once_per_layer(report: Report) -> None:
    """Unlike on the CPU, where it is never rounded: here only the sum in the middle of a layer stays in FP32."""
    (stream,) = [g for g in report.groups if g.name == "residual_stream"]
    (site,) = stream.sites
    assert site.layers == (0, 1, 2, 3, 4, 5)
    assert 0 < site.producer.line < site.consumer.line


def test_the_tail_is_compared(report: Report) -> None:
    """TRL's log-softmax of BF16 logits rounds, the engine's does not."""
    (site,) = next(g for g in report.groups if g.name == "logprob_tail").sites
    assert (site.kind, site.count, site.training, site.inference) == ("keep", 1, ("bfloat16",), ())


def test_what_differs_from_the_cpu_is_one_edge_per_layer(report: Report) -> None:
    found = compare_targets(recorded("qwen3_tail"), report)
    assert found.names == ("cpu", "h100 (simulated)")
    assert {name: (a, b) for name, a, b in found.groups}["residual_stream"] == (11, 6)
    (move,) = found.moves
    assert (move.group, move.first, move.second) == ("residual_stream", (1, 2, 3, 4, 5), ())


def test_the_label_goes_on_to_report_and_spec(report: Report) -> None:
    assert report.simulated
    assert report.target["simulated"] is True
    spec = make_spec(report, captures={})
    assert spec.simulated
    assert spec.target["key"] == "h100"
