"""The result of `graphalign clusters` as a table, most clustered first."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphalign.clusters.report import PAPER, Clusters, Location
from graphalign.ir.paths import ranges
from graphalign.render.words import shorten

WIDTH = 40


def label(x: Location) -> str:
    """A location in few words: its source if that is short, else the op and its module."""
    end = x.producer
    text = " ".join(end.text.split())
    module = end.module.rpartition(".")[2] or end.module
    if x.kind in ("projection", "attention"):
        return module
    if 0 < len(text) <= WIDTH and x.kind not in ("normalised", "norm output"):
        return text
    return f"{end.op.removeprefix('aten.').partition('.')[0]} in {module}"


def number(x: float) -> str:
    """A score: `0.375`, `3.2e-4`."""
    return f"{x:.3f}" if x >= 0.01 or x == 0 else f"{x:.1e}".replace("e-0", "e-")


def spread(x: Location) -> str:
    """The interval of the corrected score."""
    return "" if x.interval is None else f"{number(x.interval[0])} – {number(x.interval[1])}"


def by_kind(locations: Iterable[Location]) -> dict[str, list[Location]]:
    """Locations by kind, the kind with the highest median score first."""
    out: dict[str, list[Location]] = {}
    for x in locations:
        out.setdefault(x.kind, []).append(x)
    return dict(sorted(out.items(), key=lambda item: -max(x.corrected for x in item[1])))


def paper_range(kind: str) -> str:
    """What the paper measured for this kind, if it did."""
    return f"{PAPER[kind][0]:.2g} – {PAPER[kind][1]:.2g}" if kind in PAPER else ""


def render_clusters(clusters: Clusters, console: Console) -> None:
    """Print kinds, locations, and what could not be measured."""
    kinds = Table(title="How unevenly values fall between adjacent BF16 numbers", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    kinds.add_column("kind of place", no_wrap=True)
    for title in ("places", "lowest score", "highest score", "in the paper (Qwen2, Qwen3)"):
        kinds.add_column(title, justify="right", no_wrap=True)
    for kind, found in by_kind(clusters.locations).items():
        scores = [x.corrected for x in found]
        kinds.add_row(kind, str(len(found)), number(min(scores)), number(max(scores)), paper_range(kind))
    console.print(kinds)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("value, rounded to BF16 by the trainer", overflow="fold")
    table.add_column("kind", no_wrap=True)
    table.add_column("layers", no_wrap=True)
    for title in ("score", "95 % interval", "floor", "exact"):
        table.add_column(title, justify="right", no_wrap=True)
    given = any(x.sites for x in clusters.locations)
    if given:
        table.add_column("site of", overflow="fold")
    for x in clusters.locations:
        row: list[str | Text] = [
            Text(label(x)),
            x.kind,
            ranges(x.layers) or "outside",
            number(x.corrected),
            spread(x),
            number(x.floor),
            f"{x.exact:.1%}",
        ]
        if given:
            row.append(Text(", ".join(dict.fromkeys(site.rpartition(".")[0] for site in x.sites))))
        table.add_row(*row)
    console.print(table)
    console.print(Text(legend(clusters), style="dim"))
    for op, reason in clusters.unmeasured.items():
        console.print(Text(f"not measured: {shorten(op, 60)}: {reason}", style="yellow"))
    for note in clusters.notes:
        console.print(Text(f"note: {note}", style="dim"))


def legend(clusters: Clusters) -> str:
    """What the columns mean, and what was run."""
    intervals = "" if any(x.interval for x in clusters.locations) else " No interval: it takes four sequences or more."
    return (
        f"score: 0 if positions are uniform, 1 if all are alike; median over layers, without the floor, which is what "
        f"{sum(clusters.sequences)} tokens of a uniform distribution would score. exact: share of values that are BF16 numbers "
        f"already.{intervals} "
        f"Text: {clusters.prompts}, {len(clusters.sequences)} sequences of {clusters.sequences[0]} tokens."
    )
