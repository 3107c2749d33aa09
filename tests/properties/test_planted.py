"""The map of a synthetic pair is known, so a diff must find it: nothing missed, nothing invented."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.properties.judge import HIDDEN, judge
from tests.synthetic import inference, random_pair, training, truth

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.tuples(st.integers(1, 2), st.integers(1, 6))


@settings(max_examples=25)
@given(SEEDS, SIZES)
@example(100840, (1, 1))  # nothing but GEMMs
def test_planted_moves_are_found_exactly(seed: int, size: tuple[int, int]) -> None:
    layers, steps = size
    assert judge(*random_pair(seed, layers=layers, steps=steps)).faults() == []


@pytest.mark.parametrize(("seed", "layers", "steps"), [(106407, 3, 8), (107543, 2, 4)])
def test_elements_lost_to_cancellation_are_no_reason_to_lose_a_value(seed: int, layers: int, steps: int) -> None:
    """mean − x, or a mean alone, is so near zero that the two sides' orders of summation leave fewer equal bits than the join asks for."""
    assert judge(*random_pair(seed, layers=layers, steps=steps)).faults() == []


@settings(max_examples=8)
@given(SEEDS)
def test_no_sites_where_both_sides_round_alike(seed: int) -> None:
    program, plan, i, t = random_pair(seed, faithful=True)
    judged = judge(program, plan, i, t)
    assert judged.planted == judged.moves == set()
    assert judged.faults() == []
    assert judged.report.groups == ()
    assert judged.report.stats["check"]["equal_stock"] == 1.0


@settings(max_examples=8)
@given(SEEDS, st.randoms(use_true_random=False))
def test_one_planted_move_is_that_site(seed: int, rng: random.Random) -> None:
    program, plan, i, _ = random_pair(seed, faithful=True)
    edges = [
        e
        for e in program.edges()
        if program.values[e[0]].kind not in ("gemm", "embed", "rotate") and program.values[e[1]].kind not in ("gemm", "rotate")
    ]
    if not edges:
        return
    edge = rng.choice(edges)
    plan.rounds[edge] = not plan.rounds[edge]
    planted = truth(program, plan)
    assert len(planted) == 1
    judged = judge(program, plan, inference(program, plan), training(program, plan))
    assert inference(program, plan) == i
    assert judged.moves == planted
    assert judged.report.sites <= 1
    assert all(HIDDEN in e.reason for e in judged.report.undetermined)
