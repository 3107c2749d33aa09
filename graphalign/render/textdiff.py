"""The diff as text, in a form like that of a unified diff: for terminals, logs and reviews."""

from __future__ import annotations

from collections.abc import Iterator

from graphalign.ir.drawing import Excerpt
from graphalign.render.patch_source import SourceDiff, as_text
from graphalign.render.words import action, backend, clean, expression, formats, headline, layer_words, place, shorten
from graphalign.sites.report import Entry, Report, Site

BUCKETS = ("semantic", "unpatchable", "conflicting", "undetermined", "leftovers")
TITLES = {
    "semantic": "semantic divergence: the two sides compute different functions here",
    "unpatchable": "unpatchable: a true difference that no pointwise patch removes",
    "conflicting": "conflicting: copies on the inference side disagree",
    "undetermined": "undetermined: could not be judged",
    "leftovers": "leftover: could not be placed",
    "unexercised": "not exercised: clamps and the like of one side that never act on the chosen inputs, so what they do is not compared",
    "assumed": "assumed: taken for equal because one module owns both, and not compared inside",
    "interior": "interior: steps that exist on one side only by construction",
    "tail": "tail: behind the engine's compiled graph, not compared",
}


def render_text(report: Report, *, group: str = "", layer: int | None = None, source: SourceDiff | None = None) -> str:
    """The whole result, or one group, one kind of entry or one layer of it.

    Lines that start with `-` are the trainer's, with `+` the engine's, with `!` no site; `@@` begins a group.
    """
    return "\n".join(line.rstrip() for line in _lines(report, group, layer, source)) + "\n"


def _lines(report: Report, group: str, layer: int | None, source: SourceDiff | None) -> Iterator[str]:
    regime = ", ".join(
        f"{k} {v}" for k, v in report.regime.items() if isinstance(v, str | bool | int) and k in ("param_dtype", "autocast", "attention")
    )
    target = ", ".join(f"{k} {v}" for k, v in report.target.items() if k in ("device", "isa", "tp") or (k == "simulated" and v))
    yield f"diff {headline(report)}"
    yield clean(f"--- training: eager Transformers {report.versions.get('transformers', '?')} ({regime})", 400)
    yield clean(f"+++ inference: vLLM {report.versions.get('vllm', '?')}, compiled ({target})", 400)
    if words := backend(report):
        yield f"    {words}"
    excerpts = {e.site: e for e in report.drawing.excerpts} if report.drawing else {}
    for g in report.groups:
        sites = [s for s in g.sites if layer is None or layer in s.layers]
        if (group and g.name != group) or not sites:
            continue
        yield f"@@ {clean(g.name, 80)}: {len(sites)} sites, {sum(s.count for s in sites)} edges, {layer_words(g.layers)} @@"
        for s in sites:
            yield from _site(s, excerpts.get(s.id))
        if source and (hunks := source.serving(s.id for s in sites)):
            yield f" {clean(g.name, 80)} in {clean(source.name, 120)}"
            yield from (clean(x, 300) for x in as_text(hunks))
    shown = (*BUCKETS, "assumed", "unexercised")
    for bucket in shown if not group else [b for b in shown if b == group]:
        entries = [e for e in getattr(report, bucket) if layer is None or not e.layers or layer in e.layers]
        if entries:
            yield f"@@ {TITLES[bucket]} @@"
            for e in entries:
                yield from _entry(e)
    if group:
        return
    interior, tail = (sum(e.count for e in entries) for entries in (report.interior, report.tail))
    yield f"@@ not compared: {interior} interior steps, {tail} ops behind the compiled graph @@"


def _site(s: Site, excerpt: Excerpt | None) -> Iterator[str]:
    yield f" {clean(s.id, 80)}  {layer_words(s.layers)}, {s.count} edges: {action(s)}"
    yield f"   {expression(s.producer, 90)}   [{place(s.producer)}]"
    yield f"-    {_state(s.training)}"
    where = f"   [{shorten(s.evidence[0].kernel, 80)}]" if s.evidence else ""
    yield f"+    {_state(s.inference)}{where}"
    for line in excerpt.lines if excerpt else ():
        yield f"+      {shorten(line, 140)}"
    yield f"   into {expression(s.consumer, 90)}   [{place(s.consumer)}]"


def _state(roundings: tuple[str, ...]) -> str:
    return f"rounded to {formats(roundings)}" if roundings else "not rounded: FP32"


def _entry(e: Entry) -> Iterator[str]:
    layers = f" ({layer_words(e.layers)})" if e.layers else ""
    yield f"! {shorten(e.what, 120)}{layers} ×{e.count}: {shorten(e.reason, 300)}"
    yield f"!   {shorten(e.where, 200)}"
