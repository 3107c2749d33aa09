"""Running Graphviz, the machine's `dot` or the wheel's program, and making its SVG safe to put into a page."""

from __future__ import annotations

import functools
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from graphalign.errors import GraphalignError
from graphalign.render import wheel
from graphalign.render.diagram import Sketch

GET_GRAPHVIZ = (
    "no Graphviz is installed: pip install graphviz-pure, or its `dot`: apt-get install graphviz (Debian, Ubuntu), "
    "brew install graphviz (macOS), https://graphviz.org/download"
)
SVG = "http://www.w3.org/2000/svg"
TAGS = {"svg", "g", "path", "polygon", "polyline", "ellipse", "text", "title"}
ATTRIBUTES = {
    "id",
    "class",
    "d",
    "points",
    "cx",
    "cy",
    "rx",
    "ry",
    "x",
    "y",
    "fill",
    "stroke",
    "stroke-width",
    "stroke-dasharray",
    "fill-opacity",
    "stroke-opacity",
    "text-anchor",
    "font-family",
    "font-size",
    "font-weight",
    "font-style",
    "transform",
    "viewBox",
    "width",
    "height",
}


SECONDS = 30.0
"""Longest that one diagram may take; the largest take two."""


class DrawingError(GraphalignError):
    """A diagram could not be drawn."""


class NoGraphvizError(DrawingError):
    """Every Graphviz here is broken or hangs, or there is none: nothing can be drawn.

    Args:
        written: the files with Graphviz source that were written instead.
        why: what is wrong with what is installed; empty if nothing is.
    """

    def __init__(self, *written: Path, why: str = "") -> None:
        self.why = why
        hint = ""
        if written:
            more = f" ({len(written) - 1} more beside it)" if len(written) > 1 else ""
            first = f"dot -Tsvg {written[0]} -o {written[0].with_suffix('.svg')}"
            hint = f"{written[0]} was written instead{more}; with Graphviz: {first}"
        super().__init__(f"Graphviz does not work here: {why}" if why else GET_GRAPHVIZ, hint=hint)


def programs() -> tuple[str, ...]:
    """What is installed, the machine's own `dot` first: it measures text in the machine's fonts."""
    return tuple(dict.fromkeys(p for p in (shutil.which("dot"), wheel.program()) if p is not None))


def can_draw() -> bool:
    """Whether a Graphviz is installed and draws."""
    return any(not _broken(p) for p in programs())


def why_not() -> str:
    """Why none of the installed programs draws; empty if one does, or if there is none."""
    found = programs()
    return "" if not found or can_draw() else NoGraphvizError(why=_broken(found[0])).what


@functools.cache
def _broken(path: str) -> str:
    """Why a program cannot draw the smallest of graphs; empty if it can. A half-installed `dot` (`dot -c` never ran) cannot."""
    try:
        _run(path, "digraph {a -> b}")
    except NoGraphvizError as e:
        return e.why
    except DrawingError as e:
        return e.where or e.what
    return ""


_HUNG: set[str] = set()
"""Programs that took longer than `SECONDS` once: not asked again by this process."""


def _run(path: str, source: str) -> ET.Element:
    """What a program makes of a graph.

    Raises:
        NoGraphvizError: it cannot be started, or hangs.
        DrawingError: it failed on this graph.
    """
    slow = f"{path} took longer than {SECONDS:g} s"
    if path in _HUNG:
        raise NoGraphvizError(why=slow)
    try:
        done = subprocess.run([path, "-Tsvg"], input=source.encode(), capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        _HUNG.add(path)
        raise NoGraphvizError(why=slow) from None
    except OSError as e:
        raise NoGraphvizError(why=f"{path} cannot be run: {e.strerror or e}") from None
    said = done.stderr.decode(errors="replace").strip()[:400]
    try:
        if done.returncode == 0:
            return ET.fromstring(done.stdout)
    except ET.ParseError:
        said = said or "what it printed is no SVG"
    how = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    raise DrawingError("Graphviz could not draw the diagram", where=said or how, hint="write a .dot file and look at it")


def draw_svg(sketch: Sketch) -> ET.Element:
    """The diagram as an SVG tree that holds nothing but shapes and text, by the first program that draws it.

    Raises:
        NoGraphvizError: nothing is installed, or nothing that is draws at all.
        DrawingError: the programs that work failed on this diagram.
    """
    failed: list[DrawingError] = []
    for path in programs():
        try:
            return _clean(_drawn(path, sketch.source), sketch)
        except DrawingError as e:
            why = "" if isinstance(e, NoGraphvizError) else _broken(path)
            failed.append(NoGraphvizError(why=why) if why else e)
    raise next((e for e in failed if not isinstance(e, NoGraphvizError)), failed[0] if failed else NoGraphvizError())


def _drawn(path: str, source: str) -> ET.Element:
    return wheel.restore(_run(path, wheel.prepare(source))) if path == wheel.program() else _run(path, source)


def _clean(root: ET.Element, sketch: Sketch) -> ET.Element:
    """Keep shapes and text; hover texts become `<title>`, partners `data-partners`."""
    out = _copy(root)
    for g in out.iter(f"{{{SVG}}}g"):
        ident = g.get("id", "")
        for title in g.findall(f"{{{SVG}}}title"):
            g.remove(title)
        if ident in sketch.hover:
            title = ET.Element(f"{{{SVG}}}title")
            title.text = sketch.hover[ident]
            g.insert(0, title)
            g.set("data-partners", " ".join(sketch.partners.get(ident, ())))
        elif g.get("class", "").startswith(("node", "edge", "cluster", "graph")) and ident:
            del g.attrib["id"]
    return out


def _copy(element: ET.Element) -> ET.Element:
    tag = element.tag.rpartition("}")[2]
    out = ET.Element(f"{{{SVG}}}{tag}", {k: v for k, v in element.attrib.items() if k in ATTRIBUTES})
    out.text, out.tail = element.text, element.tail
    for child in _unwrapped(element):
        if child.tag.rpartition("}")[2] in TAGS:
            out.append(_copy(child))
    return out


def _unwrapped(element: ET.Element) -> Iterator[ET.Element]:
    """Children; Graphviz wraps what has a tooltip in `<g id="a_…"><a>`, and a node's group shall hold its shapes itself."""
    for child in element:
        if isinstance(child.tag, str):
            name = child.tag.rpartition("}")[2]
            if name == "a" or (name == "g" and child.get("id", "").startswith("a_")):
                yield from _unwrapped(child)
            else:
                yield child


def to_text(svg: ET.Element) -> str:
    """The tree as text, without a prefix on every tag."""
    ET.register_namespace("", SVG)
    return ET.tostring(svg, encoding="unicode")
