"""Running Graphviz, and making its SVG safe to put into a page."""

from __future__ import annotations

import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import graphviz

from graphalign.errors import GraphalignError
from graphalign.render.diagram import Sketch

GET_GRAPHVIZ = "Graphviz's `dot` is not installed: apt-get install graphviz (Debian, Ubuntu), brew install graphviz (macOS), or https://graphviz.org/download"
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


class NoGraphvizError(GraphalignError):
    """`dot` is missing.

    Args:
        written: the files with Graphviz source that were written instead.
    """

    def __init__(self, *written: Path) -> None:
        hint = ""
        if written:
            more = f" ({len(written) - 1} more beside it)" if len(written) > 1 else ""
            first = f"dot -Tsvg {written[0]} -o {written[0].with_suffix('.svg')}"
            hint = f"{written[0]} was written instead{more}; with Graphviz: {first}"
        super().__init__(GET_GRAPHVIZ, hint=hint)


def has_dot() -> bool:
    """Whether Graphviz is installed."""
    return shutil.which("dot") is not None


def draw_svg(sketch: Sketch) -> ET.Element:
    """The diagram as an SVG tree that holds nothing but shapes and text.

    Raises:
        NoGraphvizError: `dot` is not installed.
        GraphalignError: `dot` failed.
    """
    try:
        raw = graphviz.pipe("dot", "svg", sketch.source.encode(), quiet=True)
    except graphviz.ExecutableNotFound:
        raise NoGraphvizError from None
    except subprocess.CalledProcessError as e:
        raise GraphalignError(
            "Graphviz could not draw the diagram",
            where=(e.stderr or b"").decode(errors="replace")[:400],
            hint="write a .dot file and look at it",
        ) from None
    root = ET.fromstring(raw)
    return _clean(root, sketch)


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
