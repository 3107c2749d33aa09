"""The command that draws: `graphalign render`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphalign import console
from graphalign.cli.app import Source, app
from graphalign.errors import BadInputError, GraphalignError

if TYPE_CHECKING:
    from graphalign.sites.drawing import Panel
    from graphalign.sites.report import Report

FORMS = (".svg", ".dot", ".html", ".txt")


@app.command()
def render(
    sites: Annotated[Path, typer.Argument(metavar="SITES", help="A sites file, from `find` or `diff`.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="diff.svg, diff.dot, report.html or diff.txt; without it, text is printed."),
    ] = None,
    group: Annotated[
        str,
        typer.Option(
            metavar="GROUP", help="Only this group of sites, `rope`, or one kind of what is no site: `conflicting`, `semantic`, …"
        ),
    ] = "",
    layer: Annotated[int | None, typer.Option(min=0, metavar="N", help="The kind of layer that layer N is.")] = None,
    source: Source = None,
) -> None:
    """Show where rounding moved: as text, as a diagram, or as a report for a reviewer.

    Examples:

      graphalign render out/qwen3/sites.json

      graphalign render out/qwen3/sites.json -o rope.svg --group rope

      graphalign render out/qwen3/sites.json -o unsure.svg --group conflicting

      graphalign render out/qwen3/sites.json -o report.html

    What does not fit on a page is drawn as several: rope.svg, rope-2.svg, … Regions that look alike are drawn once.
    """
    from graphalign.ir.files import read_json, write_bytes
    from graphalign.render.patch_source import read_source, source_beside
    from graphalign.render.textdiff import render_text
    from graphalign.sites.report import Report

    form = output.suffix.lower() if output else ".txt"
    if form not in FORMS:
        raise BadInputError(f"cannot tell from {output} what to render", where="--output", hint=f"end it in one of {', '.join(FORMS)}")
    if output is not None:
        console.require_output(output)
    report = read_json(sites, Report, kind="sites file")
    patched = read_source(source) if source else source_beside(sites)
    _check_group(report, group)
    if output is None:
        sys.stdout.write(render_text(report, group=group, layer=layer, source=patched))
    elif form == ".txt":
        write_bytes(output, render_text(report, group=group, layer=layer, source=patched).encode())
    elif form == ".html":
        from graphalign.render.page import render_page

        write_bytes(output, render_page(report, group=group, layer=layer, source=patched).encode())
    else:
        for written in _draw(report, _panels(report, group, layer), output):
            print(written)
        return
    if output is not None:
        print(output)


def write_report(report: Report, path: Path) -> str:
    """`report.html`, for `find --report`. Drawing never decides a result: whatever goes wrong becomes words.

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


def _check_group(report: Report, group: str) -> None:
    from graphalign.render.textdiff import BUCKETS

    names = [*(g.name for g in report.groups), *(b for b in (*BUCKETS, "assumed", "unexercised") if getattr(report, b))]
    if group and group not in names:
        raise BadInputError(
            f"there is no group {group!r}", where="--group", hint=f"one of {', '.join(names) or 'none: there are no sites'}"
        )


def _panels(report: Report, group: str, layer: int | None) -> list[Panel]:
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


def _draw(report: Report, panels: list[Panel], output: Path) -> list[Path]:
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
