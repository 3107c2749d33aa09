"""A sheet as Graphviz source: training left, inference right, what holds the same value at the same height.

A rounded edge is solid and starts with a diamond, an unrounded one is dashed; the colours say it again (Okabe and Ito's palette).
A site is a labelled stop on its edge: filled where the value is rounded, hollow where it is not.
"""

from __future__ import annotations

import html
from collections import defaultdict
from dataclasses import dataclass, field

import graphviz

from graphalign.ir.drawing import Arrow, Vertex
from graphalign.render.labels import SOURCES, kernels_label, lines, sites_label, vertex_hover, wrap
from graphalign.render.sheets import BARS, STEPS, Sheet, own
from graphalign.render.words import clean, formats, shorten

ROUNDED, UNROUNDED, ODD = "#c2410c", "#0369a1", "#a16207"
"""Vermillion, blue, and mustard for what is no site but not in order either; dark enough for white text and for thin lines."""
INK, SOFT, BAR = "#1f2933", "#5b6875", "#3b4754"
FONT = "Helvetica,Arial,sans-serif"
LARGE, SMALL = 10.5, 9
"""Points. Text at A4 is judged by the smaller one."""
LONG = 20
"""Characters in a stop; more are put on two lines."""
_BREAK = "<BR ALIGN='LEFT'/>"
LEGEND = "".join(
    "     ".join(f"<FONT POINT-SIZE='{SMALL}' COLOR='{color}'>{words}</FONT>" for color, words in row) + _BREAK
    for row in (
        (
            (ROUNDED, "◆━━ rounded where it starts"),
            (UNROUNDED, "╍╍╍ not rounded: read in FP32"),
            (SOFT, "named stop: a site, filled where rounded"),
        ),
        ((SOFT, "solid bar: not compared inside"), (SOFT, "tinted box: region"), (SOFT, "frame: one kernel"), (SOFT, "level: same value")),
    )
)
SIDES = {"t": "training: eager Transformers", "i": "inference: vLLM's compiled engine"}


