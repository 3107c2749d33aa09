"""What a diagram shows, as it is kept in `sites.json`: a few ops per group and kind of layer, never the whole graph."""

from __future__ import annotations

from typing import Literal

from graphalign.ir.inference import Frozen


class Vertex(Frozen):
    """Something drawn: an op, several equal ops, a chain of ops that no site touches, or what an edge comes from."""

    id: str
    """Unique in its panel: `t3` (training), `i7` (inference)."""
    kind: Literal["op", "steps", "sum", "gemm", "attention", "anchor", "parameter", "table", "input"]
    """`steps`: ops without a site, drawn as one; `sum`: a residual sum; `anchor`: any other op whose inside is not compared."""
    label: str
    """Source expression, or name."""
    op: str = ""
    """What it computes: `mul`, `pow → mean → add → rsqrt`."""
    module: str = ""
    place: str = ""
    """Source file and line."""
    source: str = ""
    """The source line's text."""
    box: int | None = None
    """Index into the panel's boxes: its region."""
    kernel: str = ""
    """The generated kernel that runs it (inference)."""
    launch: int = 0
    """Which launch of that kernel, numbered through the engine's graph."""
    count: int = 1
    """Copies that the engine computes."""
    names: tuple[str, ...] = ()
    """Nodes as `graphalign why` takes them, at most eight."""
    partners: tuple[str, ...] = ()
    """Vertices of the other side that hold the same value."""


class Arrow(Frozen):
    """An edge that is drawn."""

    tail: str
    head: str
    roundings: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    """Sites that this edge is, or that it is the other side's evidence for."""
    verdict: str = ""
    """What is wrong with it if it is no site: `conflicting`, `undetermined`, `unpatchable`, `unplaced`, `semantic`."""
    via: tuple[str, ...] = ()
    """Buffers passed through (inference)."""


class Panel(Frozen):
    """One diagram: the sites of a group, or of all groups, in one layer that stands for all layers of its kind."""

    group: str
    """Empty: all groups. The kind of entry if it shows what is no site."""
    entry: Literal["", "conflicting", "undetermined", "unpatchable", "semantic"] = ""
    """What it shows instead of sites: edges with this verdict."""
    reason: str = ""
    """Why they are no sites."""
    names: tuple[str, ...] = ()
    """The training nodes that the entry is about, as in the report's entries."""
    layer: int | None
    """The layer drawn; None outside the layers (the final norm)."""
    layers: tuple[int, ...]
    """Layers that look like it, itself included."""
    boxes: tuple[str, ...]
    """Titles of the regions: modules, without the layer."""
    vertices: tuple[Vertex, ...]
    arrows: tuple[Arrow, ...]
    differs: str = ""
    """How it differs from the group's first panel, in words."""


class Excerpt(Frozen):
    """The kernel's lines behind one site: loop IR, one op per line, and the engine's source lines they come from."""

    site: str
    layer: int | None
    kernel: str
    lines: tuple[str, ...]
    source: tuple[str, ...] = ()


class Omitted(Frozen):
    """Layers of a kind that is not drawn."""

    group: str
    layers: tuple[int, ...]
    differs: str


class Drawing(Frozen):
    """The optional section `drawing` of `sites.json`."""

    panels: tuple[Panel, ...] = ()
    """Per group, most frequent kind of layer first; then those of all groups together; then those of entries that are no sites."""
    excerpts: tuple[Excerpt, ...] = ()
    omitted: tuple[Omitted, ...] = ()
