"""`report.html`: one file that needs nothing else, for a reviewer.

Everything from a capture goes through `markup.text`; there is no inline handler, and the page's policy allows only its own script.
"""

from __future__ import annotations

import base64
import hashlib
import xml.etree.ElementTree as ET
from pathlib import Path

from graphalign.errors import GraphalignError
from graphalign.render.diagram import Sketch, caption, sketch
from graphalign.render.dot import GET_GRAPHVIZ, NoGraphvizError, draw_svg, to_text
from graphalign.render.markup import Content, Html, table, tag, text
from graphalign.render.page_sites import details_section, sites_section
from graphalign.render.textdiff import BUCKETS, TITLES, render_text
from graphalign.render.words import action, clean, headline, layer_words, place
from graphalign.sites.drawing import Panel
from graphalign.sites.report import Entry, Report
from graphalign.sites.table import ranges

HERE = Path(__file__).parent


def render_page(report: Report, *, group: str = "", layer: int | None = None) -> str:
    """The page.

    Args:
        report: the result.
        group: draw only this group.
        layer: draw only the panels that this layer looks like.
    """
    css, script = (HERE / "page.css").read_text(), (HERE / "page.js").read_text()
    policy = (
        f"default-src 'none'; style-src 'sha256-{_hash(css)}'; script-src 'sha256-{_hash(script)}'; base-uri 'none'; form-action 'none'"
    )
    sections = [
        ("summary", "Summary", _summary(report)),
        ("table", "Sites", sites_section(report)),
        ("diagrams", "Diagrams", _diagrams(report, group, layer)),
        ("source", "Source of both sides", details_section(report)),
        ("others", "What is no site", _others(report)),
        ("assumptions", "Assumptions and versions", _assumptions(report)),
        ("text", "As text", _as_text(report)),
    ]
    links = [tag("li", tag("a", title, href=f"#{name}")) for name, title, _ in sections]
    title = f"Where rounding moved: {report.model.get('name') or report.model.get('architecture') or 'model'}"
    head = [
        Html('<meta charset="utf-8">'),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(css)),
    ]
    body = [
        tag("a", "Skip to the sites", href="#table", class_="skip"),
        tag("header", [tag("h1", title), tag("p", headline(report), class_="soft")]),
        tag("nav", tag("ul", links), aria_label="Sections"),
        tag(
            "main",
            [
                tag("section", [tag("h2", name_of, id=f"h-{ident}"), content], id=ident, aria_labelledby=f"h-{ident}")
                for ident, name_of, content in sections
            ],
        ),
        tag("footer", "Made by graphalign from captures of both sides. This file works offline."),
        tag("script", Html(script)),
    ]
    return f'<!doctype html>\n<html lang="en">\n{tag("head", head)}\n{tag("body", body)}\n</html>\n'


def _hash(code: str) -> str:
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


# -- summary ----------------------------------------------------------------------------------------------------------------


