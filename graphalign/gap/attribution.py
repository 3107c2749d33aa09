"""What every group of the patch contributes to closing the gap."""

from __future__ import annotations

import numpy as np

from graphalign.gap.measure import Tokens
from graphalign.gap.report import Attribution, Share
from graphalign.gap.shapley import Array, shapley, widening
from graphalign.gap.statistics import differences, draws, estimate_of, sequence_sums
from graphalign.gap.store import LogProbs
from graphalign.gap.variants import subset_name
from graphalign.patch.spec import PatchSpec

_K3 = 3
"""Column of `sequence_sums`."""


def wanted_subsets(groups: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The subsets whose gap the Shapley shares need, smallest first: all of them for a few groups, those of sampled orders beyond."""
    asked = shapley(groups, lambda subset: 0.0).games
    return sorted((tuple(g for g in groups if g in s) for s in asked), key=lambda s: (len(s), s))


def attribute(spec: PatchSpec, found: dict[str, LogProbs], tokens: Tokens, *, resamples: int) -> Attribution:
    """Shapley shares of the groups in the paired reduction of k3, with intervals over sequences.

    Args:
        spec: the whole patch.
        found: the log-probabilities of every subset of `wanted_subsets`.
        tokens: the engine's side.
        resamples: bootstrap resamples; all subsets are evaluated on the same resampled sequences.
    """
    groups = tuple(g.name for g in spec.groups)
    sides = {side: _shares(spec, groups, found, tokens, side, resamples) for side in ("sampled", "prefill")}
    games = shapley(groups, lambda subset: 0.0)
    return Attribution(exact=games.exact, subsets=len(games.games), sampled=sides["sampled"], prefill=sides["prefill"])


def _shares(
    spec: PatchSpec, groups: tuple[str, ...], found: dict[str, LogProbs], tokens: Tokens, side: str, resamples: int
) -> tuple[Share, ...]:
    known: dict[str, Array] = {}

    def k3(subset: frozenset[str]) -> Array:
        """Mean k3, first on the data, then on every resample: `[1 + resamples]`."""
        name = subset_name(spec, subset)
        if name not in known:
            sums = sequence_sums(differences(tokens.engine[side], found[name]))
            known[name] = draws(sums, _K3, resamples=resamples, strata=tokens.seeds)
        return known[name]

    stock = k3(frozenset())
    shares = shapley(groups, lambda subset: stock - k3(subset))
    n = len(tokens.responses)
    estimates = shares.estimates(n)
    alone = {g: estimate_of(stock - k3(frozenset({g})), n) if subset_name(spec, {g}) in found else None for g in groups}
    wider = widening(estimates, {g: e for g, e in alone.items() if e is not None})
    whole = float(np.ravel(shares.total)[0])
    return tuple(
        Share(
            group=g, reduction=estimates[g], part=estimates[g].value / whole if whole else 0.0,
            standard_error=float(np.ravel(shares.errors[g])[0]) if shares.errors is not None else 0.0,
            alone=alone[g], widens=g in wider,
        )
        for g in groups
    )  # fmt: skip
