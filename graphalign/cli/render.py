"""The command that draws: `graphalign render`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphalign import console
from graphalign.cli.app import Source, app
from graphalign.errors import BadInputError

if TYPE_CHECKING:
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
        from graphalign.render.files import panels_of, write_diagrams

        for written in write_diagrams(report, panels_of(report, group, layer), output):
            print(written)
        return
    if output is not None:
        print(output)


def _check_group(report: Report, group: str) -> None:
    from graphalign.render.textdiff import BUCKETS

    names = [*(g.name for g in report.groups), *(b for b in (*BUCKETS, "assumed", "unexercised") if getattr(report, b))]
    if group and group not in names:
        raise BadInputError(
            f"there is no group {group!r}", where="--group", hint=f"one of {', '.join(names) or 'none: there are no sites'}"
        )
