"""Graphviz from pip: the program that the wheel `graphviz-pure` installs, for machines without `dot`.

The wheel holds a port of Graphviz 16 as one program and no Python (0.2.2). It reads no fonts: it knows the widths of a few of them by name,
takes a list of names for an unknown font as narrow as Times, and counts a character outside ASCII as a space per byte.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

from graphalign.render.diagram import FONT

NAME = "graphviz-pure"
WIDEST = "DejaVu Sans"
"""Boxes are made for this font: wider than Helvetica and Arial, and what a Linux browser takes where it has neither."""
_FONT = re.compile(rf'\bfontname="{re.escape(FONT)}"')


@functools.cache
def program() -> str | None:
    """The wheel's program in this environment, whether PATH names its folder or not; None if it is not installed."""
    try:
        files = importlib.metadata.files(NAME) or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    found = [Path(str(f.locate())).resolve() for f in files if f.stem == NAME and f.suffix in ("", ".exe")]
    return next((str(p) for p in found if p.is_file()), None) or shutil.which(NAME)


def prepare(source: str) -> str:
    """The same graph, its boxes as wide as the widest font needs. Quotes inside labels are escaped, so that no label is changed."""
    return _FONT.sub(f'fontname="{WIDEST}"', source)


def restore(svg: ET.Element) -> ET.Element:
    """The diagram in the fonts that it was made for."""
    for element in svg.iter():
        if element.get("font-family", "").startswith(WIDEST):
            element.set("font-family", FONT)
    return svg
