"""The join's arithmetic on sorted keys."""

from __future__ import annotations

import numpy as np
import torch

from graphalign.align.join import Join, Keys, share_inside, share_inside_any


def test_keys_are_sorted_and_distinct() -> None:
    keys = Keys(torch.tensor([3.0, -3.0, 0.0, 1.0, float("inf"), float("nan")], dtype=torch.float64))
    assert keys.zeros
    assert len(keys) == 2
    assert (np.diff(keys.bits) > 0).all()
    assert len(Keys(torch.zeros(3, dtype=torch.float64))) == 0


def test_being_in_one_of_several_is_being_in_their_union() -> None:
    rng = np.random.default_rng(0)
    a = np.unique(rng.integers(0, 10_000, 500))
    many = [np.unique(rng.integers(0, 10_000, 300)) for _ in range(5)]
    assert share_inside_any(a, many) == share_inside(a, np.unique(np.concatenate(many)))
    assert share_inside_any(a, []) == 0.0


def test_partners_cover_their_target() -> None:
    join = Join()
    whole = torch.arange(1.0, 101.0, dtype=torch.float64)
    for id, data in enumerate((whole, whole[:60], whole[60:], -whole.flip(0), whole * 3.7)):
        join.key(id, data)
    assert join.partners(0, (1, 2, 4)) == (1, 2)
    assert join.partners(0, (3, 4)) == (3,)
    assert join.partners(1, (0, 4)) == (0,), "computed on a merged buffer"
    assert join.partners(0, (1, 4)) == ()


def test_a_few_small_elements_may_be_lost_to_cancellation_and_no_large_one() -> None:
    x = torch.linspace(1, 2, 200, dtype=torch.float64)
    x[0] = 1e-5
    other = x.clone()
    other[0] *= 1 + 1e-10
    join = Join()
    join.key(1, x), join.key(2, other)
    assert join.inside(1, 2)
    other[100] *= 1 + 1e-10
    join.key(3, other)
    assert not join.inside(1, 3)
    many = x.clone()
    many[:20] = torch.linspace(1e-5, 2e-5, 20, dtype=torch.float64)
    moved = many.clone()
    moved[:20] *= 1 + 1e-10
    join.key(4, many), join.key(5, moved)
    assert not join.inside(4, 5)
