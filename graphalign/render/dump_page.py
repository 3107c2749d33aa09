"""`gap.html` of a dump: its report as one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graphalign.dumps.report import DumpReport, Part
from graphalign.gap.statistics import GapStatistics
from graphalign.render import gap_plots as plots
from graphalign.render.dumps_table import FORMULA, cells, finding_text, part_rows, sampling_text, summary_rows, units
from graphalign.render.frame import contents, document, navigation
from graphalign.render.gap_table import percent
from graphalign.render.markup import Html, table, tag, text

Lines = Sequence[tuple[str, list[NDArray[np.float64]]]]
"""Label and d per response."""


def render_dump_page(report: DumpReport, lines: Lines) -> str:
    """The page.

    Args:
        report: the result.
        lines: for the plots; empty if no gap is shown.
    """
    sections: list[tuple[str, str, Html]] = [("summary", "Summary", _summary(report))]
    if lines:
        sections.append(("plots", "Plots", _plots(report, lines)))
    for name, title, head, parts in (
        ("steps", "By training step", "step", report.by_step),
        ("positions", "By position in the response", "token", report.by_position),
        ("probabilities", "By the engine's probability", "probability", report.by_probability),
    ):
        if parts:
            sections.append((name, title, _parts(report, head, parts)))
    if report.scored:
        sections.append(("scored", "Stock and patched", _scored(report)))
    if report.logged:
        rows = [tag("tr", [tag("td", x.name), tag("td", f"{x.value:.6g}", class_="n"), tag("td", x.logged_as)]) for x in report.logged]
        sections.append(("logged", "As trainers log it", table([("figure", ""), ("value", "n"), ("logged as", "")], rows)))
    sections.append(("files", "Files and rows", _files(report)))
    title = "The gap between inference and training, from a dump"
    used, tokens = sum(f.used for f in report.files), sum(f.tokens for f in report.files)
    body = [
        tag("a", "Skip to the summary", href="#summary", class_="skip"),
        tag("header", [tag("h1", title), tag("p", f"{tokens} tokens that count in {used} of {report.rows} responses", class_="soft")]),
        navigation(sections),
        contents(sections),
        tag("footer", "Made by graphalign gap --dump. This file works offline."),
    ]
    return document(title, body, css="figure img{display:block;width:100%;height:auto}pre{white-space:pre-wrap}", images=True)


def _summary(r: DumpReport) -> Html:
    k, _ = units(r)
    parts: list[Html] = [tag("pre", finding_text(f), class_="banner") for f in r.findings]
    if rows := summary_rows(r):
        cards = [(k.estimate(g.k3), f"k3 between {name}, {k} nats, with its 95 % interval") for name, g in rows]
        if r.outside_clip is not None:
            cards.append((f"{r.outside_clip:.3%}", "of the tokens have a ratio p/q outside of 1 ± 0.2"))
        parts.append(tag("div", [tag("div", [tag("b", n), tag("span", t)], class_="card") for n, t in cards], class_="cards"))
        parts.append(_gaps("between", rows, r))
        parts.append(
            tag("p", f"{FORMULA}. k3 estimates the KL divergence from inference to training; mean d estimates the same with more noise.")
        )
    parts += [tag("p", n, class_="banner") for n in r.notes]
    return text(parts)


def _plots(r: DumpReport, lines: Lines) -> Html:
    return text([plots.histogram(lines, "Difference per token"), plots.by_position(lines, units(r)[0])])


def _parts(r: DumpReport, head: str, parts: Sequence[Part]) -> Html:
    return _gaps(head, part_rows(parts), r)


def _gaps(head: str, rows: Sequence[tuple[str, GapStatistics]], r: DumpReport) -> Html:
    k, d = units(r)
    names = ("tokens", f"k3 [{k}]", f"mean d [{d}]", f"mean |d| [{d}]", "max |d|, nats", "equal")
    lines = [
        tag("tr", [tag("td", name), *(tag("td", c, class_="n", data_label=n) for c, n in zip(cells(g, k, d), names, strict=True))])
        for name, g in rows
    ]
    return table([(head, ""), *((n, "n") for n in names)], lines, class_="cardtable")


def _scored(r: DumpReport) -> Html:
    k, d = units(r)
    names = ("edges", f"k3 [{k}]", "against stock", "against the dump's trainer", f"mean |d| [{d}]", "max |d|, nats", "equal")
    lines = []
    for s in r.scored:
        c = cells(s.gap, k, d)
        against = [percent(x.k3_relative) if x else "" for x in (s.against_stock, s.against_dump)]
        found = (str(s.edges or ""), c[1], *against, *c[3:])
        lines.append(tag("tr", [tag("td", s.title), *(tag("td", v, class_="n", data_label=n) for v, n in zip(found, names, strict=True))]))
    words = (
        "The dump's tokens, scored here; against the engine's log-probabilities in the dump. Comparisons use the same tokens on both sides."
    )
    parts = [tag("p", words), table([("trainer", ""), *((n, "n") for n in names)], lines, class_="cardtable")]
    if r.floor is not None:
        words = "The patched trainer against itself with one weight 1 ULP off, which is what any difference grows to"
        parts.append(tag("p", f"{words}: k3 {k.estimate(r.floor.k3)} · {k} nats."))
    if r.sampling is not None:
        parts.append(tag("p", sampling_text(r).capitalize() + "."))
    return text(parts)


def _files(r: DumpReport) -> Html:
    rows = [
        tag("tr", [tag("td", f.path), tag("td", f.title), *(tag("td", str(n), class_="n") for n in (f.used, f.rows, f.tokens))])
        for f in r.files
    ]
    parts = [table([("file", ""), ("format", ""), ("used", "n"), ("responses", "n"), ("tokens", "n")], rows)]
    if r.empty:
        parts.append(tag("p", f"{r.empty} responses have no token that counts."))
    for x in r.left_out:
        examples = [tag("li", e) for e in x.examples]
        parts += [tag("p", f"Left out: {x.rows} of {r.rows} responses: {x.fault}. {x.hint}"), tag("ul", examples)]
    return text(parts)
