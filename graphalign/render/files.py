"""Pictures and pages as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphalign.errors import BadInputError, GraphalignError

if TYPE_CHECKING:
    from graphalign.ir.drawing import Panel
    from graphalign.sites.report import Report


def write_report(report: Report, path: Path) -> str:
    """`report.html`. Drawing never decides a result: whatever goes wrong becomes words.

    Returns:
        Why there is no page, or no diagrams in it; empty if all went well.
    """
    from graphalign.ir.files import write_bytes
    from graphalign.render.dot import why_not
    from graphalign.render.page import render_page

    try:
        write_bytes(path, render_page(report).encode())
    except Exception as e:
        why = e.what if isinstance(e, GraphalignError) else f"{type(e).__name__}: {e}".splitlines()[0]
        return f"{path} was not written: {why}"
    return f"{path} has no diagrams: {why}" if (why := why_not()) else ""


def panels_of(report: Report, group: str, layer: int | None) -> list[Panel]:
    """Of sites, the kind of layer that most layers are or that `layer` is; of entries, all."""
    if report.drawing is None:
        raise BadInputError("the sites file holds no diagram data", hint="make it anew: graphalign diff INF TRAIN -o sites.json")
    named = [p for p in report.drawing.panels if p.group == group]
    panels = [p for p in named if layer is None or layer in p.layers]
    if not panels:
        omitted = next((o for o in report.drawing.omitted if o.group == group and layer in o.layers), None)
        nothing = (
            "nothing to draw: there is no site there" if not named and not group else f"there is no diagram of {group or 'sites'} there"
        )
        what = f"layer {layer} is not drawn: {omitted.differs}" if omitted else nothing
        drawn = sorted({n for p in named for n in p.layers})
        raise BadInputError(what, where="--layer" if layer is not None else "", hint=f"layers with a diagram: {drawn}" if drawn else "")
    return panels if panels[0].entry else panels[:1]


def write_diagrams(report: Report, panels: list[Panel], output: Path) -> list[Path]:
    """Write a file per sheet; its name tells its number from the second on."""
    from graphalign.ir.files import write_bytes
    from graphalign.render.dot import NoGraphvizError
    from graphalign.render.page_diagrams import pictures, sources

    def write(texts: list[str], suffix: str) -> list[Path]:
        files = [output.with_name(f"{output.stem}{f'-{n}' if n > 1 else ''}{suffix}") for n in range(1, len(texts) + 1)]
        for file, text in zip(files, texts, strict=True):
            write_bytes(file, text.encode())
        return files

    if output.suffix.lower() == ".dot":
        return write([x for p in panels for x in sources(report, p)], output.suffix)
    try:
        return write([x for p in panels for x in pictures(report, p)], output.suffix)
    except NoGraphvizError as e:
        raise NoGraphvizError(*write([x for p in panels for x in sources(report, p)], ".dot"), why=e.why) from e
