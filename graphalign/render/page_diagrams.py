"""The page's diagrams: a figure for every sheet, and what its parts say when they are pointed at."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterable

from graphalign.ir.drawing import Panel
from graphalign.render.diagram import Sketch, sketch
from graphalign.render.dot import DrawingError, NoGraphvizError, draw_svg, to_text
from graphalign.render.labels import caption, subtitle
from graphalign.render.markup import Content, Html, tag, text
from graphalign.render.patch_source import SourceDiff, as_html
from graphalign.render.sheets import Sheet, sheets
from graphalign.render.words import action, clean, layer_words, place
from graphalign.sites.report import Report

MISSING = "This sites file holds no diagram data; make it anew: graphalign diff INF TRAIN -o sites.json"


def diagrams_section(report: Report, group: str, layer: int | None, source: SourceDiff | None = None) -> Html:
    """The groups' panels in the kind of layer that most layers are; other kinds, and all groups together, behind a click."""
    drawing = report.drawing
    if drawing is None:
        return tag("p", MISSING)
    panels = choose(tuple(p for p in drawing.panels if not p.entry), group, layer)
    if not panels:
        return tag("p", "There is nothing to draw.")
    evidence = site_evidence(report)
    parts: list[Content] = [_legend()]
    try:
        for panel in panels:
            drawn = [*figures(report, panel, evidence), *_in_source(report, panel, source)]
            if panel.differs or panel.layer is None or not panel.group:
                kind = "All sites together, region by region: " if not panel.group else "Another kind: " if panel.differs else ""
                parts.append(tag("details", [tag("summary", kind + _name(panel)), *drawn]))
            else:
                parts += drawn
    except NoGraphvizError as e:
        return text(
            [
                tag("p", e.what, class_="banner"),
                tag("p", ["Without it there are no diagrams; ", tag("a", "the text form", href="#text"), " says the same."]),
            ]
        )
    parts.append(omitted(report, [p.group for p in panels]))
    return text([text(p) for p in parts])


def _in_source(report: Report, panel: Panel, source: SourceDiff | None) -> list[Html]:
    """What the patch as source changes for a panel's group."""
    sites = [s.id for g in report.groups if g.name == panel.group for s in g.sites]
    hunks = source.serving(sites) if source and panel.group else []
    return [tag("details", [tag("summary", f"{panel.group} in the patched source"), as_html(hunks)], open=True)] if hunks else []


def omitted(report: Report, groups: Iterable[str]) -> Html:
    """Layers and entries without a figure, in words."""
    wanted = set(groups)
    notes = [
        tag("li", f"{o.group or 'all sites'}, {layer_words(o.layers)}: {o.differs}")
        for o in (report.drawing.omitted if report.drawing else ())
        if o.group in wanted
    ]
    if not notes:
        return Html("")
    return text([tag("p", "Not drawn, and how it differs from the first diagram of its name:"), tag("ul", notes, class_="small")])


def choose(panels: Iterable[Panel], group: str, layer: int | None) -> list[Panel]:
    """The panels of a group (of all groups where it is empty) that a layer looks like (of all kinds of layers where it is None)."""
    return [p for p in panels if (not group or p.group == group) and (layer is None or layer in p.layers)]


def site_evidence(report: Report) -> dict[str, str]:
    """What a site says when it is pointed at."""
    out = {}
    for g in report.groups:
        for s in g.sites:
            lines = [
                f"{s.id}: {action(s)}",
                f"{clean(s.producer.text or s.producer.module, 200)}  [{place(s.producer)}]",
                f"into {clean(s.consumer.text or s.consumer.module, 200)}  [{place(s.consumer)}]",
            ]
            lines += [
                f"engine: {clean(e.producer, 60)} → {clean(e.consumer, 60)} in {clean(e.kernel, 120)}"
                + (f" through {clean(', '.join(e.buffers), 80)}" if e.buffers else ", in registers")
                for e in s.evidence[:2]
            ]
            out[s.id] = "\n".join([*lines, f"{layer_words(s.layers)}; left out alone it changes {s.effect:.1%} of the elements behind it"])
    return out


