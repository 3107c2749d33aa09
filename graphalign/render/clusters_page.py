"""`clusters.html`: one file that needs nothing else."""

from __future__ import annotations

import math

from graphalign.clusters.locations import KINDS
from graphalign.clusters.report import Clusters, Location
from graphalign.render.clusters_table import by_kind, label, legend, number, paper_range, spread
from graphalign.render.frame import document
from graphalign.render.markup import Html, table, tag
from graphalign.render.words import clean, layer_words, place, shorten

MORE_CSS = """
svg.hist rect{fill:var(--keep)}svg.hist line,svg.dots line{stroke:var(--line)}svg.hist line.even{stroke:var(--soft);stroke-dasharray:3 2}
svg.dots circle{fill:var(--keep)}svg.dots text{font-size:12px}svg.dots text.end{text-anchor:end}
svg.dots text.middle{text-anchor:middle;fill:var(--soft)}
svg.dots rect{fill:var(--mark)}svg{max-width:100%;height:auto}
"""
WIDTH, HEIGHT = 192, 44
"""Of a histogram."""
CLIP = 4.0
"""Multiple of the uniform height at which a histogram's bars are cut, so that exact values leave the rest visible."""
DOTS, MARGIN, ROW = 760, 130, 26
LOWEST = 1e-5


def render_clusters_page(clusters: Clusters) -> str:
    """The page."""
    name = clean(clusters.model.get("name") or clusters.model.get("architecture") or "model", 200)
    title = f"Where values fall between BF16 numbers: {name}"
    body = [
        tag("header", [tag("h1", title), tag("p", legend(clusters), class_="soft")]),
        tag("main", [_kinds(clusters), _locations(clusters), _others(clusters)]),
        tag("footer", "Made by graphalign. This file works offline."),
    ]
    return document(title, body, css=MORE_CSS)


def _kinds(clusters: Clusters) -> Html:
    rows = []
    for kind, found in by_kind(clusters.locations).items():
        scores = [x.corrected for x in found]
        cells = [
            tag("td", [kind, tag("div", KINDS.get(kind, ""), class_="soft small")]),
            tag("td", len(found), class_="n"),
            tag("td", f"{number(min(scores))} – {number(max(scores))}", class_="n"),
            tag("td", paper_range(kind), class_="n"),
        ]
        rows.append(tag("tr", cells))
    columns = [("kind of place", ""), ("places", "n"), ("score", "n"), ("in the paper (Qwen2, Qwen3)", "n")]
    note = "Every dot is one place, the median over its layers; a place with a score of 0 is at the left end. Shaded: the paper's ranges."
    return tag("section", [tag("h2", "By kind"), table(columns, rows), tag("p", note, class_="soft small"), _dots(clusters)])


def _dots(clusters: Clusters) -> Html:
    """Scores on a logarithmic axis, a line per kind."""
    kinds = by_kind(clusters.locations)
    height = ROW * len(kinds) + 30

    def x(score: float) -> str:
        share = (math.log10(max(score, LOWEST)) - math.log10(LOWEST)) / -math.log10(LOWEST)
        return f"{MARGIN + share * (DOTS - MARGIN - 20):.1f}"

    parts: list[Html] = []
    for low, high in ((1.5e-5, 8.0e-4), (0.038, 0.472)):
        parts.append(tag("rect", x=x(low), y="0", width=f"{float(x(high)) - float(x(low)):.1f}", height=str(height - 30)))
    for power in range(-5, 1):
        at = x(10.0**power)
        parts += [
            tag("line", x1=at, x2=at, y1="0", y2=str(height - 26)),
            tag("text", f"1e{power}", x=at, y=str(height - 8), class_="middle"),
        ]
    for row, (kind, found) in enumerate(kinds.items()):
        y = row * ROW + ROW // 2
        parts.append(tag("text", kind, x=str(MARGIN - 10), y=str(y + 4), class_="end"))
        for place_ in found:
            about = tag("title", f"{label(place_)}: {number(place_.corrected)}")
            parts.append(tag("circle", about, cx=x(place_.corrected), cy=str(y), r="4.5"))
    return tag("svg", parts, class_="dots", viewBox=f"0 0 {DOTS} {height}", width=str(DOTS), height=str(height), role="img",
               aria_label="Scores of all places by kind, on a logarithmic axis")  # fmt: skip


def _locations(clusters: Clusters) -> Html:
    numbers = ("score", "95 %", "floor", "exact", "ties", "zero", "values per layer", "rounds as the trainer's")
    columns = [("value", ""), ("position: 0 to 1", ""), *((title, "n") for title in numbers), ("sites", "")]
    rows = [_row(x) for x in clusters.locations]
    note = (
        f"Bars: share of values by position, the first around 0, cut at {CLIP:g} times the height of a uniform distribution (dashed); "
        "positions count from the neighbour towards −∞."
    )
    return tag("section", [tag("h2", "Every place where the trainer rounds"), tag("p", note, class_="soft small"), table(columns, rows)])


def _row(x: Location) -> Html:
    about = f"{x.kind}, {layer_words(x.layers)}"
    cells = [
        tag("td", [tag("code", label(x)), tag("div", [about, tag("br"), place(x.producer)], class_="soft small")]),
        tag("td", histogram(x)),
        *(tag("td", text, class_="n") for text in (
            number(x.corrected), spread(x), number(x.floor), f"{x.exact:.1%}", f"{x.ties:.1%}", f"{x.zeros:.1%}", f"{x.values:,}",
            f"{x.agreement:.2%}",
        )),
        tag("td", ", ".join(x.sites)),
    ]  # fmt: skip
    return tag("tr", cells)


def histogram(x: Location) -> Html:
    """Positions as bars."""
    counts, total = x.histogram, max(sum(x.histogram), 1)
    even = 1 / len(counts)
    width = WIDTH / len(counts)
    parts: list[Html] = []
    for i, n in enumerate(counts):
        tall = min(n / total / even / CLIP, 1.0) * HEIGHT
        if tall > 0:
            parts.append(tag("rect", x=f"{i * width:.2f}", y=f"{HEIGHT - tall:.2f}", width=f"{width * 0.9:.2f}", height=f"{tall:.2f}"))
    level = f"{HEIGHT - HEIGHT / CLIP:.2f}"
    parts.append(tag("line", x1="0", x2=str(WIDTH), y1=level, y2=level, class_="even"))
    parts.append(tag("line", x1="0", x2=str(WIDTH), y1=str(HEIGHT), y2=str(HEIGHT)))
    label_ = f"{max(counts) / total:.1%} of the values in the fullest of {len(counts)} bins"
    return tag("svg", [tag("title", label_), *parts], class_="hist", viewBox=f"0 0 {WIDTH} {HEIGHT}", width=str(WIDTH), height=str(HEIGHT),
               role="img", aria_label=label_)  # fmt: skip


def _others(clusters: Clusters) -> Html:
    parts: list[Html] = [tag("h2", "What is not in the table")]
    if clusters.exact:
        names = ", ".join(dict.fromkeys(shorten(e.text, 60) or e.op for e in clusters.exact))
        parts.append(tag("p", ["Their results are BF16 numbers always, rounding them changes nothing: ", tag("code", names)]))
    parts += [tag("p", [tag("code", op), f": not measured, {reason}"]) for op, reason in clusters.unmeasured.items()]
    parts += [tag("p", note) for note in clusters.notes]
    facts = {"weights": clusters.weights, "regime": str(clusters.regime), "versions": str(clusters.versions)}
    parts.append(tag("dl", [part for k, v in facts.items() for part in (tag("dt", k), tag("dd", v))]))
    return tag("section", parts)
