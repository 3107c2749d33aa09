"""One rank of a tensor-parallel engine: recorded captures of Qwen3 (4 query and 2 key heads) against the recorded trainer, whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from graphalign.align.pair import prepare
from graphalign.capture.engine_script import Probe, Refused, World
from graphalign.capture.inference import capture_inference
from graphalign.console import with_ranks
from graphalign.engines.gpu import model, script
from graphalign.engines.gpu.interpret import Externs, Unsupported
from graphalign.errors import AlignmentError, BadInputError, CaptureFileError
from graphalign.evaluate.shards import Part
from graphalign.evaluate.values import round_to
from graphalign.ir.files import read_json
from graphalign.ir.inference import InferenceGraph, Node, Segment
from graphalign.patch.make import make_spec
from graphalign.patch.spec import refuse_other_target
from graphalign.rules import rules_dir
from graphalign.sites.between import compare_targets
from graphalign.sites.find import diff
from graphalign.sites.report import Report
from tests.breadth.captured import captures

DATA = Path(__file__).parent / "data"
FUSED = {"norm_weight": 25, "rope": 48, "swiglu": 6, "logprob_tail": 1}
"""The fused all-reduce stores the residual sum in BF16, and its norm reads what is stored."""
APART = {**FUSED, "residual_rmsnorm": 24, "residual_stream": 6}
"""As on one GPU."""


@cache
def capture(name: str) -> InferenceGraph:
    return read_json(DATA / f"qwen3.{name}.inf.json.gz", InferenceGraph, kind="inference capture")


@cache
def report(name: str) -> Report:
    return diff(capture(name), captures("qwen3_tail")[1])


def counts(found: Report) -> dict[str, int]:
    return {g.name: sum(s.count for s in g.sites) for g in found.groups}


def segments(graph: InferenceGraph, end: str) -> list[Segment]:
    return [s for p in graph.parameters for s in p.segments if s.checkpoint.endswith(f"layers.1.{end}.weight")]


def changed(name: str, change: Callable[[Segment], Segment], end: str) -> InferenceGraph:
    """A capture whose header says something else about the second layer's weight of that name."""
    parameters = tuple(
        p.model_copy(update={"segments": tuple(change(s) if s in segments(capture(name), end) else s for s in p.segments)})
        for p in capture(name).parameters
    )
    return capture(name).model_copy(update={"parameters": parameters})


def moved(s: Segment) -> Segment:
    """The part that another rank holds."""
    (shard,) = s.shards
    return s.model_copy(update={"shards": (shard.model_copy(update={"start": shard.start + shard.length}),)})


# -- what is found ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "expected"), [("h100.tp2", FUSED), ("h100.tp4", FUSED), ("a100.tp2", APART)])
def test_all_that_the_rank_holds_aligns_and_the_sites_reproduce_it(name: str, expected: dict[str, int]) -> None:
    found = report(name)
    assert counts(found) == expected
    for entries in (found.leftovers, found.undetermined, found.conflicting, found.unpatchable, found.semantic):
        assert entries == ()
    assert found.stats["check"]["operands"] == 62
    assert found.stats["check"]["lowest_with_sites"] == 1.0
    assert found.stats["check"]["equal_stock"] < 0.9
    assert found.stats["training_paired"] == found.stats["training_ops"]


def test_without_the_fusion_the_sites_are_those_of_one_gpu() -> None:
    one = report("h100")
    assert counts(one) == counts(report("a100.tp2"))
    assert compare_targets(one, report("a100.tp2")).moves == ()


def test_with_it_the_residual_stream_is_rounded_where_the_trainer_rounds() -> None:
    found = compare_targets(report("h100"), report("h100.tp2"))
    assert found.names == ("h100 (simulated)", "h100 tp 2 (simulated)")
    assert {m.group for m in found.moves} == {"residual_rmsnorm", "residual_stream"}
    assert all(not m.second for m in found.moves)


def test_prefill_beyond_the_fusions_limit_is_named() -> None:
    notes = report("h100.tp4").notes
    assert notes[0] == "2 compile ranges; the one of 1 to 8192 tokens decides about sites"
    assert "the range of 8193 to 16384 tokens rounds differently" in notes[1]


