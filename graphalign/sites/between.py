"""What differs between two targets: the same trainer against two engines, site by site."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from graphalign.errors import BadInputError
from graphalign.sites.report import End, Report, Site

Key = tuple[str, End, End, str]
"""Kind, value, reader, and the formats the engine rounds to."""


@dataclass(frozen=True)
class Move:
    """One edge that the two targets treat differently in some layers."""

    group: str
    kind: str
    producer: End
    consumer: End
    first: tuple[int, ...]
    """Layers in which only the first target makes it a site."""
    second: tuple[int, ...]
    """Layers in which only the second does."""
    outside: tuple[int, int] = (0, 0)
    """Edges outside of layers that only the first, only the second target makes a site."""


@dataclass(frozen=True)
class Between:
    """Two targets compared."""

    names: tuple[str, str]
    groups: tuple[tuple[str, int, int], ...]
    """Name, edges on the first target, on the second."""
    moves: tuple[Move, ...]


def target_name(report: Report) -> str:
    """`cpu`, `h100 (simulated)`, `h100 server tp 2 (simulated)`."""
    key = str(report.target.get("key") or report.target.get("device_name") or report.target.get("device") or "?")
    ranks = report.target.get("tp") or 1
    key = f"{key} server" if report.target.get("entry") == "server" else key
    key = f"{key} tp {ranks}" if ranks != 1 else key
    return f"{key} (simulated)" if report.simulated else key


def compare_targets(first: Report, second: Report) -> Between:
    """Compare two results for one trainer.

    Raises:
        BadInputError: they are of different models or regimes.
    """
    for what, a, b in (
        ("models", first.model.get("architecture"), second.model.get("architecture")),
        ("models", first.model.get("layers"), second.model.get("layers")),
        ("regimes", first.regime, second.regime),
    ):
        if a != b:
            raise BadInputError(f"these results are of different {what}", where=f"{a}\n{b}", hint="compare results for one trainer")
    sites = [_by_edge(r) for r in (first, second)]
    moves = []
    for key in dict.fromkeys([*sites[0], *sites[1]]):
        a, b = (s.get(key, ("", Counter())) for s in sites)
        left, right = a[1] - b[1], b[1] - a[1]
        if left or right:
            layers = [tuple(sorted(n for n in c if n is not None)) for c in (left, right)]
            outside = (left[None], right[None])
            moves.append(Move(a[0] or b[0], key[0], key[1], key[2], layers[0], layers[1], outside))
    counts = [{g.name: sum(s.count for s in g.sites) for g in r.groups} for r in (first, second)]
    names = sorted({*counts[0], *counts[1]})
    groups = tuple((n, counts[0].get(n, 0), counts[1].get(n, 0)) for n in names)
    return Between((target_name(first), target_name(second)), groups, tuple(moves))


def _by_edge(report: Report) -> dict[Key, tuple[str, Counter[int | None]]]:
    """Each edge's group, and the layers of its readers (None: outside of layers), with multiplicity."""
    out: dict[Key, tuple[str, Counter[int | None]]] = {}
    for group in report.groups:
        for site in group.sites:
            key = (site.kind, site.producer, site.consumer, "/".join(site.inference))
            _, layers = out.setdefault(key, (group.name, Counter()))
            layers.update(_layers(site))
    return out


def _layers(site: Site) -> list[int | None]:
    return [*site.layers, *[None] * (site.count - len(site.layers))]
