"""`clusters.json`: how unevenly values fall between adjacent BF16 numbers, per rounding location."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from graphalign.clusters.locations import key_of
from graphalign.sites.report import End, Frozen, Report, Site

FORMAT_VERSION = 1

PAPER = {
    "projection": (1.5e-5, 8.0e-4),
    "attention": (1.5e-5, 8.0e-4),
    "norm output": (1.5e-5, 8.0e-4),
    "activation": (0.038, 0.472),
    "rope product": (0.038, 0.472),
    "residual sum": (0.038, 0.472),
}
"""Scores in "Where Rounding Happens Matters" (Qwen2 and Qwen3): one range for each three kinds."""


class Location(Frozen):
    """An op whose results the trainer rounds to BF16, in every layer that has it."""

    kind: str
    """One of `locations.KINDS`."""
    producer: End
    layers: tuple[int, ...]
    """Empty if it is outside the layers."""
    score: float
    """sqrt(mean |φ(k)|²) over k = 1 … 16, median over layers: 0 for a uniform distribution, 1 for a constant."""
    corrected: float
    """The score without what sampling adds; see `scores`."""
    interval: tuple[float, float] | None
    """95 % bootstrap interval of `corrected`, over sequences; None with fewer than four."""
    floor: float
    """What sampling adds, tokens taken as independent."""
    floor_independent: float
    """sqrt(1/n), all values taken as independent; n of the layer with the fewest."""
    by_layer: tuple[float, ...]
    """`corrected` per layer; one if it is outside the layers."""
    values: int
    """Values per layer, the fewest."""
    exact: float
    """Share of values that are BF16 numbers: they are not rounded at all."""
    zeros: float
    ties: float
    """Share exactly in the middle of two BF16 numbers."""
    outside: int
    """Values without a position (not finite, or too large)."""
    agreement: float
    """Share of values that round to what the op returned, lowest layer."""
    histogram: tuple[int, ...]
    """Counts of positions in 64 bins, all layers; the first is centred on 0."""
    sites: tuple[str, ...] = ()
    """Ids of the sites whose value this is, if a sites file was given."""

    @property
    def clustered(self) -> bool | None:
        """Whether the positions are uneven beyond what sampling explains; None if that is not known (too few sequences)."""
        return None if self.interval is None else self.interval[0] > 0


class Clusters(Frozen):
    """The result of `graphalign clusters`."""

    format: Literal["graphalign.clusters"] = "graphalign.clusters"
    version: Literal[1] = 1
    model: dict[str, Any]
    regime: dict[str, Any]
    versions: dict[str, str]
    weights: Literal["real", "dummy"]
    prompts: str
    """Where the text comes from, in words."""
    sequences: tuple[int, ...]
    """Tokens of each sequence that was run."""
    locations: tuple[Location, ...]
    """Most clustered first."""
    exact: tuple[End, ...] = ()
    """Ops whose results are BF16 numbers always: rounding them changes nothing."""
    unmeasured: dict[str, str] = Field(default_factory=dict)
    """Op to the reason why its unrounded results cannot be had."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def with_sites(clusters: Clusters, report: Report) -> Clusters:
    """The result with the sites that each location's value belongs to."""
    ids: dict[Any, list[str]] = {}
    for site in _sites(report):
        ids.setdefault(key_of(site.producer), []).append(site.id)
    found = [x.model_copy(update={"sites": tuple(ids.get(key_of(x.producer), ()))}) for x in clusters.locations]
    return clusters.model_copy(update={"locations": tuple(found)})


def rank_sites(report: Report, clusters: Clusters) -> Report:
    """The report with a score on each site whose value was measured, and each group's sites ordered by it.

    A site's score is the median of its value's corrected scores over the layers that the site is in.
    """
    by_key = {key_of(x.producer): x for x in clusters.locations}
    groups = []
    for group in report.groups:
        sites = [s.model_copy(update={"clustering": _site_score(s, by_key)}) for s in group.sites]
        sites.sort(key=lambda s: -1.0 if s.clustering is None else s.clustering, reverse=True)
        groups.append(group.model_copy(update={"sites": tuple(sites)}))
    return report.model_copy(update={"groups": tuple(groups)})


def _site_score(site: Site, by_key: dict[Any, Location]) -> float | None:
    location = by_key.get(key_of(site.producer))
    if location is None:
        return None
    layers = set(site.producer_layers)
    found = [x for n, x in zip(location.layers, location.by_layer, strict=True) if n in layers] if location.layers else []
    return _median(found or location.by_layer)


def _median(values: Iterable[float]) -> float | None:
    known = sorted(v for v in values if not math.isnan(v))
    middle = len(known) // 2
    if not known:
        return None
    return known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2


def _sites(report: Report) -> Iterable[Site]:
    return (s for g in report.groups for s in g.sites)
