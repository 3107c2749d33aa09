"""The check finds orders of heads and scaled experts itself: what the proposal got wrong does not reach it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graphalign.align import align as proposal
from graphalign.align.check import Checker
from graphalign.align.heads import head_order
from graphalign.align.pair import Pair, prepare
from graphalign.evaluate.run_training import Edits
from graphalign.rules import rules_dir
from graphalign.sites.find import diff_pair
from tests.breadth.captured import captures, counts, report


def pair(name: str) -> Pair:
    return prepare(*captures(name), rules_dir(None))


def test_the_check_needs_no_alignment() -> None:
    """It finds the same constant as the proposal, which has not run."""
    checker = Checker(pair("glm4_moe"))
    checker.settle(checker.run(Edits()))
    assert set(checker.arithmetic.factors.values()) == {2.5}
    assert len(checker.arithmetic.factors) == sum("experts" in name for name in checker.arithmetic.factors)


@pytest.mark.parametrize("wrong", [2.0, 2.5 * (1 + 2**-20)])
def test_a_wrong_constant_of_the_proposal_does_not_reach_the_check(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiplied into the operand that it is compared with, it was compared with itself."""
    monkeypatch.setattr(proposal, "_scaled", _planted(proposal._scaled, wrong))
    found = diff_pair(pair("glm4_moe"), rules_dir(None))
    right = report("glm4_moe")
    assert counts(found) == counts(right)
    assert found.stats["check"] == right.stats["check"]


def _planted(scaled, wrong: float):  # type: ignore[no-untyped-def]
    """The proposal's stage, that leaves a wrong constant behind."""

    def run(pair: Pair, *args: object) -> proposal.Alignment:
        out = scaled(pair, *args)
        pair.factors.update(dict.fromkeys(pair.factors, wrong))
        return out

    return run


def test_heads_in_another_order_are_found_from_the_checks_own_values() -> None:
    checker = Checker(pair("llama4"))
    assert checker.orders == {}
    checker.settle(checker.run(Edits()))
    assert len(checker.orders) == 5
    order = next(iter(checker.orders.values()))
    assert order[:4] == (0, 2, 4, 6)
    assert "orders" not in {f.name for f in dataclasses.fields(Pair)}


def sides(order: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A query of the trainer, and of the engine with its heads' elements in an order, and BF16 noise."""
    mine = torch.randn(1, 3, 5, 8, dtype=torch.float64)
    theirs = mine[..., order].transpose(1, 2).reshape(5, 24)
    return mine, theirs * (1 + 2.0**-9 * torch.rand_like(theirs))


ORDER = [3, 1, 0, 2, 7, 6, 5, 4]


def test_an_order_must_be_that_of_both() -> None:
    torch.manual_seed(0)
    (q, eq), (k, ek), (other, eo) = sides(ORDER), sides(ORDER), sides(ORDER[::-1])
    assert head_order(q, k, eq, ek) == tuple(ORDER)
    assert head_order(q, other, eq, eo) is None
    assert head_order(q, k, -eq, -ek) is None
    assert head_order(*(x for s in (sides(list(range(8))), sides(list(range(8)))) for x in s[:1]), sides(ORDER)[1], ek) is None
    assert head_order(q, k, eq, torch.randn_like(ek)) is None
