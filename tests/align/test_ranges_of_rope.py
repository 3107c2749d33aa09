"""Rotary embeddings that depend on a range: LongRoPE's two tables, dynamic NTK, positions in several rows."""

from __future__ import annotations

import pytest
import torch

from graphalign.align.pair import prepare
from graphalign.align.positions import reach_of
from graphalign.errors import BadInputError
from graphalign.proof.replay import Replay, far_position
from graphalign.proof.values import EngineValues
from graphalign.rules import rules_dir
from graphalign.sites.find import diff
from graphalign.sites.report import Report
from tests.align import rope
from tests.breadth.captured import counts, entries

SITES = {"norm_weight": 5, "residual_rmsnorm": 8, "residual_stream": 3, "rope": 8, "swiglu": 2}


def compared(engine: str, model: str, reach: int | None) -> Report:
    return diff(rope.engine(engine), rope.trainer(model, reach))


@pytest.mark.parametrize(("engine", "reach"), [("longrope", 512), ("longrope", 1024), ("longrope_short", rope.SWITCH)])
def test_longrope(engine: str, reach: int) -> None:
    """It was a divergence: the rows that are read were not recorded, and the trainer was asked at other positions than the engine."""
    found = compared(engine, "longrope", reach)
    assert counts(found) == SITES
    assert (entries(found), found.uncompared) == ({}, ())
    assert found.stats["check"]["equal_with_sites"] == 1.0


def test_longrope_on_a_simulated_gpu() -> None:
    """Its loops read the table in a masked block."""
    found = compared("longrope_h100", "longrope", 512)
    assert counts(found) == {**SITES, "residual_stream": 2}
    assert (entries(found), found.uncompared) == ({}, ())


def test_shorter_batches_are_said_not_to_be_compared() -> None:
    (said,) = [n for n in compared("longrope", "longrope", 512).notes if "shorter batches" in n]
    assert "modeling_rope_utils.py" in said
    assert f"from {rope.SWITCH} on, up to 511" in said
    assert not any("shorter batches" in n for n in compared("longrope_short", "longrope", rope.SWITCH).notes)


def test_shorter_batches_are_another_function_than_an_engine_with_long_factors() -> None:
    """Transformers picks the factors by the batch's longest position, vLLM by `max_model_len`: true, and a divergence if asked for."""
    found = compared("longrope", "longrope", rope.SWITCH - 3)
    assert {e.what for e in found.semantic} == {"aten.mul.Tensor"}
    assert "the table it reads differs" in found.semantic[0].reason
    assert "rope" not in counts(found)
    assert any(f"compared up to {rope.SWITCH - 4}, the engine takes them up to 511" in n for n in found.notes)


def test_a_trainer_that_took_another_branch_than_at_the_engines_positions_is_refused() -> None:
    with pytest.raises(BadInputError) as e:
        compared("longrope_short", "longrope", None)
    assert e.value.what == "the trainer was recorded at positions up to 1023; at the engine's, up to 127, it computes something else"
    assert "modeling_rope_utils.py" in str(e.value.where)
    assert e.value.hint == "record it with `capture training --max-model-len 128`"


def test_a_decision_without_effect_is_not_mentioned() -> None:
    """Dynamic NTK asks whether a batch is short enough to reset what it never changed."""
    assert rope.trainer("dynamic", 512).header.shorter == "same"
    assert rope.trainer("dynamic", 2048).header.shorter == "other"
    assert rope.trainer("mrope", 512).header.shorter == ""


def test_positions_end_with_the_engines_table() -> None:
    """The engine accepts four times as many positions as dynamic NTK's table has rows, and reads outside it."""
    engine = rope.engine("dynamic")
    assert (engine.reach, reach_of(engine, rules_dir(None))) == (2048, 512)
    assert reach_of(rope.engine("longrope"), rules_dir(None)) == 512
    found = compared("dynamic", "dynamic", 512)
    assert entries(found) == {}
    assert any("compared up to 511, the engine takes them up to 2047" in n for n in found.notes)


def test_a_replay_runs_the_trainer_as_it_was_compared() -> None:
    """The prompt of `check` is shorter than LongRoPE's switch: rotary regions were 17 % equal. Its last token stands far, uncompared."""
    tokens, far = 57, 511
    pair = prepare(rope.engine("longrope"), rope.trainer("longrope", far + 1), rules_dir(None))
    assert far_position(pair, tokens) == far
    short = prepare(rope.engine("longrope_short"), rope.trainer("longrope", rope.SWITCH), rules_dir(None))
    assert far_position(short, tokens) is None
    mode = Replay(rope.model("longrope"), pair, EngineValues(tuple(range(tokens)), {}, {}, None))
    op = next(op for op in pair.flow_t.ops if op.target == "attention")
    x = torch.ones(1, tokens, 4, 32, dtype=torch.bfloat16)
    y = x.clone()
    y[:, -1] = 2
    mode._compare(op, 0, x, y)
    assert (mode.scores[-1].equal, mode.scores[-1].elements) == (1.0, x[:, 1:].numel())
    y[:, 0] = 2
    mode._compare(op, 0, x, y)
    assert mode.scores[-1].equal == 1 - 1 / (tokens - 1)


def test_positions_in_three_rows() -> None:
    """Multimodal rotary embedding: the second and third row were read outside the first, at its last position."""
    found = compared("mrope", "mrope", 512)
    assert counts(found) == SITES
    assert (entries(found), found.uncompared) == ({}, ())
