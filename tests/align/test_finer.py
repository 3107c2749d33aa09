"""Fused training ops taken apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphalign.align.finer import compare_pair, taken_apart
from graphalign.align.pair import prepare
from graphalign.align.twins import tell_apart
from graphalign.evaluate.aten import resolve
from graphalign.evaluate.parts import take_apart
from graphalign.ir.dataflow import Dataflow, Op, Ref
from graphalign.rules import rules_dir
from graphalign.sites.ends import Ends
from tests.breadth.captured import captures

X, W, B = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n, shape in enumerate([(3, 5, 8), 8, 8]))
CALLS: list[tuple[str, list[Any]]] = [
    ("aten.native_layer_norm.default", [X, [8], W, B, 1e-5]),
    ("aten.native_layer_norm.default", [X, [8], None, None, 1e-5]),
    ("aten.native_layer_norm.default", [X, [8], W, None, 0.1]),
    ("aten.native_layer_norm.default", [X, [5, 8], None, None, 1e-5]),
    ("aten._fused_rms_norm.default", [X, [8], W, 1e-6]),
    ("aten._softmax.default", [X, -1, False]),
    ("aten._softmax.default", [X, 1, False]),
]


@pytest.mark.parametrize(("op", "args"), CALLS)
def test_the_steps_compute_what_the_op_computes(op: str, args: list[Any]) -> None:
    fused = take_apart(op, args, lambda a: isinstance(a, torch.Tensor))
    assert fused is not None
    made = dict(zip(fused.operands, (a for a in args if isinstance(a, torch.Tensor)), strict=True))
    for step in fused.steps:
        made[step.name] = resolve(step.op)(*(made[a] if isinstance(a, str) else a for a in step.args))
    whole = getattr(torch.ops.aten, op.split(".")[1])(*args)
    torch.testing.assert_close(made[fused.steps[-1].name], whole[0] if isinstance(whole, tuple) else whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten.native_layer_norm.default", [X, [8], W, B, {"f": "nan"}]),
        ("aten.mul.Tensor", [X, W]),
        ("aten._safe_softmax.default", [X, -1]),
    ],
)
def test_other_calls_stay_whole(op: str, args: list[Any]) -> None:
    assert take_apart(op, args, lambda a: isinstance(a, torch.Tensor)) is None


def test_only_the_norms_that_read_what_a_mixed_one_reads_are_taken_apart() -> None:
    """GPT-NeoX: two norms of layer 2 read one sum. Their steps hold the same values, and each has the engine's own copies."""
    found = compare_pair(prepare(*captures("gpt_neox"), rules_dir(None)))
    al = found.alignment
    steps = [op for op in al.training.ops if "step" in op.detail]
    assert {op.module for op in steps} == {f"gpt_neox.layers.2.{n}" for n in ("input_layernorm", "post_attention_layernorm")}
    assert [len(al.partners[op.id]) for op in steps] == [1] * len(steps)
    assert len({al.partners[op.id] for op in steps}) == len(steps)


def test_the_steps_have_the_ordinal_of_their_op() -> None:
    pair = prepare(*captures("gpt_neox"), rules_dir(None))
    norms = [op for op in pair.flow_t.ops if op.target == "aten.native_layer_norm.default"]
    before = Ends(pair.capture_t, pair.flow_t)
    finer = taken_apart(pair, [norms[3].id])
    assert finer is not None
    after = Ends(finer.capture_t, finer.flow_t)
    own = [op for op in finer.flow_t.ops if "step" in op.detail]
    assert {after.end(op.id, 0).ordinal for op in own} == {before.end(norms[3].id, 0).ordinal}
    assert after.end(own[0].id, 0).op == "aten.native_layer_norm.default:mean"
    assert after.end(own[-1].id) == before.end(norms[3].id)
    rest = [op for op in finer.flow_t.ops if op.target == "aten.native_layer_norm.default"]
    assert [after.end(op.id, 0) for op in rest] == [before.end(op.id, 0) for op in norms if op is not norms[3]]


def flow(side: str, *ops: tuple[str, tuple[int, ...]]) -> Dataflow:
    made = [Op(n, f"{side}{n}", kind.split()[0], kind, tuple((Ref(p),) for p in reads)) for n, (kind, reads) in enumerate(ops)]
    return Dataflow(side, tuple(made))


def test_what_a_copy_is_used_for_tells_twins_apart() -> None:
    """Two differences from a mean, one squared, one scaled; and the engine's, whose square is a step of its own."""
    training = flow("t", ("anchor", ()), ("op", (0,)), ("op square", (1,)), ("op", (0,)), ("op scale", (3,)))
    engine = flow("i", ("anchor", ()), ("op", (0,)), ("op", (1,)), ("op square", (2,)), ("op", (0,)), ("op scale", (4,)))
    partners = {0: [0], 1: [1, 4], 2: [3], 3: [1, 4], 4: [5]}
    tell_apart(training, engine, partners)
    assert partners == {0: [0], 1: [1], 2: [3], 3: [4], 4: [5]}


def test_a_twin_of_which_the_engine_has_no_copy_has_no_partner() -> None:
    """Statistics by Welford's method: the only difference from the mean is the one that is scaled."""
    training = flow("t", ("anchor", ()), ("op", (0,)), ("op square", (1,)), ("op", (0,)), ("op scale", (3,)))
    engine = flow("i", ("anchor", ()), ("op welford", (0,)), ("op", (0,)), ("op", (0,)), ("op scale", (2, 1)), ("op scale", (3, 1)))
    partners = {0: [0], 1: [2, 3], 2: [], 3: [2, 3], 4: [4, 5]}
    tell_apart(training, engine, partners)
    assert partners == {0: [0], 1: [], 2: [], 3: [2, 3], 4: [4, 5]}