def figure_id(report: Report, panel: Panel) -> str:
    """The id of a panel's first figure in the page."""
    panels = report.drawing.panels if report.drawing else ()
    return f"figure-{next((n for n, p in enumerate(panels) if p is panel), len(panels))}"


def _name(panel: Panel) -> str:
    return caption(panel) + (f" ({panel.differs})" if panel.differs else "")


def figures(report: Report, panel: Panel, evidence: dict[str, str]) -> list[Html]:
    """A panel's sheets.

    Raises:
        NoGraphvizError: no Graphviz works here.
    """
    first = figure_id(report, panel)
    return [_figure(s, first if n == 0 else f"{first}-{n + 1}", evidence) for n, s in enumerate(sheets(panel))]


def _figure(sheet: Sheet, ident: str, evidence: dict[str, str]) -> Html:
    try:
        svg = to_text(draw(sheet, prefix=ident, evidence=evidence))
    except NoGraphvizError:
        raise
    except DrawingError as e:
        words = f"{_name(sheet.panel)}: {subtitle(sheet)}. This diagram could not be drawn ({e.where or e.what}); "
        return tag("p", [words, tag("a", "the text form", href="#text"), " says the same."], class_="banner", id=ident)
    label = f"{_name(sheet.panel)}: {subtitle(sheet)}"
    opening = f'<svg tabindex="0" role="img" aria-label="{text(f"Diagram of {label}. The section As text says the same in words.")}" '
    return tag(
        "figure",
        [
            tag(
                "figcaption",
                [
                    tag("span", [tag("strong", _name(sheet.panel)), f": {subtitle(sheet)}"]),
                    tag("button", "Full size", type="button", class_="size"),
                ],
            ),
            tag("div", Html(svg.replace("<svg ", opening, 1)), class_="canvas"),
            tag(
                "div",
                "Point at anything, or focus the diagram and use the arrow keys: source line and evidence appear here.",
                class_="info",
                role="status",
                aria_live="polite",
            ),
        ],
        id=ident,
    )


def draw(
    sheet: Sheet, *, title: str = "", note: str = "", prefix: str = "g", evidence: dict[str, str] | None = None, legend: bool = False
) -> ET.Element:
    """A sheet as SVG, partners at the same height; without that where Graphviz cannot do it."""

    def made(aligned: bool) -> Sketch:
        return sketch(sheet, title=title, note=note, prefix=prefix, evidence=evidence, legend=legend, aligned=aligned)

    try:
        return draw_svg(made(True))
    except NoGraphvizError:
        raise
    except DrawingError:
        return draw_svg(made(False))


def pictures(report: Report, panel: Panel) -> list[str]:
    """A panel's sheets as SVG files of their own, with title and legend.

    Raises:
        NoGraphvizError: no Graphviz works here.
    """
    evidence = site_evidence(report)
    return [to_text(draw(s, title=caption(panel), note=subtitle(s), evidence=evidence, legend=True)) for s in sheets(panel)]


def sources(report: Report, panel: Panel) -> list[str]:
    """The same as Graphviz source."""
    evidence = site_evidence(report)
    return [sketch(s, title=caption(panel), note=subtitle(s), evidence=evidence).source for s in sheets(panel)]


def _legend() -> Html:
    def line(css: str, shape: str) -> Html:
        return Html(f'<svg width="46" height="14" viewBox="0 0 46 14" aria-hidden="true"><g class="flow {css}">{shape}</g></svg>')

    solid = line("rounded", '<polygon points="0,7 5,3 10,7 5,11"/><path fill="none" stroke-width="2" d="M10 7H46"/>')
    dashed = line("unrounded", '<path fill="none" stroke-width="2" stroke-dasharray="5 3" d="M0 7H46"/>')
    items = [
        [solid, "solid with a diamond: rounded there, read rounded"],
        [dashed, "dashed: not rounded, read in FP32"],
        [tag("span", "◆ BF16", class_="tag rounded"), " a site, on the side that rounds"],
        [tag("span", "FP32", class_="tag unrounded"), " the same site, on the side that does not"],
        ["solid bar: GEMM or attention, not compared inside"],
        ["tinted box: region"],
        ["frame: one fused kernel"],
        ["same height: same value"],
    ]
    return tag("ul", [tag("li", i) for i in items], class_="legend")
