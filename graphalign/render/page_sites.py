"""The page's table of sites, and for every site the source of both sides."""

from __future__ import annotations

from collections.abc import Iterable

from graphalign.ir.drawing import Excerpt
from graphalign.ir.paths import ranges
from graphalign.render.excerpt import Line, Sources
from graphalign.render.markup import Content, Html, anchor, table, tag, text
from graphalign.render.patch_source import SourceDiff
from graphalign.render.words import clean, expression, formats, kernel_name, place
from graphalign.sites.report import End, Report, Site


def rounding_tag(roundings: tuple[str, ...]) -> Html:
    """BF16 on a filled ground, FP32 in a dashed frame: as in the diagrams."""
    return tag("span", ("◆ " if roundings else "") + formats(roundings), class_=f"tag {'rounded' if roundings else 'unrounded'}")


def sites_section(report: Report) -> Html:
    """Search, filters, table."""
    sites = [(g.name, s) for g in report.groups for s in g.sites]
    if not sites:
        return tag("p", "No site: wherever both sides could be compared, they round alike.")
    layers = sorted({n for _, s in sites for n in s.layers})
    outside = [tag("option", "outside the layers", value="outside")] if any(not s.layers for _, s in sites) else []
    tools = tag(
        "div",
        [
            tag(
                "label",
                [
                    "Search (press /)",
                    tag("input", id="search", type="search", placeholder="module, expression, file:line, kernel …", autocomplete="off"),
                ],
                class_="wide",
            ),
            tag(
                "label",
                [
                    "Group",
                    tag(
                        "select",
                        [tag("option", "all", value=""), *(tag("option", g.name, value=g.name) for g in report.groups)],
                        id="group",
                    ),
                ],
            ),
            tag(
                "label",
                [
                    "Layer",
                    tag("select", [tag("option", "all", value=""), *(tag("option", n, value=n) for n in layers), *outside], id="layer"),
                ],
            ),
            tag("button", "Reset", type="button", id="reset"),
        ],
        class_="tools",
        role="search",
    )
    head = [
        ("site", ""),
        ("value", ""),
        ("into", ""),
        ("trainer", ""),
        ("engine", ""),
        ("layers", ""),
        ("edges", "n"),
        ("effect", "n"),
        ("where", ""),
    ]
    rows = [_row(group, s) for group, s in sites]
    return text(
        [
            tools,
            tag("p", "", id="count", class_="small soft", role="status", aria_live="polite"),
            table(head, rows, id="sites", class_="cardtable"),
        ]
    )


def _row(group: str, s: Site) -> Html:
    kernel = s.evidence[0].kernel if s.evidence else ""
    return tag(
        "tr",
        [
            tag("td", tag("a", s.id, href=f"#{anchor(s.id)}"), class_="id"),
            tag("td", [tag("code", expression(s.producer, 90)), tag("div", _module(s.producer), class_="small soft")], data_label="value"),
            tag("td", [tag("code", expression(s.consumer, 90)), tag("div", _module(s.consumer), class_="small soft")], data_label="into"),
            tag("td", rounding_tag(s.training), data_label="trainer"),
            tag("td", rounding_tag(s.inference), data_label="engine"),
            tag("td", ranges(s.layers) or "outside", class_="nb", data_label="layers"),
            tag("td", s.count, class_="n", data_label="edges"),
            tag("td", f"{s.effect:.1%}", class_="n", data_label="effect"),
            tag(
                "td",
                [tag("div", place(s.consumer), class_="small nb"), tag("div", kernel_name(kernel, 26), class_="small soft", title=kernel)],
                data_label="where",
            ),
        ],
        data_group=group,
        data_layers=" ".join(map(str, s.layers)),
    )


def _module(end: End) -> str:
    return clean(end.module, 200).removeprefix("model.layers.*.")


