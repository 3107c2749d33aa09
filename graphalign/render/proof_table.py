"""A proof as text for people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphalign.proof.verdict import ENOUGH, FP32, NEGATED, PATCHED, STOCK, WHOLE, Proof

MOST_UNEXERCISED = 6
"""Kinds of clamps that never fired that are shown."""


def render_proof(proof: Proof, console: Console) -> None:
    """Print the fixed point and the replay."""
    c = proof.patched.stats["check"]
    left = f", in {', '.join(g.name for g in proof.patched.groups)}" if proof.patched.groups else ""
    console.print(Text(f"stock model:   {proof.stock.sites} edges round elsewhere than the engine"))
    console.print(Text(f"patched model: {proof.patched.sites} edges{left}"))
    console.print(Text(f"               {c['equal_stock']:.3%} of the anchor operands' elements are as the engine's rounding gives them"))
    if not proof.summaries:
        console.print(Text(f"replay left out: {proof.skipped}", style="yellow"))
    else:
        _replay(proof, console)
    for variant, why in proof.missing.items():
        console.print(Text(f"{variant}: not replayed, {why}", style="yellow"))
    if proof.patched.assumptions:
        console.print(Text(f"{proof.patched.assumptions} equal: joined by owner, their inside was not compared", style="yellow"))
    for note in proof.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    if unfired := proof.stock.unexercised:
        n = sum(e.count for e in unfired)
        console.print(Text(f"not exercised: {n}, whose other side was compared nowhere", style="yellow"))
        for e in unfired[:MOST_UNEXERCISED]:
            console.print(Text(f"  {e.what}: {e.reason}\n    at {e.where}", style="yellow"))
        if len(unfired) > MOST_UNEXERCISED:
            console.print(Text(f"  … and {len(unfired) - MOST_UNEXERCISED} more kinds, in the sites file of `find`", style="yellow"))
    for problem in proof.problems:
        console.print(Text(f"NOT PROVEN: {problem}", style="bold red"))
    if not proof.problems:
        console.print(Text(words(proof), style="bold green" if proof.verdict == "proven" else "bold yellow"))


def words(proof: Proof) -> str:
    """The verdict on a patch that nothing speaks against."""
    if proof.verdict == "proven":
        return "proven: the patched model rounds where the engine rounds"
    rest = ", ".join(f"{n} {kind}" for kind, n in proof.unpatched.items())
    groups = ", ".join(f"{name} {n}" for name, n in sorted(proof.left_out.items()))
    left = f" (left out: {groups})" if groups else ""
    return (
        f"PARTIAL: proven for the patch's {proof.spec.edges} edges only; the patched model as a whole still differs from the engine, "
        f"or is not known not to: {rest}{left}"
    )


def _replay(proof: Proof, console: Console) -> None:
    """Two tables, so that each fits into 80 columns: the verdict's figures, and what else was replayed."""
    judged = [name for name in (STOCK, PATCHED, NEGATED) if name in proof.summaries]
    _scores(proof, judged, "Region outputs on the engine's real values: share of bitwise equal elements", console)
    console.print(Text(f"a patched region must reach {ENOUGH}; ULP is the largest distance in a patched region", style="dim"))
    if NEGATED in judged:
        console.print(Text("negated rounds what the engine keeps", style="dim"))
    if others := [name for name in proof.summaries if name not in judged]:
        _scores(proof, others, "The same regions under other edits", console)
    if WHOLE in others:
        console.print(Text("all sites: the patch of everything; all but these: the same without this patch's edits", style="dim"))
    if FP32 in others:
        console.print(Text("all in FP32 drops every rounding between pointwise ops", style="dim"))


def _scores(proof: Proof, variants: list[str], title: str, console: Console) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("group", min_width=12, overflow="fold")
    table.add_column("regions", justify="right", no_wrap=True)
    for name in variants:
        table.add_column(f"{name}\n{proof.edges.get(name, 0)} edges", justify="right", no_wrap=True)
        if name == PATCHED:
            table.add_column("lowest\nregion", justify="right", no_wrap=True)
            table.add_column("ULP", justify="right", no_wrap=True)
    summaries = [(name, proof.summaries[name]) for name in variants]
    regions = {group: n for s in proof.summaries.values() for group, n in s.operands.items()}
    for group in sorted(regions):
        cells = []
        for name, s in summaries:
            cells.append(f"{s.equal[group]:.5f}" if group in s.equal else "")
            if name == PATCHED:
                cells += [f"{s.lowest[group]:.5f}", str(s.ulp[group])] if group in s.equal else ["", ""]
        table.add_row(group, str(regions[group]), *cells)
    console.print(table)
