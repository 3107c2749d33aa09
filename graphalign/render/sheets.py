"""A panel as sheets of a page each: a region at a time, and regions that look alike drawn once.

A group's sites are often in regions that have nothing to do with each other (a layer's two norms), or in two that are the same but
for names (q and k). Side by side they would make a picture too wide for paper. Anchors and sums that connect
regions are drawn on every sheet that they touch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import islice

from networkx import DiGraph
from networkx.algorithms.isomorphism import DiGraphMatcher, categorical_edge_match, categorical_node_match

from graphalign.ir.drawing import Arrow, Panel, Vertex
from graphalign.render.copies import fold_copies

STEPS = ("op", "steps")
BARS = ("gemm", "attention", "anchor")
MOST_MAPPINGS = 64
"""Ways to lay one region on another that are compared by their labels."""


@dataclass(frozen=True)
class Sheet:
    """What fits on a page."""

    panel: Panel
    """The part of the panel that is drawn. An arrow's sites are those of all the places that it stands for."""
    also: dict[str, tuple[Vertex, ...]] = field(default_factory=dict)
    """Id of a vertex to the others that it stands for."""
    regions: tuple[str, ...] = ()
    """Titles of the regions that it stands for, the drawn one first."""

    def all(self, v: Vertex) -> tuple[Vertex, ...]:
        """A vertex and the others that it stands for."""
        return (v, *self.also.get(v.id, ()))


def own(panel: Panel, arrow: Arrow) -> bool:
    """Whether a panel is about this arrow."""
    if panel.entry:
        return arrow.verdict == panel.entry
    return bool(arrow.sites) and (not panel.group or any(s.rpartition(".")[0] == panel.group for s in arrow.sites))


def sheets(panel: Panel) -> tuple[Sheet, ...]:
    """Cut a panel into sheets. Every arrow that the panel is about is on one of them."""
    parts = [p for p in _parts(panel) if any(own(panel, a) for a in p.arrows)]
    out: list[Sheet] = []
    for part in (_merge_alike(Sheet(*fold_copies(p))) for p in parts):
        for n, sheet in enumerate(out):
            if (same := _mapping(sheet, part)) is not None:
                out[n] = _fold(sheet, part, same)
                break
        else:
            out.append(part)
    return tuple(out) or (Sheet(panel),)


# -- cutting ------------------------------------------------------------------------------------------------------------------


class _Union:
    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def find(self, x: Hashable) -> Hashable:
        root = x
        while (up := self.parent.setdefault(root, root)) != root:
            root = up
        return root

    def join(self, a: Hashable, b: Hashable) -> None:
        self.parent[self.find(b)] = self.find(a)


def _parts(panel: Panel) -> list[Panel]:
    """Connected by steps inside regions; what has no such step, by sums."""
    by_id = {v.id: v for v in panel.vertices}
    inside = {v.id for v in panel.vertices if v.kind in STEPS and (v.box is not None if v.id[0] == "t" else bool(v.kernel))}
    sums = {v.id for v in panel.vertices if v.kind == "sum"}
    union = _Union()
    for v in panel.vertices:
        if v.id in inside:
            for p in v.partners:
                if p in inside:
                    union.join(v.id, p)
    held = {v.id: tuple(p for p in v.partners if p in by_id) for v in panel.vertices}
    place: list[Hashable] = []
    for n, a in enumerate(panel.arrows):
        ends = [x for x in (a.tail, a.head) if x in inside]
        place.append(ends[0] if ends else ("arrow", n))
        if len(ends) == 2:
            union.join(a.tail, a.head)
        if not ends:
            for x in (a.tail, a.head):
                for y in (x, *held[x]):
                    if y in sums or panel.entry:
                        union.join(("arrow", n), ("sum", y))
    found: dict[Hashable, list[Arrow]] = defaultdict(list)
    for a, at in zip(panel.arrows, place, strict=True):
        found[union.find(at)].append(a)
    return [_part(panel, arrows) for arrows in found.values()]


def _part(panel: Panel, arrows: Iterable[Arrow]) -> Panel:
    arrows = tuple(arrows)
    here = {x for a in arrows for x in (a.tail, a.head)}
    vertices = tuple(v.model_copy(update={"partners": tuple(p for p in v.partners if p in here)}) for v in panel.vertices if v.id in here)
    return panel.model_copy(update={"vertices": vertices, "arrows": arrows})


# -- drawing once -------------------------------------------------------------------------------------------------------------


