"""Names, layouts and orders mean nothing."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from graphalign.sites.find import diff
from tests.properties.change import permute_kernels, rename, renumber
from tests.properties.judge import sites
from tests.synthetic import BF, FP, Mixed, inference, random_pair, training

SEEDS = st.integers(0, 2**32 - 1)
RANDOM = st.randoms(use_true_random=False)


@settings(max_examples=6)
@given(SEEDS, RANDOM)
def test_names_and_orders_change_nothing(seed: int, rng: random.Random) -> None:
    program, plan, i, t = random_pair(seed)
    before = sites(diff(i, t))
    changed = permute_kernels(rename(i, rng), rng)
    assert changed != i
    assert sites(diff(changed, renumber(t, rng))) == before
    assert sites(diff(i, training(program, plan, order=rng))) == before


@settings(max_examples=8)
@given(SEEDS, RANDOM)
def test_layouts_and_loops_change_nothing(seed: int, rng: random.Random) -> None:
    program, plan, i, t = random_pair(seed)
    before = diff(i, t)
    for v, value in enumerate(program.values):
        plan.layout[v] = rng.choice(["rows", "columns"])
        stream = value.kind == "add" and program.values[value.args[1]].kind == "gemm"
        plan.loops[v] = rng.choice(["nested", "merged", "swapped", "nested" if stream else "halves"])
        plan.fuse[v] = rng.random() < 0.5
    try:
        other = inference(program, plan)
    except Mixed:
        return
    assert sites(diff(other, t)) == sites(before)


@settings(max_examples=6)
@given(SEEDS)
def test_an_fp32_buffer_is_as_good_as_recomputing(seed: int) -> None:
    program, plan, i, t = random_pair(seed)
    before = sites(diff(i, t))
    for v, value in enumerate(program.values):
        if value.kind in ("gemm", "embed") or plan.buffer[v] == BF:
            continue
        assert plan.buffer[v] == FP
        for e in plan.mode:
            if e[0] == v and plan.mode[e] == "buffer":
                plan.mode[e] = "inline"
    assert sites(diff(inference(program, plan), t)) == before
