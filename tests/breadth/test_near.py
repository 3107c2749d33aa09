"""What comes nearest to an op that was not found, and what speaks against it."""

from __future__ import annotations

import re

import pytest

from graphalign.sites.why import explain
from tests.breadth.captured import report


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("olmoe", "aten.clamp_.default", "it holds 5[0-9]\\.[0-9]% of the elements, and 99.9% are asked for"),
        ("minicpm3", "aten.div.Tensor", "it holds them times 0.5$"),
        ("bloom", "aten.mul.Tensor", "it holds them times 0.886227$"),
        ("llama4", "aten.rsqrt.default", "it holds them all, but is not computed from what this part of the trainer reads$"),
    ],
    ids=["the engine leaves out a clamp", "a factor", "tanh for erf", "behind what was not compared"],
)
def test_a_leftover_says_what_came_nearest(name: str, target: str, words: str) -> None:
    found = report(name)
    near = [n for n in found.nodes if n.side == "training" and n.target == target and n.near]
    assert near
    assert all(n.status == "leftover" for n in found.nodes if n.near)
    said = explain(found, near[0].name)
    assert any(re.search(f"nearest on the other side: .*{words}", line) for line in said.splitlines())


def test_what_is_found_has_no_near_misses() -> None:
    assert not any(n.near for n in report("arcee").nodes)
