"""How much of a reduction each group of sites brings, when groups act together.

The Shapley value of a player is what it adds to the players before it, averaged over all orders of the players (Shapley, "A Value for
n-Person Games", 1953). The values of all players add up to what all of them reach together, whatever order somebody would patch in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graphalign.gap.statistics import Estimate, estimate_of

Array = NDArray[np.float64]
Value = Callable[[frozenset[str]], float | Array]
EXACT: Final = 6
"""Players up to which every subset is evaluated: 64 of them."""
ORDERS: Final = 16
"""Orders drawn beyond that; at most (players − 1) evaluations each."""


@dataclass(frozen=True)
class Shares:
    """The Shapley values of a game."""

    players: tuple[str, ...]
    values: Mapping[str, Array]
    """Player to its share, in the shape of the game's values (0-d for a game of plain numbers)."""
    errors: Mapping[str, Array] | None
    """Player to the standard error that comes from having drawn orders; None if every subset was evaluated. It says nothing about the
    spread of the game's values themselves: for that the values are bootstrap draws, see `estimates`."""
    empty: Array
    """Value of no players."""
    total: Array
    """Value of all players minus that of none: the sum of the shares."""
    games: Mapping[frozenset[str], Array]
    """Every subset that was evaluated, with its value."""

    @property
    def exact(self) -> bool:
        return self.errors is None

    def share(self, player: str) -> float:
        """A player's share; of a game of bootstrap draws, that on the data."""
        return float(np.ravel(self.values[player])[0])

    def estimates(self, sequences: int) -> dict[str, Estimate]:
        """Player to its share with a bootstrap interval, for a game whose values are `[1 + resamples]` (see `statistics.draws`).

        The interval is that of the sequences; with drawn orders it is widened by their standard error e, as for independent errors: each
        half-width h becomes √(h² + (1.96 e)²).
        """
        out = {}
        for player in self.players:
            found = estimate_of(self.values[player], sequences)
            if self.errors is not None and found.low is not None and found.high is not None:
                extra = 1.96 * float(np.ravel(self.errors[player])[0])
                # A half-width is negative where the share lies outside of its own percentile interval.
                low = min(found.low, found.value - float(np.hypot(max(found.value - found.low, 0), extra)))
                high = max(found.high, found.value + float(np.hypot(max(found.high - found.value, 0), extra)))
                found = found.model_copy(update={"low": low, "high": high})
            out[player] = found
        return out


def shapley(players: Sequence[str], value: Value, *, exact_up_to: int = EXACT, orders: int = ORDERS, seed: int = 0) -> Shares:
    """Shapley values of a game.

    Up to `exact_up_to` players from all subsets: Σ_S |S|! (n − |S| − 1)! / n! · (v(S ∪ i) − v(S)). Beyond, from orders drawn at random
    (Castro, Gómez and Tejada, "Polynomial calculation of the Shapley value based on sampling", 2009), each with its reverse, so that the
    errors of a pair cancel in part (antithetic sampling; Mitchell et al., "Sampling Permutations for Shapley Value Estimation", 2022).
    The standard error is that of the mean over pairs. The shares add up to the total in both cases.

    Args:
        players: names, each once.
        value: of a subset, a number or an array (the same shape for all subsets), e.g. bootstrap draws of the k3 reduction. Called once for
            each subset that is needed.
        exact_up_to: number of players up to which all 2ⁿ subsets are evaluated.
        orders: orders to draw beyond that, reverses included; at least 4.
        seed: of the draw.

    Raises:
        ValueError: no players, a player twice, or fewer than 4 orders.
    """
    names = tuple(players)
    if not names or len(set(names)) != len(names):
        raise ValueError(f"players must be different names, and at least one: {names}")
    if orders < 4:
        raise ValueError("a standard error needs two pairs of orders: orders must be at least 4")
    known: dict[frozenset[str], Array] = {}

    def v(subset: frozenset[str]) -> Array:
        if subset not in known:
            known[subset] = np.asarray(value(subset), np.float64)
        return known[subset]

    everyone = frozenset(names)
    empty, total = v(frozenset()), v(everyone) - v(frozenset())
    if len(names) <= exact_up_to:
        return Shares(names, {i: _exact(i, names, v) for i in names}, None, empty, total, known)
    values, errors = _sampled(names, v, max(orders // 2, 2), np.random.default_rng(seed))
    return Shares(names, values, errors, empty, total, known)


def _exact(player: str, players: tuple[str, ...], v: Callable[[frozenset[str]], Array]) -> Array:
    others, n = [p for p in players if p != player], len(players)
    terms = []
    for size in range(n):
        weight = 1 / (n * comb(n - 1, size))  # |S|! (n − |S| − 1)! / n!
        terms += [weight * (v(frozenset(s) | {player}) - v(frozenset(s))) for s in combinations(others, size)]
    return np.asarray(np.sum(terms, axis=0), np.float64)


def _sampled(
    players: tuple[str, ...], v: Callable[[frozenset[str]], Array], pairs: int, rng: np.random.Generator
) -> tuple[dict[str, Array], dict[str, Array]]:
    per_pair: dict[str, list[Array]] = {p: [] for p in players}
    for _ in range(pairs):
        order = [players[i] for i in rng.permutation(len(players))]
        forward, backward = _marginals(order, v), _marginals(order[::-1], v)
        for p in players:
            per_pair[p].append((forward[p] + backward[p]) / 2)
    stacked = {p: np.stack(x) for p, x in per_pair.items()}
    return (
        {p: np.asarray(x.mean(0), np.float64) for p, x in stacked.items()},
        {p: np.asarray(x.std(0, ddof=1) / np.sqrt(pairs), np.float64) for p, x in stacked.items()},
    )


def _marginals(order: list[str], v: Callable[[frozenset[str]], Array]) -> dict[str, Array]:
    """What each player adds to those before it."""
    out, before = {}, frozenset[str]()
    for player in order:
        after = before | {player}
        out[player] = v(after) - v(before)
        before = after
    return out


def widening(shares: Mapping[str, Estimate], alone: Mapping[str, Estimate] | None = None) -> dict[str, str]:
    """Groups that make the gap larger, each with the reason in words. Only what the interval is sure of: one that reaches 0 is no reason.

    Args:
        shares: group to its Shapley share in the reduction of the gap (positive: the gap shrinks).
        alone: group to the reduction by that group alone.
    """
    out = {}
    for name in dict.fromkeys([*shares, *(alone or {})]):
        reasons = [
            f"{what} {found}"
            for what, found in (("Shapley share", shares.get(name)), ("alone", (alone or {}).get(name)))
            if found is not None and found.excludes_zero and found.high is not None and found.high < 0
        ]
        if reasons:
            out[name] = "widens the gap: " + ", ".join(reasons)
    return out
