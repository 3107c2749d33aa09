"""The section `drawing` of a report: per group one panel per kind of layer, and the kernels' lines behind every site."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from graphalign.align.align import Alignment
from graphalign.align.edges import Finding, Path
from graphalign.ir.dataflow import Ref
from graphalign.ir.drawing import Drawing, Excerpt, Omitted, Panel
from graphalign.pictures.judged import Judged, short_module
from graphalign.pictures.panel import Cut
from graphalign.sites.divergence import Parting
from graphalign.sites.ends import Ends, layer_of, pattern_of

MOST_KINDS = 3
"""Kinds of layers drawn per group; further ones are named."""
MOST_LINES = 10
MOST_ENTRIES = 6
"""Diagrams of each kind of entry that is no site; further ones are named."""
NODE = re.compile(r"%\w+")
ENTRIES = ("semantic", "unpatchable", "conflicting", "undetermined")


def draw(
    al: Alignment, ends: Ends, findings: Iterable[Finding], sites: dict[tuple[int, int, int], str], semantic: Iterable[Parting] = ()
) -> Drawing:
    """Choose what is drawn.

    Args:
        al: the alignment.
        ends: names of training ops.
        findings: every judged edge.
        sites: (consumer, slot, producer) to the id of the site, `rope.1`.
        semantic: where the two sides compute different functions.
    """
    parted = {p.op.id: p.reason for p in semantic}
    judged = Judged({(f.consumer, f.slot, f.producer): f for f in findings}, sites, parted)
    by: dict[str, dict[int | None, list[Finding]]] = defaultdict(lambda: defaultdict(list))
    for key, site in sorted(sites.items()):
        layer = layer_of(al.training.ops[key[0]].module)
        for group in (site.rpartition(".")[0], ""):
            by[group][layer].append(judged.findings[key])
    panels: list[Panel] = []
    omitted: list[Omitted] = []
    for group in sorted(by, key=lambda g: (not g, g)):
        kinds: dict[Any, list[Panel]] = defaultdict(list)
        for layer, edges in by[group].items():
            panel = Cut(al, ends, judged, group, layer, edges).panel()
            kinds[_signature(panel)].append(panel)
        ranked = sorted(kinds.values(), key=lambda same: (same[0].layer is None, -len(same), same[0].layer or 0))
        for n, same in enumerate(ranked):
            layers = tuple(sorted(p.layer for p in same if p.layer is not None))
            differs = _differs(same[0], ranked[0][0]) if n and same[0].layer is not None else ""
            if n < MOST_KINDS or same[0].layer is None:
                panels.append(same[0].model_copy(update={"layers": layers, "differs": differs}))
            else:
                omitted.append(Omitted(group=group, layers=layers, differs=differs))
    entries, more = _entries(al, ends, judged)
    panels += entries
    omitted += more
    return Drawing(panels=tuple(panels), excerpts=tuple(_excerpts(al, judged)), omitted=_merge(omitted))


def _entries(al: Alignment, ends: Ends, judged: Judged) -> tuple[list[Panel], list[Omitted]]:
    """A panel for all edges of one kind and reason, in the layer that has most of them."""
    found: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for key, f in judged.findings.items():
        if (verdict := judged.verdict(key)) in ENTRIES:
            found[verdict, NODE.sub("%", _reason(judged, f))].append(f)
    panels, omitted = [], []
    drawn: Counter[str] = Counter()
    for (verdict, _), edges in sorted(found.items(), key=lambda item: (ENTRIES.index(item[0][0]), item[1][0].consumer)):
        by: dict[int | None, list[Finding]] = defaultdict(list)
        for f in edges:
            by[layer_of(al.training.ops[f.consumer].module)].append(f)
        layers, reason = tuple(sorted(n for n in by if n is not None)), _reason(judged, edges[0])
        if drawn[verdict] == MOST_ENTRIES:
            omitted.append(Omitted(group=verdict, layers=layers, differs=reason))
            continue
        drawn[verdict] += 1
        layer = max(by, key=lambda n: (len(by[n]), -1 if n is None else -n))
        panel = Cut(al, ends, judged, verdict, layer, by[layer]).panel()
        names = tuple(dict.fromkeys(al.training.ops[f.consumer].name for f in by[layer]))
        panels.append(Panel.model_validate(panel.model_dump() | {"entry": verdict, "reason": reason, "names": names, "layers": layers}))
    return panels, omitted


def _reason(judged: Judged, f: Finding) -> str:
    if f.consumer in judged.semantic:
        return judged.semantic[f.consumer]
    return f"proposed as {f.verdict}, but not confirmed by the check" if f.verdict in ("keep", "round") else f.reason


def _merge(omitted: list[Omitted]) -> tuple[Omitted, ...]:
    """One entry for what is described in the same words."""
    same: dict[tuple[str, str], list[int]] = defaultdict(list)
    for o in omitted:
        same[o.group, o.differs] += o.layers
    return tuple(Omitted(group=group, layers=tuple(sorted(layers)), differs=differs) for (group, differs), layers in same.items())


def _signature(panel: Panel) -> Any:
    """Equal for layers that look alike: no layer numbers, node names, buffers or kernel names, but which ops share a kernel."""
    kernels: dict[int, int] = {}

    def relative(module: str) -> tuple[str, int | None]:
        layer = layer_of(module)
        return pattern_of(module), None if layer is None or panel.layer is None else layer - panel.layer

    return (
        panel.boxes,
        tuple(
            (
                v.id,
                v.kind,
                v.label,
                v.op,
                relative(v.module) if v.id[0] == "t" else "",
                v.box,
                kernels.setdefault(v.launch if v.kernel else 0, len(kernels)),
                v.count,
                v.partners,
            )
            for v in panel.vertices
        ),
        tuple(sorted((a.tail, a.head, a.roundings, a.sites, a.verdict) for a in panel.arrows)),
    )


def _differs(panel: Panel, first: Panel) -> str:
    """How a kind of layer differs from the most frequent one, in words."""
    mine, theirs = ({s for a in p.arrows for s in a.sites if not p.group or s.startswith(f"{p.group}.")} for p in (panel, first))
    parts = [f"{word} {', '.join(sorted(s, key=_number))}" for word, s in (("without", theirs - mine), ("with", mine - theirs)) if s]
    if not parts:
        here, there = ({v.launch for v in p.vertices if v.kernel} for p in (panel, first))
        ops, usual = (sum(v.count for v in p.vertices if v.kernel) for p in (panel, first))
        counts = f"{_plural(ops, 'op')} in {_plural(len(here), 'kernel')} instead of {usual} in {len(there)}"
        parts = [f"same sites, other kernels: {counts}" if (ops, len(here)) != (usual, len(there)) else "same sites, other neighbours"]
    return "; ".join(parts)


def _plural(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def _number(site: str) -> tuple[str, int]:
    group, _, n = site.rpartition(".")
    return group, int(n) if n.isdigit() else 0


def _excerpts(al: Alignment, judged: Judged) -> Iterable[Excerpt]:
    """For every site the first path on the inference side."""
    seen: set[str] = set()
    for key, site in sorted(judged.sites.items(), key=lambda item: (_number(item[1]), item[0])):
        paths = judged.findings[key].paths
        if site in seen or not paths:
            continue
        seen.add(site)
        path = paths[0]
        ops = _on_path(al, path)
        lines = tuple(_line(al, i) for i in ops[:MOST_LINES])
        source = dict.fromkeys(" ".join(s.split()) for i in ops if isinstance(s := al.inference.ops[i].source, str) and s)
        consumer = al.inference.ops[path.consumer]
        yield Excerpt(
            site=site,
            layer=layer_of(al.training.ops[key[0]].module),
            kernel=consumer.where or consumer.name,
            lines=lines,
            source=tuple(source)[:4],
        )


def _on_path(al: Alignment, path: Path) -> list[int]:
    """Ops from a path's producer to its consumer, in execution order."""
    i = al.inference

    def alone(op: int) -> bool:
        return op > path.producer and not al.reverse.get(op)

    between = i.above(i.read_by(path.consumer), alone)
    return sorted({path.producer, path.consumer, *filter(alone, between)})


def _line(al: Alignment, i: int) -> str:
    op = al.inference.ops[i]
    what = op.target if op.kind == "op" else f"{op.kind} {short_module(op.target)}"
    return f"{op.name} = {what}({', '.join(' | '.join(dict.fromkeys(_read(al, r) for r in o)) for o in op.operands)})"


def _read(al: Alignment, ref: Ref) -> str:
    op = al.inference.ops[ref.producer]
    name = op.name if op.kind in ("op", "anchor") else short_module(op.target)
    for rounding in ref.roundings:
        name = f"{rounding}({name})"
    return name
