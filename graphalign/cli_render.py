"""The command that draws: `graphalign render`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphalign import console
from graphalign.cli import app
from graphalign.errors import BadInputError

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
    group: Annotated[str, typer.Option(metavar="GROUP", help="Only this group of sites, `rope`.")] = "",
    layer: Annotated[int | None, typer.Option(min=0, metavar="N", help="The kind of layer that layer N is.")] = None,
) -> None:
    """Show where rounding moved: as text, as a diagram, or as a report for a reviewer.

    Examples:

      graphalign render out/qwen3/sites.json

      graphalign render out/qwen3/sites.json -o rope.svg --group rope

      graphalign render out/qwen3/sites.json -o report.html
    """
    from graphalign.ir.files import read_json, write_bytes
    from graphalign.render.textdiff import render_text
    from graphalign.sites.report import Report

    form = output.suffix.lower() if output else ".txt"
    if form not in FORMS:
        raise BadInputError(f"cannot tell from {output} what to render", where="--output", hint=f"end it in one of {', '.join(FORMS)}")
    if output is not None:
        console.require_output(output)
    report = read_json(sites, Report, kind="sites file")
    _check_group(report, group)
    if output is None:
        sys.stdout.write(render_text(report, group=group, layer=layer))
    elif form == ".txt":
        write_bytes(output, render_text(report, group=group, layer=layer).encode())
    elif form == ".html":
        from graphalign.render.page import render_page

        write_bytes(output, render_page(report, group=group, layer=layer).encode())
    else:
        _draw(report, _panel(report, group, layer), output)
    if output is not None:
        print(output)


def write_report(report: Report, path: Path) -> None:
    """`report.html`, for `find --report`."""
    from graphalign.ir.files import write_bytes
    from graphalign.render.page import render_page

    write_bytes(path, render_page(report).encode())


def _check_group(report: Report, group: str) -> None:
    names = [g.name for g in report.groups]
    if group and group not in names:
        raise BadInputError(
            f"there is no group {group!r}", where="--group", hint=f"one of {', '.join(names) or 'none: there are no sites'}"
        )


def _panel(report: Report, group: str, layer: int | None) -> Panel:
    if report.drawing is None:
        raise BadInputError("the sites file holds no diagram data", hint="make it anew: graphalign diff INF TRAIN -o sites.json")
    panels = [p for p in report.drawing.panels if p.group == group and (layer is None or layer in p.layers)]
    if not panels:
        omitted = next((o for o in report.drawing.omitted if o.group == group and layer in o.layers), None)
        what = f"layer {layer} is not drawn: {omitted.differs}" if omitted else "nothing to draw: there is no site there"
        drawn = sorted({n for p in report.drawing.panels if p.group == group for n in p.layers})
        raise BadInputError(what, where="--layer" if layer is not None else "", hint=f"layers with a diagram: {drawn}" if drawn else "")
    return panels[0]


def _draw(report: Report, panel: Panel, output: Path) -> None:
    from graphalign.ir.files import write_bytes
    from graphalign.render.diagram import caption, sketch
    from graphalign.render.dot import NoGraphvizError, to_text
    from graphalign.render.page import draw, site_evidence

    evidence, title = site_evidence(report), caption(panel)
    source = sketch(panel, title=title, evidence=evidence).source.encode()
    if output.suffix.lower() == ".dot":
        write_bytes(output, source)
        return
    try:
        write_bytes(output, to_text(draw(panel, title=title, evidence=evidence, legend=True)).encode())
    except NoGraphvizError as e:
        dot = output.with_suffix(".dot")
        write_bytes(dot, source)
        raise NoGraphvizError(dot) from e
