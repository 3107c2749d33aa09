"""The engine computes some values anew in several kernels. Copies that round alike are drawn once, with their number."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable

from graphalign.ir.drawing import Arrow, Panel, Vertex


def fold_copies(panel: Panel) -> tuple[Panel, dict[str, tuple[Vertex, ...]]]:
    """Draw copies once.

    Args:
        panel: a panel.

    Returns:
        The panel with one vertex for all copies of a value that are read, and that read, with the same roundings; and for
        each such vertex the others. Copies that round differently stay apart.
    """
    classes = _classes(panel)
    _swallow(panel, classes)
    chosen = _choose(panel, classes)
    also = {chosen[c]: tuple(v for v in panel.vertices if classes[v.id] == c and v.id != chosen[c]) for c in chosen}
    also = {k: vs for k, vs in also.items() if vs}
    if not also:
        return panel, {}
    now = {v.id: chosen[classes[v.id]] for v in panel.vertices}
    vertices = []
    for v in panel.vertices:
        if now[v.id] == v.id:
            count = v.count + sum(x.count for x in also.get(v.id, ())) if v.kernel else v.count
            partners = tuple(dict.fromkeys(now[p] for p in v.partners if p in now))
            vertices.append(v.model_copy(update={"count": count, "partners": partners}))
    merged: dict[tuple[str, str, tuple[str, ...]], Arrow] = {}
    for a in panel.arrows:
        key = (now[a.tail], now[a.head], a.roundings)
        if key[0] == key[1]:
            continue
        old = merged.get(key, a)
        new = {"sites": (*old.sites, *(s for s in a.sites if s not in old.sites)), "via": tuple(dict.fromkeys((*old.via, *a.via)))}
        merged[key] = a.model_copy(update={"tail": key[0], "head": key[1], "verdict": old.verdict or a.verdict, **new})
    return panel.model_copy(update={"vertices": tuple(vertices), "arrows": tuple(merged.values())}), also


def _classes(panel: Panel) -> dict[str, Hashable]:
    """Each vertex to what it is a copy of; itself if it has a fellow that rounds differently."""
    out: dict[str, Hashable] = {}
    for v in panel.vertices:
        out[v.id] = (v.kind, v.box, bool(v.kernel), v.partners) if v.id[0] == "i" and v.partners else v.id
    heads, tails = defaultdict(set), defaultdict(set)
    for a in panel.arrows:
        heads[a.tail].add(out[a.head])
        tails[a.head].add(out[a.tail])
    for v in panel.vertices:
        if v.id[0] == "i" and not v.partners and v.kind in ("op", "steps"):
            out[v.id] = ("own", v.op, frozenset(heads[v.id]), frozenset(tails[v.id]))
    while bad := _uneven(panel, out):
        out.update({i: i for i in bad})
    return out


def _uneven(panel: Panel, classes: dict[str, Hashable]) -> set[str]:
    """Vertices of classes whose members round a common operand, or are rounded for a common reader, in different ways."""
    size = Counter(classes.values())
    seen: dict[str, dict[tuple[str, Hashable], set[tuple[tuple[str, ...], str]]]] = defaultdict(lambda: defaultdict(set))
    for a in panel.arrows:
        seen[a.head]["in", classes[a.tail]].add((a.roundings, a.verdict))
        seen[a.tail]["out", classes[a.head]].add((a.roundings, a.verdict))
    states: dict[tuple[Hashable, tuple[str, Hashable]], set[frozenset[tuple[tuple[str, ...], str]]]] = defaultdict(set)
    for i, edges in seen.items():
        for edge, roundings in edges.items():
            states[classes[i], edge].add(frozenset(roundings))
    bad = {c for (c, _), found in states.items() if len(found) > 1}
    return {i for i, c in classes.items() if c in bad and size[c] > 1}


def _swallow(panel: Panel, classes: dict[str, Hashable]) -> None:
    """An unrounded step that only one other vertex reads and feeds belongs to that one (a sum whose mean is taken in another kernel)."""
    heads, tails, rounded = defaultdict(set), defaultdict(set), set()
    for a in panel.arrows:
        tail, head = classes[a.tail], classes[a.head]
        heads[tail].add(head)
        tails[head].add(tail)
        if a.roundings or a.sites or a.verdict:
            rounded |= {tail, head}
    for v in panel.vertices:
        c = classes[v.id]
        lonely = v.id[0] == "i" and not v.partners and v.kind in ("op", "steps") and c not in rounded
        if lonely and len(heads[c]) == 1 and heads[c] == tails[c]:
            classes[v.id] = next(iter(heads[c]))


def _choose(panel: Panel, classes: dict[str, Hashable]) -> dict[Hashable, str]:
    """The copy of each that is drawn: from as few kernels as possible."""
    held: dict[int, set[Hashable]] = defaultdict(set)
    for v in panel.vertices:
        held[v.launch if v.kernel else -1].add(classes[v.id])
    order = sorted(held, key=lambda launch: (-len(held[launch]), launch))
    out: dict[Hashable, str] = {}
    for launch in order:
        for v in sorted(panel.vertices, key=lambda v: not v.partners):
            if (v.launch if v.kernel else -1) == launch:
                out.setdefault(classes[v.id], v.id)
    return out