def details_section(report: Report, source: SourceDiff | None = None) -> Html:
    """One article per site: source lines left, kernel lines right."""
    sources = Sources(report.model.get("sources"))
    excerpts = {e.site: e for e in report.drawing.excerpts} if report.drawing else {}
    parts: list[Html] = []
    for group in report.groups:
        articles = [_article(s, sources, excerpts.get(s.id), source) for s in group.sites]
        title = f"{group.name}: {len(group.sites)} site{'s' if len(group.sites) != 1 else ''}"
        parts.append(tag("details", [tag("summary", tag("strong", title)), *articles]))
    return text(parts)


def _article(s: Site, sources: Sources, excerpt: Excerpt | None, source: SourceDiff | None = None) -> Html:
    layers = ranges(s.layers)
    header = tag(
        "header",
        [
            tag("h3", s.id),
            tag("span", f"layers {layers}" if layers else "outside the layers", class_="small soft"),
            tag(
                "span",
                f"{s.count} edges; left out alone it changes {s.effect:.1%} of the elements of "
                f"{', '.join(s.reaches[:4]) or 'what is behind it'}",
                class_="small soft",
            ),
        ],
    )
    left = tag(
        "div",
        [
            tag("h4", ["Training", rounding_tag(s.training)]),
            tag("div", ["The value, in ", tag("code", s.producer.module)], class_="small soft"),
            _source(s.producer, sources),
            tag("div", ["is read here, in ", tag("code", s.consumer.module)], class_="small soft"),
            _source(s.consumer, sources),
        ],
    )
    served = source.lines(s.id) if source else []
    patched = tag("div", [tag("h4", "Patched"), tag("pre", "\n".join(served), tabindex="0")]) if served else None
    return tag("article", [header, tag("div", [left, _engine(s, excerpt)], class_="sides"), patched], id=anchor(s.id))


def _source(end: End, sources: Sources) -> Html:
    lines = sources.around(end)
    if not lines:
        return tag("p", f"{end.op} {end.module}: not computed in the forward, so it has no source line", class_="small")
    note = "" if sources.installed(end) else " (the expression as captured: the file is not installed here, or is another version)"
    return text(
        [
            tag("div", [f"{end.file}:{end.line} ", tag("span", note, class_="soft")], class_="small"),
            tag("pre", _numbered(lines), tabindex="0"),
        ]
    )


def _numbered(lines: Iterable[Line]) -> Content:
    out: list[Html] = []
    for line in lines:
        a, b = line.marked or (0, 0)
        body = [line.text[:a], tag("mark", line.text[a:b]), line.text[b:]] if b > a else [line.text]
        out.append(text([tag("i", f"{line.number:>5}  "), *body, Html("\n")]))
    return out


def _engine(s: Site, excerpt: Excerpt | None) -> Html:
    parts: list[Content] = [tag("h4", ["Inference", rounding_tag(s.inference)])]
    if excerpt:
        where = "" if excerpt.layer is None else f" (layer {excerpt.layer})"
        parts += [
            tag("div", ["Kernel", where, ": ", tag("code", excerpt.kernel)], class_="small soft"),
            tag("pre", "\n".join(clean(x, 300) for x in excerpt.lines), tabindex="0"),
        ]
        if excerpt.source:
            parts += [
                tag("div", "from the engine's source", class_="small soft"),
                tag("pre", "\n".join(clean(x, 300) for x in excerpt.source), tabindex="0"),
            ]
    rows = [
        tag(
            "li",
            [
                tag("code", f"{e.producer} → {e.consumer}"),
                f" through {', '.join(e.buffers)}" if e.buffers else ", in registers",
                "" if e.layer is None else f", layer {e.layer}",
                tag("div", e.kernel, class_="soft"),
            ],
        )
        for e in s.evidence
    ]
    if rows:
        parts.append(
            tag(
                "details",
                [
                    tag("summary", f"evidence: {len(rows)} kernel pattern{'s' if len(rows) > 1 else ''}", class_="small"),
                    tag("ul", rows, class_="small"),
                ],
            )
        )
    else:
        parts.append(tag("p", "No path of its own: there is no rounding between the joined values around it.", class_="small"))
    return tag("div", [text(p) for p in parts])
