"""Tables of `gap` at the width of a terminal."""

from __future__ import annotations

import pytest
from rich.console import Console

from graphalign.gap.report import Attribution, Share
from graphalign.gap.statistics import Estimate
from graphalign.render.gap_table import Unit, render_shares

GROUPS = ("residual_layernorm", "residual_rmsnorm", "norm_weight", "rope")


@pytest.mark.parametrize("width", [80, 120])
def test_shapley_shares_keep_their_names_and_figures(width: int) -> None:
    """The names' column was squeezed to nothing."""
    few = Estimate(value=3.37e-4, low=-1.11e-4, high=12.55e-4)
    shares = tuple(Share(group=g, reduction=few, part=0.51, alone=few, widens=g == "rope") for g in GROUPS)
    console = Console(width=width)
    with console.capture() as captured:
        render_shares(Attribution(exact=True, subsets=16, sampled=shares, prefill=shares), Unit(-4, 2), console)
    found = captured.get()
    lines = found.splitlines()
    assert "…" not in found
    assert max(map(len, lines)) <= width
    for group in GROUPS:
        rows = [line for line in lines if line.split()[:1] == [group]]
        assert len(rows) == 2
        assert all(row.count("3.37 [-1.11, 12.55]") == 2 and "51%" in row for row in rows)
    assert "rope: widens the gap as sampled and in prefill" in found
    for word in ("as sampled", "in prefill", "reduction", "alone"):
        assert word in found