# -- what the capture says ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks"), [("h100.tp2", 2), ("h100.tp4", 4)])
def test_it_records_which_part_of_every_weight_the_rank_holds(name: str, ranks: int) -> None:
    graph = capture(name)
    assert (graph.header.target["tp"], graph.header.target["rank"]) == (ranks, 0)
    parts = {end: segments(graph, end)[0].shards for end in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")}
    assert [(x.dim, x.start, x.length, x.size) for x in parts["self_attn.q_proj"]] == [(0, 0, 128 // ranks, 128)]
    assert [(x.dim, x.start, x.length, x.size) for x in parts["self_attn.k_proj"]] == [(0, 0, 32, 64)]  # two key heads: replicated on four
    assert [(x.dim, x.start, x.length, x.size) for x in parts["self_attn.o_proj"]] == [(1, 0, 128 // ranks, 128)]
    assert [(x.dim, x.start, x.length, x.size) for x in parts["mlp.down_proj"]] == [(1, 0, 256 // ranks, 256)]
    assert segments(graph, "input_layernorm")[0].shards == ()
    assert {(a.heads, a.kv_heads) for a in graph.attention} == {(4 // ranks, 1)}


def test_stand_ins_residue_and_unknowns_are_named() -> None:
    simulation, notes = capture("h100.tp2").header.compile["simulation"], report("h100.tp2").notes
    assert capture("h100.tp2").header.compile["pass_config"]["fuse_allreduce_rms"] is True
    assert any("rank 0 of 2" in s for s in simulation["stand_ins"])
    assert any("FlashInfer" in s for s in simulation["stand_ins"])
    assert any("all_reduce adds the 2 ranks' parts" in s for s in simulation["not_simulated"])
    assert any("which FlashInfer kernel" in n and "is not known" in n for n in notes)
    assert any(n.startswith("residue, not compared: all_reduce adds the ranks' parts of 12 GEMMs and 1 embedding") for n in notes)
    assert not any("FlashInfer" in n for n in report("a100.tp2").notes)


def test_a_spec_is_for_its_number_of_ranks() -> None:
    spec = make_spec(report("h100.tp2"), captures={})
    assert spec.target["tp"] == 2
    refuse_other_target(spec, capture("h100.tp2").header.target)
    with pytest.raises(BadInputError, match="for another target") as failure:
        refuse_other_target(spec, capture("h100").header.target)
    assert failure.value.where == "tp is 1, the patch is for 2"


# -- what is not accepted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["self_attn.q_proj", "self_attn.k_proj"])
def test_heads_that_do_not_belong_together_are_refused(end: str) -> None:
    with pytest.raises(CaptureFileError, match=r"heads|key and value"):
        diff(changed("a100.tp2", moved, end), captures("qwen3_tail")[1])


@pytest.mark.parametrize(("name", "end"), [("a100.tp2", "mlp.gate_proj"), ("h100.tp2", "self_attn.o_proj"), ("h100.tp2", "mlp.down_proj")])
def test_a_part_that_the_rank_does_not_hold_is_no_match(name: str, end: str) -> None:
    """The header says the other half; the trainer's elements there are another rank's."""
    found = diff(changed(name, moved, end), captures("qwen3_tail")[1])
    assert found.stats["check"]["lowest_with_sites"] == 0.0
    assert found.leftovers or found.undetermined


def test_swapped_pieces_of_a_merged_weight_are_no_match() -> None:
    """Gate and up: the same shapes and parts, another order of rows."""
    graph = capture("h100.tp2")
    parameters = []
    for p in graph.parameters:
        if p.name == "model.layers.1.mlp.gate_up_proj.weight":
            a, b = (s.checkpoint for s in p.segments)
            pieces = tuple(s.model_copy(update={"checkpoint": c}) for s, c in zip(p.segments, (b, a), strict=True))
            p = p.model_copy(update={"segments": pieces})
        parameters.append(p)
    found = diff(graph.model_copy(update={"parameters": tuple(parameters)}), captures("qwen3_tail")[1])
    assert found.stats["check"]["lowest_with_sites"] < 0.9


def test_a_part_that_cannot_be_is_refused() -> None:
    def longer(s: Segment) -> Segment:
        return s.model_copy(update={"shards": (s.shards[0].model_copy(update={"length": 96}),)})

    with pytest.raises(CaptureFileError, match="cannot hold the part"):
        diff(changed("h100.tp2", longer, "mlp.down_proj"), captures("qwen3_tail")[1])


def test_a_whole_of_another_size_is_refused() -> None:
    def larger(s: Segment) -> Segment:
        return s.model_copy(update={"shards": (s.shards[0].model_copy(update={"size": 512}),)})

    with pytest.raises((CaptureFileError, AlignmentError), match="512 elements"):
        diff(changed("h100.tp2", larger, "mlp.down_proj"), captures("qwen3_tail")[1])


def test_parts_that_are_never_summed_match_nothing() -> None:
    """Without its all_reduce, a row-parallel GEMM computes something that the trainer does not."""
    graph = capture("a100.tp2")

    def other(n: Node) -> Node:
        lone = n.op == "vllm.all_reduce.default" and n.module == "model.layers.1.mlp.down_proj"
        return n.model_copy(update={"op": "vllm.something.default"}) if lone else n

    graphs = tuple(
        g.model_copy(update={"kernels": tuple(k.model_copy(update={"nodes": tuple(map(other, k.nodes))}) for k in g.kernels)})
        for g in graph.graphs
    )
    found = diff(graph.model_copy(update={"graphs": graphs}), captures("qwen3_tail")[1])
    assert "one rank's part of model.layers.1.mlp.down_proj is read before the ranks' parts are summed" in found.notes
    assert found.stats["anchors"] < report("a100.tp2").stats["anchors"]
    assert found.leftovers


def test_what_other_ranks_hold_is_unknown_and_nothing_else() -> None:
    """Half of the heads and of the hidden features, as recorded: elements are hidden by their place, not by how they compare."""
    pair = prepare(capture("a100.tp2"), captures("qwen3_tail")[1], rules_dir())
    shards = pair.shards
    assert {p for parts in shards.heads.values() for p in parts} == {Part(((0, 2),), 4), Part(((0, 1),), 2)}
    assert set(shards.outputs.values()) == {Part(((0, 64),), 128), Part(((0, 32),), 64), Part(((0, 128),), 256)}
    assert set(shards.inputs.values()) == {Part(((0, 64),), 128), Part(((0, 128),), 256)}
    hidden = Part(((1, 1),), 3).hide(torch.tensor([[1.0, 2.0, 3.0]]), 1)
    assert hidden.isnan().tolist() == [[True, False, True]]
    assert round_to(hidden.double() + 2**-20, "bfloat16")[0, 1] == 2.0
    assert Part(((64, 64),), 128).of(4) == Part(((2, 2),), 4)
    assert Part(((0, 48),), 128).of(4) is None
    merged = Part(((64, 64), (160, 32), (224, 32)), 256)  # the second halves of 128 rows of query and 64 each of key and value
    assert [merged.within(a, n) for a, n in ((0, 128), (128, 64), (192, 64))] == [Part(((n // 2, n // 2),), n) for n in (128, 64, 64)]
    assert merged.take(torch.arange(256), 0).tolist() == merged.places() == [*range(64, 128), *range(160, 192), *range(224, 256)]


# -- what is refused before anything runs -----------------------------------------------------------------------------------------


def test_the_size_is_one_number() -> None:
    assert with_ranks({}, 2) == {"tensor_parallel_size": 2}
    assert with_ranks({"tensor_parallel_size": 2}, 2) == {"tensor_parallel_size": 2}
    with pytest.raises(BadInputError, match="given twice, differently"):
        with_ranks({"tensor_parallel_size": 4}, 2)


@pytest.mark.parametrize(
    ("size", "target", "message"),
    [
        (2, "cpu", "CPU engine cannot be captured tensor-parallel"),
        ("two", "h100", "no tensor-parallel size"),
        (0, "h100", "no tensor-parallel size"),
    ],
)
def test_what_cannot_be_a_rank_is_refused(tmp_path: Path, size: object, target: str, message: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInputError, match=message):
        capture_inference(tmp_path, tmp_path / "out.json", target=target, engine_args={"tensor_parallel_size": size})


@pytest.mark.parametrize("kind", ["pipeline", "data"])
def test_ranks_of_other_kinds_are_refused(kind: str) -> None:
    with pytest.raises(Refused, match=f"{kind}-parallel engine cannot be simulated"):
        script.capture({"engine_args": {f"{kind}_parallel_size": 2}, "target": {}})


# -- kernels ------------------------------------------------------------------------------------------------------------------------


def test_a_call_that_combines_ranks_gets_its_result_in_the_interpreter() -> None:
    given = torch.arange(4.0)
    written = {"norm_out": given}
    calls = Externs([(None, [2, 2], given), (None, None, written), (None, None, written)], "torch.ops")
    assert calls.vllm.all_reduce.default(torch.zeros(2, 2), "tp:0").tolist() == [[0.0, 1.0], [2.0, 3.0]]
    out = torch.zeros(2, 2)
    assert calls.vllm.fused(norm_out=out, other=None) is None
    assert out.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    with pytest.raises(Unsupported, match="other arguments"):
        calls.vllm.fused(out)


# -- the probe ----------------------------------------------------------------------------------------------------------------------


class Rank(torch.nn.Module):
    """Rank 1 of 2: a merged column-parallel weight, a row-parallel one, an interleaved one, one merged in the checkpoint, and a norm."""

    WIDTH = 300

    def __init__(self) -> None:
        super().__init__()
        rows, width = 600, self.WIDTH
        self.merged = torch.nn.Parameter(torch.empty(rows // 2 + 2, width, dtype=torch.bfloat16))
        self.row = torch.nn.Parameter(torch.empty(rows, width // 2, dtype=torch.bfloat16))
        self.interleaved = torch.nn.Parameter(torch.empty(rows // 2, width, dtype=torch.bfloat16))
        self.fused = torch.nn.Parameter(torch.empty(8, width, dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.empty(width, dtype=torch.bfloat16))

    def load_weights(self, weights: Any) -> None:
        with torch.no_grad():
            for name, w in weights:
                half = w.shape[0] // 2
                if name == "q":
                    self.merged[:half].copy_(w[half:])
                elif name == "k":
                    self.merged[300:].copy_(w[half:])
                elif name == "fused":  # 8 rows of query, 4 of key, 4 of value
                    self.fused.copy_(torch.cat([w[4:8], w[10:12], w[14:16]]))
                elif name == "row":
                    self.row.copy_(w[:, self.WIDTH // 2 :])
                else:
                    getattr(self, name).copy_(w[::2] if name == "interleaved" else w)


@pytest.mark.parametrize("thin", [False, True])
def test_a_probe_finds_the_part_of_every_weight(thin: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model keeps one element per row: the part along a row is then known from its two ends."""
    monkeypatch.setattr(model, "LARGE", 1)
    tensors = {"fused": (16, 300), "q": (600, 300), "k": (4, 300), "row": (600, 300), "interleaved": (600, 300), "norm": (300,)}
    with model.Thin() if thin else contextlib.nullcontext() as mode:
        rank, world = Rank(), World()
        world.describe(rank)
        Probe(world, rank, {n: ("bfloat16", s) for n, s in tensors.items()}, mode.at_end if mode else None).run()
    assert (rank.row.stride(1) == 0) is thin
    found = {s["checkpoint"]: s.get("shards") for p in world.parameters.values() for s in p["segments"]}
    assert found["q"] == [{"dim": 0, "start": 300, "length": 300, "size": 600}]
    assert found["k"] == [{"dim": 0, "start": 2, "length": 2, "size": 4}]
    assert found["fused"] == [{"dim": 0, "start": a, "length": n, "size": 16} for a, n in ((4, 4), (10, 2), (14, 2))]
    assert found["row"] == [{"dim": 1, "start": 150, "length": 150, "size": 300}]
    assert found["norm"] is None
    assert world.notes == ["the part of interleaved that is in interleaved is not contiguous along dimension 0"]