def _merge_alike(sheet: Sheet) -> Sheet:
    """Bars that read the same value alike become one, as the engine's merged projections are; so do parameters of one reader."""
    panel = sheet.panel
    edges: dict[str, list[tuple[str, tuple[str, ...]]]] = defaultdict(list)
    heads, tails = {a.head for a in panel.arrows}, {a.tail for a in panel.arrows}
    judged = {x for a in panel.arrows if a.sites or a.verdict for x in (a.tail, a.head)}
    for a in panel.arrows:
        edges[a.head].append((a.tail, a.roundings))
        edges[a.tail].append((a.head, a.roundings))
    same: dict[Hashable, list[Vertex]] = defaultdict(list)
    for v in panel.vertices:
        if v.id not in judged and ((v.kind in BARS and v.id not in tails) or (v.kind == "parameter" and v.id not in heads)):
            same[v.id[0], v.kind, tuple(sorted(edges[v.id]))].append(v)
    gone = {v.id: vs[0].id for vs in same.values() for v in vs[1:]}
    if not gone:
        return sheet
    also = sheet.also | {vs[0].id: (*sheet.also.get(vs[0].id, ()), *vs[1:]) for vs in same.values() if len(vs) > 1}
    partners = {v.id: tuple(dict.fromkeys(p for x in (v, *also.get(v.id, ())) for p in x.partners)) for v in panel.vertices}
    vertices = tuple(
        v.model_copy(update={"partners": tuple(dict.fromkeys(gone.get(p, p) for p in partners[v.id]))})
        for v in panel.vertices
        if v.id not in gone
    )
    arrows = tuple(a for a in panel.arrows if a.head not in gone and a.tail not in gone)
    return Sheet(panel.model_copy(update={"vertices": vertices, "arrows": arrows}), also, sheet.regions)


def _graph(sheet: Sheet) -> DiGraph:
    """Vertices and edges with what is seen of them but names."""
    g = DiGraph()
    frames: dict[int, int] = {}
    for v in sheet.panel.vertices:
        frame = frames.setdefault(v.launch, len(frames)) if v.kernel else -1
        g.add_node(v.id, look=(v.id[0], v.kind, v.op if v.kind in STEPS else "", v.box is None, frame, v.count))
        for p in v.partners:
            if v.id[0] == "t":
                g.add_edge(v.id, p, look="partner")
    for (tail, head), arrows in _between(sheet.panel).items():
        g.add_edge(tail, head, look=tuple(sorted((a.roundings, bool(a.sites), own(sheet.panel, a), a.verdict) for a in arrows)))
    return g


def _between(panel: Panel) -> dict[tuple[str, str], list[Arrow]]:
    out: dict[tuple[str, str], list[Arrow]] = defaultdict(list)
    for a in panel.arrows:
        out[a.tail, a.head].append(a)
    return out


def _mapping(first: Sheet, second: Sheet) -> dict[str, str] | None:
    """Vertices of the first sheet to those of a second that looks the same."""
    a, b = _graph(first), _graph(second)
    matcher = DiGraphMatcher(a, b, categorical_node_match("look", None), categorical_edge_match("look", None))
    # q and k have two mappings: q * cos to k * cos, or to rotate_half(k) * sin
    one, two = ({v.id: v.label for v in s.panel.vertices} for s in (first, second))

    def likeness(m: dict[str, str]) -> float:
        return sum(SequenceMatcher(None, one[x], two[y], autojunk=False).ratio() for x, y in m.items())

    return max(islice(matcher.isomorphisms_iter(), MOST_MAPPINGS), key=likeness, default=None)


def _fold(first: Sheet, second: Sheet, same: dict[str, str]) -> Sheet:
    """The first sheet, standing for the second too."""
    other = {v.id: v for v in second.panel.vertices}
    also = {v.id: (*first.also.get(v.id, ()), *second.all(other[same[v.id]])) for v in first.panel.vertices}
    theirs = _between(second.panel)
    arrows = []
    for a in first.panel.arrows:
        twin = next(b for b in theirs[same[a.tail], same[a.head]] if (b.roundings, b.verdict) == (a.roundings, a.verdict))
        arrows.append(a.model_copy(update={"sites": (*a.sites, *(s for s in twin.sites if s not in a.sites))}))
    regions = tuple(dict.fromkeys((*titles(first), *titles(second))))
    return Sheet(first.panel.model_copy(update={"arrows": tuple(arrows)}), also, regions)


def titles(sheet: Sheet) -> tuple[str, ...]:
    """The regions that a sheet shows or stands for."""
    shown = dict.fromkeys(sheet.panel.boxes[v.box] for v in sheet.panel.vertices if v.box is not None)
    return sheet.regions or tuple(shown)