def _summary(report: Report) -> Html:
    s = report.stats
    check = s.get("check") or {}
    sites = sum(len(g.sites) for g in report.groups)
    parts: list[Content] = []
    if report.semantic:
        parts.append(
            _banner(
                "bad",
                f"The two sides compute different functions in {len(report.semantic)} place(s). "
                "No patch of roundings makes them agree; see ",
                "others",
                "semantic divergence",
            )
        )
    if report.simulated:
        parts.append(
            tag(
                "p", "The engine's side was simulated without its device and was not compared with one from a real device.", class_="banner"
            )
        )
    kinds = {g.kind for g in report.groups}
    story = {"keep": "the trainer rounds and the engine keeps FP32", "round": "the engine rounds and the trainer keeps FP32"}
    if report.groups:
        what = (
            story.get(next(iter(kinds)), "one side rounds and the other does not")
            if len(kinds) == 1
            else "one side rounds and the other does not"
        )
        parts.append(
            tag(
                "p",
                f"In {sites} places of the model's source ({report.sites} edges over all layers) {what}. "
                "Rounding where the engine rounds makes them agree.",
            )
        )
    cards = [
        (report.sites, f"edges in {sites} sites, {len(report.groups)} groups"),
        (f"{s.get('training_paired', '?')}/{s.get('training_ops', '?')}", "training ops found in the engine"),
        (s.get("anchors", "?"), "GEMMs and attentions matched"),
    ]
    if check.get("operands"):
        cards += [
            (f"{check['equal_stock']:.1%}", "of anchor operands' elements equal, as the trainer stands"),
            (f"{check['equal_with_sites']:.3%}", f"with these sites applied (lowest operand {check['lowest_with_sites']:.2%})"),
        ]
    parts.append(tag("div", [tag("div", [tag("b", str(n)), tag("span", t)], class_="card") for n, t in cards], class_="cards"))
    rows = [
        tag(
            "tr",
            [
                tag("td", tag("strong", g.name)),
                tag("td", action(g.sites[0]) if g.kind != "mixed" else "both directions", data_label="what"),
                tag("td", ranges(g.layers) or "outside", data_label="layers"),
                tag("td", len(g.sites), class_="n", data_label="sites"),
                tag("td", sum(x.count for x in g.sites), class_="n", data_label="edges"),
                tag("td", ", ".join(dict.fromkeys(place(x.consumer) for x in g.sites)), data_label="where"),
            ],
        )
        for g in report.groups
    ]
    if rows:
        parts.append(
            table(
                [("group", ""), ("what moves", ""), ("layers", ""), ("sites", "n"), ("edges", "n"), ("where", "")], rows, class_="cardtable"
            )
        )
    return text([text(p) for p in parts])


def _banner(kind: str, words: str, link: str, label: str) -> Html:
    return tag("p", [words, tag("a", label, href=f"#{link}"), "."], class_=f"banner {kind}")


# -- diagrams ---------------------------------------------------------------------------------------------------------------


def _diagrams(report: Report, group: str, layer: int | None) -> Html:
    drawing = report.drawing
    if drawing is None or not drawing.panels:
        return tag("p", "This sites file holds no diagram data." if drawing is None else "There is nothing to draw.")
    evidence = site_evidence(report)
    parts: list[Content] = [_legend()]
    try:
        for n, panel in enumerate(choose(drawing.panels, group, layer)):
            parts.append(_figure(panel, n, evidence, opened=not panel.differs and panel.layer is not None))
    except NoGraphvizError:
        return text(
            [
                tag("p", GET_GRAPHVIZ, class_="banner"),
                tag("p", ["Without it there are no diagrams; ", tag("a", "the text form", href="#text"), " says the same."]),
            ]
        )
    notes = [
        tag("li", f"{o.group or 'all sites'}, {layer_words(o.layers)}: {o.differs}")
        for o in drawing.omitted
        if not group or o.group == group
    ]
    if notes:
        parts += [
            tag("p", "Layers that are not drawn, and how they differ from the group's first diagram:"),
            tag("ul", notes, class_="small"),
        ]
    return text([text(p) for p in parts])


def choose(panels: tuple[Panel, ...], group: str, layer: int | None) -> list[Panel]:
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


def _figure(panel: Panel, n: int, evidence: dict[str, str], opened: bool) -> Html:
    drawn = draw(panel, prefix=f"d{n}", evidence=evidence)
    svg = to_text(drawn)
    label = caption(panel) + (f" ({panel.differs})" if panel.differs else "")
    opening = f'<svg tabindex="0" role="img" aria-label="{text(f"Diagram of {label}. The section As text says the same in words.")}" '
    figure = tag(
        "figure",
        [
            tag("figcaption", [tag("span", [tag("strong", label)]), tag("button", "Full size", type="button", class_="size")]),
            tag(
                "div",
                Html(svg.replace("<svg ", opening, 1)),
                class_="canvas",
            ),
            tag(
                "div",
                "Point at anything, or focus the diagram and use the arrow keys: source line and evidence appear here.",
                class_="info",
                role="status",
                aria_live="polite",
            ),
        ],
    )
    return figure if opened else tag("details", [tag("summary", f"Another kind: {label}"), figure])


