"""Patched models captured again: the diff is empty, and what no patch can remove is still there, and nothing else."""

from __future__ import annotations

import functools

import pytest

from graphalign.align.pair import prepare
from graphalign.capture.training import record_forward
from graphalign.ir.args import references
from graphalign.ir.files import read_json
from graphalign.ir.training import TrainingGraph, Value
from graphalign.patch.make import make_spec
from graphalign.proof.composites import composite_ends
from graphalign.proof.formats import changed_formats
from graphalign.proof.verdict import Proof
from graphalign.rewrite.apply import apply
from graphalign.rules import rules_dir
from graphalign.sites.find import diff
from graphalign.sites.report import Report
from tests.breadth.captured import CAPTURES, captures, counts, report
from tests.breadth.models import build

PATCHED = {
    "mixtral": 0,
    "qwen2_moe": 8,
    "qwen3_moe": 5,
    "glm4_moe": 3,
    "qwen3_next": 4,
    "lfm2": 0,
    "nemotron_h": 0,
    "helium": 0,
}
"""Model to its number of unpatchable entries.

`patched/` has the models of `test_architectures.py` recorded with all their edits applied.
"""
REPLACEABLE = {"mixtral": 5, "qwen2_moe": 4, "qwen3_moe": 5, "lfm2": 2}
"""Composite anchors whose end the replay finds in the live model."""


def recorded(name: str) -> TrainingGraph:
    return read_json(CAPTURES.parent / "patched" / f"{name}.train.json.gz", TrainingGraph, kind="training capture")


@functools.cache
def patched(name: str) -> Report:
    return diff(captures(name)[0], recorded(name))


def proof(name: str, found: Report, groups: tuple[str, ...] = ()) -> Proof:
    """What the recorded graphs say of a patch of some groups, or of all; nothing is replayed here."""
    return Proof(report(name), found, make_spec(report(name), only=groups))


def problems(shown: Proof) -> list[str]:
    """All of them but that nothing was replayed."""
    *others, last = shown.problems
    assert last.startswith("nothing was replayed on the engine's values")
    return others


@pytest.mark.parametrize("name", PATCHED)
def test_nothing_is_left(name: str) -> None:
    found = patched(name)
    assert counts(found) == {}
    assert sum(e.count for e in found.unpatchable) == PATCHED[name]
    assert found.leftovers == ()
    assert found.semantic == ()
    assert problems(proof(name, found)) == []


def test_a_stock_model_is_not_proven() -> None:
    assert problems(proof("qwen3_moe", report("qwen3_moe"))) == [
        f"{g}: {n} sites remain after the patch"
        for g, n in (("norm_weight", 21), ("residual_rmsnorm", 20), ("residual_stream", 9), ("rope", 40))
    ]


def test_what_was_left_out_by_choice_may_remain_and_no_more() -> None:
    stock = report("mixtral")
    rope = stock.model_copy(update={"groups": tuple(g for g in stock.groups if g.name != "rope")})
    assert problems(proof("mixtral", rope, ("rope",))) == []
    assert problems(proof("mixtral", stock, ("rope",))) == ["rope: 20 sites remain after the patch"]


def test_a_site_of_an_unknown_group_is_a_problem() -> None:
    """LFM 2 had one, of a group that no patch has, and was called proven."""
    stock = report("lfm2")
    new = stock.groups[0].model_copy(update={"name": "anchor_into_residual_sum"})
    found = patched("lfm2").model_copy(update={"groups": (new,)})
    assert proof("lfm2", found).problems[0].startswith("anchor_into_residual_sum: ")


def test_entries_that_come_or_go_are_problems() -> None:
    found = patched("qwen3_moe")
    gone = problems(proof("qwen3_moe", found.model_copy(update={"unpatchable": ()})))
    assert gone == ["5 unpatchable entries of the stock model are not found in the patched one: aten.div.Tensor → composite[1]"]
    other = found.unpatchable[0].model_copy(update={"what": "aten.mul.Tensor → gemm[0]", "count": 1})
    new = problems(proof("qwen3_moe", found.model_copy(update={"unpatchable": (*found.unpatchable, other)})))
    assert new == ["the patched model has 1 unpatchable entries that the stock model does not have: aten.mul.Tensor → gemm[0]"]


@pytest.mark.parametrize("name", REPLACEABLE)
def test_composite_anchors_end_at_the_same_ops(name: str) -> None:
    """The replay finds them in the patched model by what it found in the stock one."""
    inference, training = captures(name)
    rules = rules_dir(None)
    ends = composite_ends(training, prepare(inference, training, rules))
    assert len(ends) == REPLACEABLE[name]
    again = recorded(name)
    assert set(ends) == set(composite_ends(again, prepare(inference, again, rules)))


def test_edits_around_the_layers_are_left_out_with_the_reason() -> None:
    """The embedding's multiplier is applied in the backbone's own forward."""
    spec = make_spec(report("granite_hybrid"))
    assert {s.site for s in spec.skipped} == {f"embedding_scale.{n}" for n in (1, 2, 3)}
    assert "is computed in the forward of model, around the layers, which is not rewritten" in spec.skipped[0].reason
    assert "embedding_scale" not in {g.name for g in spec.groups}


def test_tables_of_a_rotary_module_are_edges_between_modules() -> None:
    """Its products are named as ops of that module, so that a patch can find them there."""
    edits = [e for g in make_spec(report("helium")).groups for e in g.edits if e.producer.module == "model.rotary_emb"]
    assert {(e.producer.op, e.producer.ordinal, e.producer.function) for e in edits} == {
        ("mul", n, "HeliumRotaryEmbedding.forward") for n in (1, 2)
    }
    assert len(edits) == 4
    assert {e.producer_layers for e in edits} == {""}


@pytest.mark.parametrize("name", PATCHED)
def test_no_gemm_reads_another_format(name: str) -> None:
    assert changed_formats(captures(name)[1], recorded(name)) == []


def test_a_gemm_that_reads_another_format_is_a_problem() -> None:
    """Gemma's projections once ran in FP32, and the patch was called proven."""
    stock = captures("mixtral")[1]
    read = {v for n in stock.nodes if n.op == "aten.mm.default" for v in references(n.args, "v")}

    def widened(output: Value | None) -> Value | None:
        return output.model_copy(update={"dtype": "float32"}) if output is not None and output.id in read else output

    wide = [n.model_copy(update={"outputs": tuple(map(widened, n.outputs))}) for n in stock.nodes]
    found = changed_formats(stock, stock.model_copy(update={"nodes": tuple(wide)}))
    assert any("mm in model.layers.0.self_attn.q_proj reads (float32, " in line for line in found)
    problems = Proof(report("mixtral"), patched("mixtral"), make_spec(report("mixtral")), formats=tuple(found)).problems
    assert any(p.startswith("the patch changes what GEMMs or attention read: ") for p in problems)


def test_rounded_tables_are_patched_at_their_readers() -> None:
    """ERNIE 4.5: the rotary module is outside the layers and stays as it is; its FP32 tables are rounded where a layer reads them."""
    stock = report("ernie45_dense")
    model = build("ernie45_dense")
    with apply(model, make_spec(stock, only=["rope"]), allow_stale=True):
        found = diff(captures("ernie45_dense")[0], record_forward(model))
    assert counts(found) == {k: n for k, n in counts(stock).items() if k != "rope"}
    assert counts(stock)["rope"] == 16
