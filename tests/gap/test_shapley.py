"""Shapley shares: the axioms, brute force over orders, and sampling within its own errors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphalign.gap.shapley import shapley, widening
from graphalign.gap.statistics import Estimate

Game = dict[frozenset[str], float]
NAMES = "abcdefghij"


def subsets(players: str) -> list[frozenset[str]]:
    return [frozenset(s) for s in chain.from_iterable(combinations(players, n) for n in range(len(players) + 1))]


@st.composite
def games(draw: st.DrawFn, least: int = 1, most: int = 5) -> tuple[str, Game]:
    players = NAMES[: draw(st.integers(least, most))]
    numbers = st.floats(-10, 10, allow_nan=False)
    return players, {s: draw(numbers) for s in subsets(players)}


def brute_force(players: str, game: Game) -> dict[str, float]:
    out = dict.fromkeys(players, 0.0)
    orders = list(permutations(players))
    for order in orders:
        for i, p in enumerate(order):
            out[p] += (game[frozenset(order[: i + 1])] - game[frozenset(order[:i])]) / len(orders)
    return out


def solve(players: str, value: Callable[[frozenset[str]], float]) -> dict[str, float]:
    found = shapley(players, value)
    return {p: found.share(p) for p in players}


@given(games())
def test_it_is_the_mean_over_all_orders(g: tuple[str, Game]) -> None:
    players, game = g
    assert solve(players, game.__getitem__) == pytest.approx(brute_force(players, game), abs=1e-9)


@given(games(most=6))
def test_efficiency(g: tuple[str, Game]) -> None:
    players, game = g
    found = shapley(players, game.__getitem__)
    assert found.exact
    assert sum(found.values.values()) == pytest.approx(game[frozenset(players)] - game[frozenset()], abs=1e-9)
    assert float(found.total) == pytest.approx(game[frozenset(players)] - game[frozenset()], abs=1e-12)


@given(games(least=2))
def test_symmetry(g: tuple[str, Game]) -> None:
    players, game = g
    a, b = players[:2]
    swap = {a: b, b: a}

    def value(s: frozenset[str]) -> float:
        return game[s] + game[frozenset(swap.get(p, p) for p in s)]

    found = solve(players, value)
    assert found[a] == pytest.approx(found[b], abs=1e-9)


@given(games(least=2))
def test_null_player(g: tuple[str, Game]) -> None:
    players, game = g
    assert solve(players, lambda s: game[s - {players[0]}])[players[0]] == pytest.approx(0, abs=1e-12)


@given(games(least=3, most=3), games(least=3, most=3), st.floats(-3, 3))
def test_linearity(g: tuple[str, Game], h: tuple[str, Game], factor: float) -> None:
    players = g[0]
    a, b = solve(players, g[1].__getitem__), solve(players, h[1].__getitem__)
    both = solve(players, lambda s: g[1][s] + factor * h[1][s])
    assert both == pytest.approx({p: a[p] + factor * b[p] for p in players}, abs=1e-9)


def test_the_glove_game() -> None:
    # One left glove and two right ones; a pair is worth 1. Shapley 1953: 2/3, 1/6, 1/6.
    found = solve("lrs", lambda s: float("l" in s and bool(s & {"r", "s"})))
    assert found == pytest.approx({"l": 2 / 3, "r": 1 / 6, "s": 1 / 6})


def test_every_subset_is_evaluated_once_and_kept() -> None:
    calls: list[frozenset[str]] = []

    def value(s: frozenset[str]) -> float:
        calls.append(s)
        return len(s)

    found = shapley("abcdef", value)
    assert len(calls) == len(set(calls)) == 64
    assert set(found.games) == set(calls)


def random_game(players: str, seed: int) -> Game:
    """Additive parts, and pairs that work together."""
    rng = np.random.default_rng(seed)
    alone = dict(zip(players, rng.normal(size=len(players)), strict=True))
    pairs = {frozenset(c): 0.5 * rng.normal() for c in combinations(players, 3)}
    return {s: sum(alone[p] for p in s) + sum(x for c, x in pairs.items() if c <= s) for s in subsets(players)}


def test_sampled_orders_are_within_their_standard_errors() -> None:
    within, size = 0, 0
    for seed in range(30):
        players = NAMES[:8]
        game = random_game(players, seed)
        exact = shapley(players, game.__getitem__, exact_up_to=8)
        found = shapley(players, game.__getitem__, orders=32, seed=seed)
        assert found.errors is not None
        assert not found.exact
        assert sum(found.share(p) for p in players) == pytest.approx(float(exact.total))
        for p in players:
            within += abs(found.share(p) - exact.share(p)) <= 2.13 * float(found.errors[p])  # t, 15 degrees of freedom
            size += 1
    assert 0.90 < within / size <= 0.99


def test_a_reversed_order_cancels_what_pairs_of_players_do_together() -> None:
    # A pair's value goes to its later member: in an order and its reverse to each once, so sampling is exact.
    rng = np.random.default_rng(0)
    pairs = {frozenset(c): rng.normal() for c in combinations(NAMES[:7], 2)}
    found = shapley(NAMES[:7], lambda s: sum(x for c, x in pairs.items() if c <= s), orders=4)
    assert found.errors is not None
    for p in NAMES[:7]:
        assert found.share(p) == pytest.approx(sum(x for c, x in pairs.items() if p in c) / 2)
        assert float(found.errors[p]) == pytest.approx(0, abs=1e-12)


def test_values_may_be_bootstrap_draws() -> None:
    rng = np.random.default_rng(1)
    table = {s: np.concatenate([[float(len(s))], len(s) + 0.1 * rng.normal(size=500)]) for s in subsets("abc")}
    found = shapley("abc", table.__getitem__)
    for p, e in found.estimates(sequences=20).items():
        assert e.value == pytest.approx(1)
        assert e.excludes_zero
        assert np.allclose(found.values[p], shapley("abc", lambda s: table[s]).values[p])
    assert found.estimates(sequences=1)["a"].low is None


def test_drawn_orders_widen_the_interval() -> None:
    players = NAMES[:8]
    game = random_game(players, 3)
    rng = np.random.default_rng(2)
    noise = {s: np.concatenate([[0.0], 0.01 * rng.normal(size=200)]) for s in game}
    found = shapley(players, lambda s: game[s] + noise[s], orders=16)
    assert found.errors is not None
    for p, e in found.estimates(sequences=20).items():
        assert e.high - e.low >= 2 * 1.96 * float(found.errors[p][0])  # type: ignore[operator]
        assert e.low <= e.value <= e.high  # type: ignore[operator]


def test_groups_that_widen_the_gap_are_named() -> None:
    bad, unsure, good = (
        Estimate(value=-2, low=-3, high=-1),
        Estimate(value=-1, low=-2, high=0.5),
        Estimate(value=2, low=1, high=3),
    )
    found = widening({"rope": good, "swiglu": bad, "norm": unsure}, {"rope": good, "norm": bad, "other": unsure})
    assert found == {
        "swiglu": "widens the gap: Shapley share -2 [-3, -1]",
        "norm": "widens the gap: alone -2 [-3, -1]",
    }
    assert widening({"a": Estimate(value=-1, reason="one sequence")}) == {}


@pytest.mark.parametrize(("players", "orders"), [("", 16), ("aa", 16), ("ab", 2)])
def test_what_is_no_game_is_refused(players: str, orders: int) -> None:
    with pytest.raises(ValueError, match=r"players must|standard error"):
        shapley(players, len, orders=orders)