@dataclass
class Sketch:
    """Graphviz source, and what each of its parts says when it is pointed at."""

    source: str
    hover: dict[str, str] = field(default_factory=dict)
    """Id in the SVG to the text."""
    partners: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Id in the SVG to the ids that hold the same value."""


def sketch(
    sheet: Sheet,
    *,
    title: str = "",
    note: str = "",
    prefix: str = "g",
    evidence: dict[str, str] | None = None,
    legend: bool = True,
    aligned: bool = True,
) -> Sketch:
    """Draw a sheet.

    Args:
        sheet: what to draw.
        title: a line above it.
        note: another one, smaller.
        prefix: begins every id, so that several diagrams fit on one page.
        evidence: site to what it says when it is pointed at.
        legend: explain the lines below it.
        aligned: put partners at the same height.
    """
    return _Sketcher(sheet, prefix, evidence or {}).run(title, note, legend, aligned)


class _Sketcher:
    def __init__(self, sheet: Sheet, prefix: str, evidence: dict[str, str]) -> None:
        self.sheet, self.prefix, self.evidence = sheet, prefix, evidence
        panel = self.panel = sheet.panel
        self.out = Sketch("")
        self.by_id = {v.id: v for v in panel.vertices}
        self.rows: dict[str, list[str]] = defaultdict(list)
        self.placed: set[str] = set()

    def run(self, title: str, note: str, legend: bool, aligned: bool) -> Sketch:
        g = graphviz.Digraph(
            "graphalign",
            graph_attr={
                "rankdir": "TB",
                "newrank": "true",
                "fontname": FONT,
                "fontsize": "13",
                "fontcolor": INK,
                "ranksep": "0.25",
                "nodesep": "0.16",
                "labelloc": "t",
                "labeljust": "l",
                "pad": "0.2",
                "bgcolor": "#ffffff" if legend else "transparent",
                "compound": "true",
                "tooltip": " ",
            },
            node_attr={"fontname": FONT, "fontsize": str(LARGE), "fontcolor": INK, "color": SOFT, "margin": "0.09,0.05", "height": "0.3"},
            edge_attr={"fontname": FONT, "fontsize": str(SMALL), "arrowsize": "0.6"},
        )
        heading = f"<FONT POINT-SIZE='14'><B>{_text(title)}</B></FONT>{_BREAK}" if title else ""
        heading += "".join(f"<FONT POINT-SIZE='{LARGE}'>{_text(line)}</FONT>{_BREAK}" for line in wrap(note, 110, 4) if line)
        g.attr(label=f"<{heading}{LEGEND if legend else ''}>" if heading or legend else "")
        drawn = self._pills()
        for side in "ti":
            with g.subgraph(name=f"cluster_{side}") as c:
                c.attr(
                    label=f"<<B>{SIDES[side]}</B>>",
                    style="rounded",
                    color="#94a3b8",
                    bgcolor="transparent",
                    margin="10",
                    fontsize="12",
                    tooltip=" ",
                    **{"class": "side"},
                )
                c.node(f"head_{side}", label="", shape="point", width="0.01", style="invis")
                self._side(c, side, drawn)
        g.edge("head_t", "head_i", style="invis", constraint="false")
        self._edges(g, drawn)
        with g.subgraph() as row:
            row.attr(rank="same")
            row.node("head_t")
            row.node("head_i")
        if aligned:
            self._align(g, drawn)
        self.out.source = g.source
        return self.out

    # -- vertices ---------------------------------------------------------------------------------------------------------

    def _side(self, g: graphviz.Digraph, side: str, drawn: list[tuple[str, Arrow]]) -> None:
        """Bars and borders directly; kernels as frames, in them regions as boxes."""
        frames: dict[tuple[int, str], dict[int | None, list[Vertex]]] = defaultdict(lambda: defaultdict(list))
        for v in self.panel.vertices:
            if v.id[0] == side:
                at = self._home(v)
                frames[at.launch if at.kernel else 0, at.kernel][at.box].append(v)
        for n, ((_, kernel), boxes) in enumerate(frames.items()):
            if not kernel:
                self._boxes(g, f"{side}{n}", boxes, drawn)
                continue
            with g.subgraph(name=f"cluster_{side}{n}") as frame:
                frame.attr(
                    label=f"<<FONT POINT-SIZE='{SMALL}'>{_text(self._kernels(boxes, kernel))}</FONT>>",
                    style="solid",
                    color=SOFT,
                    penwidth="1.6",
                    bgcolor="transparent",
                    margin="9",
                    labelloc="b",
                    labeljust="r",
                    fontcolor=SOFT,
                    tooltip=_plain(kernel),
                    **{"class": "kernel"},
                )
                self._boxes(frame, f"kernel_{side}{n}", boxes, drawn)

    def _kernels(self, boxes: dict[int | None, list[Vertex]], kernel: str) -> str:
        return kernels_label([kernel, *(x.kernel for vs in boxes.values() for v in vs for x in self.sheet.all(v) if x.kernel)])

    def _home(self, v: Vertex) -> Vertex:
        """Whose frame and box a vertex is drawn in: a parameter or a table stands beside its readers if they are in one."""
        readers = [self.by_id[a.head] for a in self.panel.arrows if a.tail == v.id] if v.kind in SOURCES else []
        return readers[0] if readers and len({(x.launch, x.kernel, x.box) for x in readers}) == 1 else v

    def _boxes(self, g: graphviz.Digraph, name: str, boxes: dict[int | None, list[Vertex]], drawn: list[tuple[str, Arrow]]) -> None:
        here = {v.id for vertices in boxes.values() for v in vertices}
        split = {v.id: box for box, vertices in boxes.items() for v in vertices}
        for pill, a in drawn:
            if "kernel" in name and a.tail in here and a.head in here and (split[a.tail] != split[a.head] or split[a.tail] is None):
                self._pill(g, pill, a)
                self.placed.add(pill)
        for box, vertices in boxes.items():
            if box is None:
                for v in vertices:
                    self._vertex(g, v)
                continue
            with g.subgraph(name=f"cluster_{name}_{box}") as c:
                names = self.sheet.regions if len({v.box for v in self.panel.vertices} - {None}) == 1 else ()
                title = shorten(" / ".join(names or (self.panel.boxes[box],)), 40)
                c.attr(
                    label=f"<<FONT POINT-SIZE='{SMALL}'>region {_text(title)}</FONT>>",
                    style="rounded,filled",
                    color="#cbd5e1",
                    fillcolor="#f4f6f8",
                    margin="9",
                    labelloc="t",
                    labeljust="l",
                    fontcolor=SOFT,
                    tooltip=_plain(self.panel.boxes[box]),
                    **{"class": "region"},
                )
                inside = {v.id for v in vertices}
                for v in vertices:
                    self._vertex(c, v)
                for pill, a in drawn:
                    if a.tail in inside and a.head in inside and pill not in self.placed:
                        self._pill(c, pill, a)
                        self.placed.add(pill)

    def _vertex(self, g: graphviz.Digraph, v: Vertex) -> None:
        attributes: dict[str, str] = {"shape": "box", "style": "rounded,filled", "fillcolor": "#ffffff"}
        if v.kind in BARS:
            attributes = {
                "shape": "box",
                "style": "filled",
                "fillcolor": BAR,
                "color": BAR,
                "fontcolor": "#ffffff",
                "width": "1.4",
                "height": "0.26",
            }
        elif v.kind in SOURCES:
            attributes = {"shape": "box", "style": "filled", "fillcolor": "#e8edf2", "color": "#e8edf2", "height": "0.22"}
        elif v.kind == "steps":
            attributes |= {"style": "rounded,dashed,filled"}
        elif v.kind == "sum":
            attributes |= {"peripheries": "2", "style": "filled"}
        ident = f"{self.prefix}_{v.id}"
        self.out.hover[ident] = vertex_hover(self.sheet, v)
        self.out.partners[ident] = tuple(f"{self.prefix}_{p}" for p in v.partners)
        g.node(
            v.id, label=self._label(v), id=ident, tooltip=_plain(vertex_hover(self.sheet, v)), **{"class": f"vertex {v.kind}"}, **attributes
        )

    def _label(self, v: Vertex) -> str:
        body, small = lines(self.sheet, v)
        size = SMALL if v.kind in SOURCES else LARGE
        text = "<BR/>".join(_text(x) for x in body)
        below = f"<BR/><FONT POINT-SIZE='{SMALL}' COLOR='{SOFT}'>{_text(small)}</FONT>" if small else ""
        return f"<<FONT POINT-SIZE='{size}'>{text}</FONT>{below}>"

    # -- edges ------------------------------------------------------------------------------------------------------------

    def _pills(self) -> list[tuple[str, Arrow]]:
        return [(f"p{n}", a) for n, a in enumerate(self.panel.arrows) if a.sites or a.verdict]

    def _own(self, a: Arrow) -> bool:
        return own(self.panel, a)

    def _pill(self, g: graphviz.Digraph, name: str, a: Arrow) -> None:
        color = (ROUNDED if a.roundings else UNROUNDED) if a.sites else ODD
        what = sites_label(a.sites) if a.sites else a.verdict
        filled = bool(a.roundings) and self._own(a)
        state = f"{'◆ ' if a.roundings else ''}{_text(formats(a.roundings))}"
        between = "<BR/>" if len(what) + len(formats(a.roundings)) > LONG else "&#160;&#160; "
        label = f"<<B>{_text(what)}</B>{between}{state}>"
        if not self._own(a):
            label = f"<<FONT POINT-SIZE='{SMALL}'>{_text(what)}{between}{_text(formats(a.roundings))}</FONT>>"
        ident = f"{self.prefix}_{name}"
        self.out.hover[ident] = "\n\n".join(self.evidence.get(s, s) for s in a.sites) or self._edge_hover(a)
        g.node(
            name,
            label=label,
            id=ident,
            shape="box",
            style="filled" + ("" if a.roundings else ",dashed") + ",rounded",
            color=color,
            penwidth="1.8" if self._own(a) else "1",
            fillcolor=color if filled else "#ffffff",
            fontcolor="#ffffff" if filled else color,
            height="0.24",
            margin="0.08,0.04",
            fontsize="10",
            tooltip=_plain(self.out.hover[ident]),
            **{
                "class": f"pill {'own' if self._own(a) else 'other'} {'rounded' if a.roundings else 'unrounded'} "
                + ("" if a.sites else "odd ")
                + " ".join(_class(s) for s in a.sites)
            },
        )
        for s in a.sites or (a.verdict,):
            self.rows[s].append(name)

    def _edges(self, g: graphviz.Digraph, drawn: list[tuple[str, Arrow]]) -> None:
        pills = {id(a): p for p, a in drawn}
        for n, a in enumerate(self.panel.arrows):
            rounded = bool(a.roundings)
            name = f"{self.prefix}_e{n}"
            self.out.hover[name] = self._edge_hover(a)
            common = {"tooltip": _plain(self._edge_hover(a))}
            line = {"color": ROUNDED, "style": "solid"} if rounded else {"color": UNROUNDED, "style": "dashed"}
            kind = "rounded" if rounded else "unrounded"
            if id(a) not in pills:
                tail = {"dir": "both", "arrowtail": "diamond"} if rounded else {}
                g.edge(a.tail, a.head, id=name, penwidth="1.1", **common, **line, **tail, **{"class": f"flow {kind}"})
                continue
            pill, heavy = pills[id(a)], "2.6" if self._own(a) else "1.3"
            if pill not in self.placed:
                with g.subgraph(name=f"cluster_{a.tail[0]}") as c:
                    self._pill(c, pill, a)
            self.out.hover[name + "b"] = self.out.hover[name]
            g.edge(
                a.tail,
                pill,
                id=name,
                color=UNROUNDED,
                style="dashed",
                penwidth=heavy,
                arrowhead="none",
                **common,
                **{"class": "flow unrounded"},
            )
            g.edge(pill, a.head, id=name + "b", penwidth=heavy, **common, **line, **{"class": f"flow {kind}"})

    def _edge_hover(self, a: Arrow) -> str:
        ends = [self.by_id[x] for x in (a.tail, a.head)]
        names = " → ".join(shorten(v.label or v.op, 50) for v in ends)
        state = f"rounded to {formats(a.roundings)}" if a.roundings else "not rounded (FP32)"
        why = f": {clean(self.panel.reason, 300)}" if self.panel.reason and a.verdict == self.panel.entry else ""
        through = f", through {', '.join(clean(b, 60) for b in a.via)}" if a.via else ""
        return (
            f"{names}\n{state}{through}"
            + (f"\n{a.verdict}{why}" if a.verdict else "")
            + (f"\nsite {', '.join(a.sites)}" if a.sites else "")
        )

    def _align(self, g: graphviz.Digraph, drawn: list[tuple[str, Arrow]]) -> None:
        heads = {a.head for a in self.panel.arrows}
        loose = {a.tail for a in self.panel.arrows if self.by_id[a.head].kind not in STEPS}
        for side in "ti":  # what a region reads stands above it, not beside it
            mine = [v for v in self.panel.vertices if v.id[0] == side]
            above = [v.id for v in mine if v.kind in (*BARS, "sum") and v.id not in heads | loose]
            _same(g, [x for x in above if self.by_id[x].kind in BARS])
            above += [pill for pill, a in drawn if a.tail in above]
            for v in mine:
                if v.kind in SOURCES and self._home(v) is not v:
                    for x in above:
                        g.edge(x, v.id, style="invis", weight="0")
            last = {a.tail for a in self.panel.arrows if a.head[0] == side and self.by_id[a.head].kind in BARS}
            pills = {id(a): pill for pill, a in drawn}
            for a in self.panel.arrows:  # and a sum that it also feeds below it
                if a.head[0] == side and self.by_id[a.head].kind == "sum" and self.by_id[a.tail].kind in STEPS and a.tail not in last:
                    for x in last:
                        g.edge(x, pills.get(id(a), a.head), style="invis", weight="0")
        for v in self.panel.vertices:
            if v.id[0] == "t" and v.kind not in SOURCES and v.partners:
                first = next((p for p in v.partners if p in self.by_id), None)
                if first and next((p for p in self.by_id[first].partners), None) == v.id:
                    _same(g, [v.id, first])
        for names in self.rows.values():
            sides = {self._pill_side(p): p for p in reversed(names)}
            if len(sides) == 2:
                _same(g, list(sides.values()))

    def _pill_side(self, pill: str) -> str:
        return self.panel.arrows[int(pill[1:])].tail[0]


def _same(g: graphviz.Digraph, names: list[str]) -> None:
    with g.subgraph() as row:
        row.attr(rank="same")
        for n in names:
            row.node(n)


def _text(text: str) -> str:
    """Escaped for an HTML-like label."""
    return html.escape(clean(text), quote=True).replace("\\", "&#92;")


def _plain(text: str) -> str:
    """Escaped for any other attribute."""
    return str(graphviz.escape(clean(text)))


def _class(site: str) -> str:
    return "site-" + "".join(c if c.isalnum() else "-" for c in site)
