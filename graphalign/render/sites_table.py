"""The result as a table that a person can act on."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphalign.evaluate.parts import step_words
from graphalign.ir.paths import ranges
from graphalign.sites.report import End, Entry, Report, Site

LONGEST = 36
"""Longest source expression shown in the table, in characters."""


MOST = 0.9
"""Share of the trainer's ops below which a result is said to be incomplete."""


def render_table(report: Report, console: Console) -> None:
    """Print groups and sites, then what is not a site, then what to do next."""
    for said in report.uncompared:
        console.print(Text(f"not compared: {said}", style="bold yellow"))
    table = Table(title="Where BF16 rounding moved", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("group: value → reader", overflow="fold")
    table.add_column("layers", no_wrap=True)
    table.add_column("edges", justify="right", no_wrap=True)
    table.add_column("reader's source", overflow="fold")
    scored = any(s.clustering is not None for g in report.groups for s in g.sites)
    if scored:
        table.add_column("clustering", justify="right", no_wrap=True)
    for group in report.groups:
        kinds = " and ".join(dict.fromkeys(_kind(s) for s in group.sites))
        edges = sum(s.count for s in group.sites)
        table.add_row(Text(f"{group.name}, {kinds}", style="bold"), "", Text(str(edges), style="bold"), "")
        for site in group.sites:
            score = [f"{site.clustering:.4f}" if site.clustering is not None else ""] if scored else []
            table.add_row(Text("  " + _moves(site)), ranges(site.layers) or "outside", str(site.count), Text(_place(site.consumer)), *score)
        table.add_section()
    if report.groups:
        console.print(table)
    _summary(report, console)
    for title, entries, style in (
        ("semantic divergence", report.semantic, "bold red"),
        ("unpatchable", report.unpatchable, "yellow"),
        ("conflicting", report.conflicting, "yellow"),
        ("undetermined", report.undetermined, "yellow"),
        ("leftover", report.leftovers, "yellow"),
        ("assumed", report.assumed, "yellow"),
        ("not exercised", report.unexercised, "yellow"),
    ):
        _entries(title, entries, style, console)
    for note in report.notes[:8]:
        console.print(Text(f"note: {note}", style="dim"))
    _warn(report, console)


def _moves(site: Site) -> str:
    return f"{_short(site.producer)} → {_short(site.consumer)}"


def describe(producer: End, consumer: End) -> str:
    """An edge in words, with both lines: expressions repeat in a file."""

    def line(end: End) -> str:
        return f" (line {end.line})" if end.line else ""

    return f"{_short(producer)}{line(producer)} → {_short(consumer)}{line(consumer)}"


def _kind(site: Site) -> str:
    return "kept in FP32" if site.kind == "keep" else f"rounded to {site.inference[-1]}"


def _short(end: End) -> str:
    if end.op in ("parameter", "table"):
        return f"{end.op} {end.module}"
    if end.op == "logprobs":
        return "log-probabilities"
    text = " ".join(end.text.split())
    if 0 < len(text) <= LONGEST:
        return step_words(end.op, text)
    return step_words(end.op, f"{end.op.removeprefix('aten.').split('.')[0]} in {end.module.split('.')[-1] or end.module}")


def _place(end: End) -> str:
    return f"{end.file.split('/')[-1]}:{end.line}" if end.file else end.module


def _summary(report: Report, console: Console) -> None:
    s, c = report.stats, report.stats["check"]
    line = Text()
    line.append(f"{s['sites']} edges in {sum(len(g.sites) for g in report.groups)} sites, {len(report.groups)} groups", style="bold")
    interior = sum(e.count for e in report.interior)
    line.append(f"; {s['training_paired']}/{s['training_ops']} training ops and {s['anchors']} anchors aligned, {interior} interior steps")
    console.print(line)
    if c["operands"]:
        console.print(
            Text(
                f"check: of {c['operands']} anchor operands, {c['equal_stock']:.1%} of elements equal the engine's as the trainer stands, "
                f"{c['equal_with_sites']:.3%} with these sites{_assumed(c)} applied (lowest {c['lowest_with_sites']:.3%})"
                + (f"; {report.assumptions}" if report.assumptions else "")
            )
        )


def _warn(report: Report, console: Console) -> None:
    """What makes a result incomplete, said behind everything else."""
    total, paired = report.stats["training_ops"], report.stats["training_paired"]
    if lost := report.stats.get("unlowered"):
        text = f"warning: {lost} compiled pieces could not be lowered, so nothing is known about what they round: see the notes"
        console.print(Text(text, style="bold yellow"))
    if total and paired < MOST * total:
        text = f"warning: only {paired / total:.0%} of the trainer's ops were aligned: there may be more sites, see the leftovers"
        console.print(Text(text, style="bold yellow"))


def _assumed(check: dict[str, Any]) -> str:
    """Unpatchable edges of tables that the check takes as applied, in words."""
    n = check.get("assumed_tables", 0)
    return f" and {n} unpatchable table edges" if n else ""


def _entries(title: str, entries: tuple[Entry, ...], style: str, console: Console) -> None:
    if not entries:
        return
    console.print(Text(f"{title}: {sum(e.count for e in entries)}", style=style))
    for e in entries[:12]:
        layers = f" [layers {ranges(e.layers)}]" if e.layers else ""
        where = f"\n    at {e.where}" if e.where.strip() else ""
        console.print(Text(f"  {e.what}{layers}: {e.reason}{where}"))
    if len(entries) > 12:
        console.print(Text(f"  … and {len(entries) - 12} more kinds, in sites.json"))
