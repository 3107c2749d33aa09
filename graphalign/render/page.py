"""`report.html`: one file that needs nothing else, for a reviewer.

Everything from a capture goes through `markup.text`; there is no inline handler, and the page's policy allows only its own script.
"""

from __future__ import annotations

from pathlib import Path

from graphalign.align.shared import SHARED
from graphalign.ir.drawing import Panel
from graphalign.ir.paths import ranges
from graphalign.render.dot import can_draw
from graphalign.render.frame import contents, document, navigation
from graphalign.render.markup import Content, Html, table, tag, text
from graphalign.render.page_diagrams import choose, diagrams_section, figure_id, figures, omitted, site_evidence
from graphalign.render.page_sites import details_section, sites_section
from graphalign.render.patch_source import SourceDiff, as_html
from graphalign.render.textdiff import BUCKETS, TITLES, render_text
from graphalign.render.words import action, backend, clean, headline, place
from graphalign.sites.report import Entry, Report

SCRIPT = Path(__file__).with_name("page.js")


def render_page(report: Report, *, group: str = "", layer: int | None = None, source: SourceDiff | None = None) -> str:
    """The page.

    Args:
        report: the result.
        group: draw only this group.
        layer: draw only the panels that this layer looks like.
        source: the patch as source, shown beside the diagrams and the sites.
    """
    sections = [
        ("summary", "Summary", _summary(report)),
        ("table", "Sites", sites_section(report)),
        ("diagrams", "Diagrams", diagrams_section(report, group, layer, source)),
        ("source", "Source of both sides", details_section(report, source)),
        *([("patch", f"The patch as source: {source.name}", as_html(source.hunks))] if source else []),
        ("others", "What is no site", _others(report, group, layer)),
        ("assumptions", "Assumptions and versions", _assumptions(report)),
        ("text", "As text", _as_text(report)),
    ]
    title = f"Where rounding moved: {report.model.get('name') or report.model.get('architecture') or 'model'}"
    body = [
        tag("a", "Skip to the sites", href="#table", class_="skip"),
        tag("header", [tag("h1", title), tag("p", headline(report), class_="soft")]),
        navigation(sections),
        contents(sections),
        tag("footer", "Made by graphalign from captures of both sides. This file works offline."),
    ]
    return document(title, body, script=SCRIPT.read_text())


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
                f"The two sides compute different functions in {_plural(len(report.semantic), 'place')}. "
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
    if words := backend(report):
        parts.append(tag("p", words, class_="banner"))
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
                f"In {_plural(sites, 'place')} of the model's source ({_plural(report.sites, 'edge')} over all layers) {what}. "
                + (
                    "Rounding where the engine rounds removes these differences, not the entries under What is no site."
                    if any(getattr(report, b) for b in BUCKETS)
                    else "Rounding where the engine rounds makes them agree."
                ),
            )
        )
    cards = [
        (report.sites, f"edges in {sites} sites, {len(report.groups)} groups"),
        (f"{s.get('training_paired', '?')}/{s.get('training_ops', '?')}", "training ops found in the engine"),
        (s.get("anchors", "?"), "GEMMs and attentions matched" + (f", {report.assumptions}" if report.assumptions else "")),
    ]
    if check.get("operands"):
        assumed = check.get("assumed_tables") or 0
        tables = f", and {_plural(assumed, 'read')} of an unpatchable table taken as unrounded" if assumed else ""
        cards += [
            (f"{check['equal_stock']:.1%}", "of anchor operands' elements equal, as the trainer stands"),
            (
                f"{check['equal_with_sites']:.3%}",
                f"with these sites applied{tables} (lowest operand {check['lowest_with_sites']:.2%})"
                + (f"; {report.assumptions} equal inside" if report.assumptions else ""),
            ),
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


def _plural(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def _banner(kind: str, words: str, link: str, label: str) -> Html:
    return tag("p", [words, tag("a", label, href=f"#{link}"), "."], class_=f"banner {kind}")


# -- the rest ---------------------------------------------------------------------------------------------------------------


def _others(report: Report, group: str, layer: int | None) -> Html:
    parts: list[Content] = []
    drawn = choose((p for p in report.drawing.panels if p.entry), "", layer) if report.drawing else []
    for bucket in (*BUCKETS, "assumed", "unexercised", "interior", "tail"):
        entries: tuple[Entry, ...] = getattr(report, bucket)
        name, _, meaning = TITLES[bucket].partition(": ")
        if not entries:
            continue
        panels = [p for p in drawn if p.entry == bucket]
        rows = [_entry_row(report, e, next((p for p in panels if set(p.names) & set(e.names)), None)) for e in entries]
        head = [("side", ""), ("what", ""), ("layers", ""), ("count", "n"), ("reason, and where", "")]
        body: list[Content] = [table(head, rows, class_="cardtable"), *_entry_figures(report, panels)]
        count = sum(e.count for e in entries)
        opened = bucket in (*BUCKETS, "assumed", "unexercised") and group in ("", bucket)
        parts.append(tag("details", [tag("summary", [tag("strong", f"{name} ({count})"), f": {meaning}"]), *map(text, body)], open=opened))
    empty = [TITLES[b].partition(":")[0] for b in BUCKETS if not getattr(report, b)]
    if empty:
        parts.append(tag("p", f"None: {', '.join(empty)}.", class_="soft"))
    return text([text(p) for p in parts])


def _entry_row(report: Report, e: Entry, panel: Panel | None) -> Html:
    link = [" ", tag("a", "diagram", href=f"#{figure_id(report, panel)}")] if panel is not None and can_draw() else None
    return tag(
        "tr",
        [
            tag("td", e.side, class_="nb", data_label="side"),
            tag("td", tag("code", e.what), data_label="what"),
            tag("td", ranges(e.layers) or "–", data_label="layers"),
            tag("td", e.count, class_="n", data_label="count"),
            tag("td", [e.reason, text(link), tag("div", e.where, class_="small soft")], data_label="reason"),
        ],
    )


def _entry_figures(report: Report, panels: list[Panel]) -> list[Html]:
    if not panels or not can_draw():
        return []
    evidence = site_evidence(report)
    return [*(f for p in panels for f in figures(report, p, evidence)), omitted(report, [p.group for p in panels])]


def _assumptions(report: Report) -> Html:
    s = report.stats
    assumed = [
        "The result belongs to this target and this regime; another GPU, instruction set, parallel size, compile range or parameter format "
        "can round in other places.",
        "The inside of GEMMs, attention and other opaque ops is not compared, only their operands and parameters; their order of summation "
        "stays different.",
        "Values were joined in FP64 by magnitude to 2⁻⁴⁰ and checked with other inputs; "
        f"{s.get('chance_match_rate', 0):.2%} of unrelated values matched something by chance.",
        SHARED,
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