def draw(panel: Panel, *, title: str = "", prefix: str = "g", evidence: dict[str, str] | None = None, legend: bool = False) -> ET.Element:
    """A panel as SVG, partners at the same height; without that where Graphviz cannot do it."""

    def made(aligned: bool) -> Sketch:
        return sketch(panel, title=title, prefix=prefix, evidence=evidence, legend=legend, aligned=aligned)

    try:
        return draw_svg(made(True))
    except NoGraphvizError:
        raise
    except GraphalignError:
        return draw_svg(made(False))


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


# -- the rest ---------------------------------------------------------------------------------------------------------------


def _others(report: Report) -> Html:
    parts: list[Content] = []
    for bucket in (*BUCKETS, "interior", "tail"):
        entries: tuple[Entry, ...] = getattr(report, bucket)
        name, _, meaning = TITLES[bucket].partition(": ")
        count = sum(e.count for e in entries)
        if not entries:
            continue
        rows = [
            tag(
                "tr",
                [
                    tag("td", e.side, class_="nb", data_label="side"),
                    tag("td", tag("code", e.what), data_label="what"),
                    tag("td", ranges(e.layers) or "–", data_label="layers"),
                    tag("td", e.count, class_="n", data_label="count"),
                    tag("td", [e.reason, tag("div", e.where, class_="small soft")], data_label="reason"),
                ],
            )
            for e in entries
        ]
        body = table([("side", ""), ("what", ""), ("layers", ""), ("count", "n"), ("reason, and where", "")], rows, class_="cardtable")
        parts.append(tag("details", [tag("summary", [tag("strong", f"{name} ({count})"), f": {meaning}"]), body], open=bucket in BUCKETS))
    empty = [TITLES[b].partition(":")[0] for b in BUCKETS if not getattr(report, b)]
    if empty:
        parts.append(tag("p", f"None: {', '.join(empty)}.", class_="soft"))
    return text([text(p) for p in parts])


def _assumptions(report: Report) -> Html:
    s = report.stats
    assumed = [
        "The result belongs to this target and this regime; another GPU, instruction set, parallel size, compile range or parameter format "
        "can round in other places.",
        "The inside of GEMMs, attention and other opaque ops is not compared, only their operands and parameters; their order of summation "
        "stays different.",
        "Values were joined in FP64 by magnitude to 2⁻⁴⁰ and checked with other inputs; "
        f"{s.get('chance_match_rate', 0):.2%} of unrelated values matched something by chance.",
        f"Of {s.get('edges', '?')} training edges {s.get('agree', '?')} round alike on both sides.",
    ]
    groups = [
        ("versions", report.versions),
        ("target", report.target),
        ("regime", report.regime),
        ("compile settings", report.compile),
        ("model", {k: v for k, v in report.model.items() if k != "sources"}),
    ]
    tables = [
        tag(
            "details",
            [
                tag("summary", tag("strong", name)),
                tag("dl", [x for k, v in values.items() for x in (tag("dt", str(k)), tag("dd", _plain(v)))]),
            ],
            open=name in ("versions", "target", "regime"),
        )
        for name, values in groups
        if values
    ]
    notes = [tag("li", n) for n in report.notes]
    return text([tag("ul", [*(tag("li", a) for a in assumed), *notes]), *tables])


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={_plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(v) for v in value) or "none"
    return clean(value, 1000)


def _as_text(report: Report) -> Html:
    return tag("details", [tag("summary", "The same in a form like that of a unified diff"), tag("pre", render_text(report), tabindex="0")])
