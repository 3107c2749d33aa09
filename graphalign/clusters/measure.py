"""Runs the trainer's model on text and scores every location where it rounds to BF16."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from graphalign.clusters.locations import Key, Place, Places
from graphalign.clusters.positions import Tally
from graphalign.clusters.report import Clusters, Location
from graphalign.clusters.scores import Sums, score
from graphalign.clusters.unrounded import Unrounded
from graphalign.errors import BadInputError
from graphalign.ir.training import TrainingGraph

Forward = Callable[[Sequence[int], Unrounded], TrainingGraph]
"""Runs the model on token ids with a watch, and returns what was recorded."""
AGREEING = 0.98
"""Share of recomputed values that round as the op's own below which a note says so."""


@dataclass
class _Collected:
    """One location, over the sequences so far."""

    place: Place
    tallies: dict[int | None, dict[int, Tally]] = field(default_factory=dict)
    """Layer to sequence to what was counted there."""

    def totals(self) -> dict[int | None, Tally]:
        """Layer to the tally over all sequences, layers ascending."""
        out: dict[int | None, Tally] = {}
        for layer in sorted(self.tallies, key=lambda n: -1 if n is None else n):
            out[layer] = Tally()
            for tally in self.tallies[layer].values():
                out[layer].merge(tally)
        return out


def measure(
    forward: Forward,
    sequences: Sequence[Sequence[int]],
    *,
    prompts: str,
    weights: Literal["real", "dummy"] = "real",
    notes: Sequence[str] = (),
    progress: Callable[[str, float | None], None] | None = None,
) -> Clusters:
    """Run the model on every sequence and score its rounding locations.

    Args:
        forward: see `Forward`.
        sequences: token ids, at least two in each.
        prompts: where they come from, in words.
        weights: whose values these are.
        notes: what a reader must know.
        progress: called with (stage, fraction).

    Raises:
        BadInputError: no sequences, or nothing that the model computes is rounded to BF16.
    """
    if not sequences or min(len(s) for s in sequences) < 2:
        raise BadInputError("there is no text to run the model on", hint="give prompts with at least two tokens")
    say, started = progress or (lambda stage, fraction: None), time.perf_counter()
    collected: dict[Key, _Collected] = {}
    unmeasured: dict[str, str] = {}
    places: Places | None = None
    for number, ids in enumerate(sequences):
        say("run the model", number / len(sequences))
        watch = Unrounded(len(ids))
        graph = forward(ids, watch)
        places = places if places is not None and _alike(places.graph, graph) else Places(graph)
        _collect(places, watch, number, collected)
        unmeasured |= watch.unmeasured
    say("score", None)
    rounding = {k: c for k, c in collected.items() if any(t.exact < t.n for row in c.tallies.values() for t in row.values())}
    locations = [_location(c, len(sequences)) for c in rounding.values()]
    if not locations:
        raise BadInputError(
            "the model rounds nothing to BF16 in this regime",
            where=f"parameters {graph.header.regime.get('param_dtype')}, autocast {graph.header.regime.get('autocast')}",
            hint="measure it with --dtype bfloat16, or with --autocast bfloat16",
        )
    locations.sort(key=lambda x: (-x.corrected, -x.score))
    return Clusters(
        model=graph.header.model,
        regime=graph.header.regime,
        versions=graph.header.versions,
        weights=weights,
        prompts=prompts,
        sequences=tuple(len(s) for s in sequences),
        locations=tuple(locations),
        exact=tuple(c.place.end for k, c in collected.items() if k not in rounding),
        unmeasured=unmeasured,
        notes=(*notes, *_disagreeing(locations)),
        seconds=round(time.perf_counter() - started, 1),
    )


def _collect(places: Places, watch: Unrounded, sequence: int, collected: dict[Key, _Collected]) -> None:
    """Assign the tallies of one forward to their locations. A value that is rounded more than once counts once."""
    seen: set[tuple[Key, int | None]] = set()
    for value, tally in watch.tallies.items():  # in execution order
        place = places.of(value)
        if place is None or (place.key, place.layer) in seen:
            continue
        if place.kind == "table" and sequence:
            continue  # it depends on positions alone: another sequence has the same values
        seen.add((place.key, place.layer))
        collected.setdefault(place.key, _Collected(place)).tallies.setdefault(place.layer, {})[sequence] = tally


def _alike(a: TrainingGraph, b: TrainingGraph) -> bool:
    """Whether two recordings are of the same ops, so that value ids mean the same."""
    return [(n.op, n.module, [v and v.id for v in n.outputs]) for n in a.nodes] == [
        (n.op, n.module, [v and v.id for v in n.outputs]) for n in b.nodes
    ]


def _location(c: _Collected, sequences: int) -> Location:
    by_layer = c.totals()
    found = score(Sums.of([[c.tallies[layer].get(s) for s in range(sequences)] for layer in by_layer]))
    whole = Tally()
    for tally in by_layer.values():
        whole.merge(tally)
    everything = whole.n + whole.outside
    return Location(
        kind=c.place.kind,
        producer=c.place.end,
        layers=tuple(x for x in by_layer if x is not None),
        score=found.plain,
        corrected=found.corrected,
        interval=found.interval,
        floor=found.floor,
        floor_independent=found.floor_independent,
        by_layer=found.layers,
        values=min(t.n for t in by_layer.values()),
        exact=whole.exact / max(whole.n, 1),
        zeros=whole.zeros / max(everything, 1),
        ties=whole.ties / max(whole.n, 1),
        outside=whole.outside,
        agreement=min(t.agreeing / max(t.n + t.outside, 1) for t in by_layer.values()),
        histogram=tuple(int(x) for x in whole.counts),
    )


def _disagreeing(locations: Sequence[Location]) -> list[str]:
    return [
        f"{x.kind}: {x.agreement:.1%} of the recomputed values round as the trainer's own kernel rounded them, which rounds inside too"
        for x in locations
        if x.agreement < AGREEING
    ]
