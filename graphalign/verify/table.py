"""A proof as text for people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphalign.verify.proof import ENOUGH, Proof


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
    if proof.assumptions:
        console.print(Text(f"{proof.assumptions} equal: joined by owner, their inside was not compared", style="yellow"))
    for problem in proof.problems:
        console.print(Text(f"NOT PROVEN: {problem}", style="bold red"))
    if not proof.problems:
        extent = "" if proof.summaries else " (consistency only: nothing was replayed)"
        extent += f", with {proof.assumptions} equal inside" if proof.assumptions else ""
        rest = ", ".join(f"{n} {kind}" for kind, n in proof.unpatched.items())
        if rest:
            said = (
                f"proven for the patch's edges: there the patched model rounds where the engine rounds{extent}; what differs still: {rest}"
            )
        else:
            said = f"proven: the patched model rounds where the engine rounds{extent}"
        console.print(Text(said, style="bold green" if not rest and not proof.assumptions else "bold yellow"))


def _replay(proof: Proof, console: Console) -> None:
    title = "Region outputs on the engine's real values: share of bitwise equal elements"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("group", no_wrap=True)
    table.add_column("regions", justify="right")
    for name in proof.summaries:
        table.add_column(f"{name}\n{proof.edges.get(name, 0)} edges", justify="right")
        if name == "patched":
            table.add_column("lowest\nregion", justify="right")
            table.add_column("ULP", justify="right")
    first = next(iter(proof.summaries.values()))
    for group in sorted(first.equal):
        cells = []
        for name, s in proof.summaries.items():
            cells.append(f"{s.equal[group]:.5f}")
            if name == "patched":
                cells += [f"{s.lowest[group]:.5f}", str(s.ulp[group])]
        table.add_row(group, str(first.operands[group]), *cells)
    console.print(table)
    console.print(Text(f"a patched region must reach {ENOUGH}; ULP is the largest distance in a patched region", style="dim"))
    console.print(Text("negated rounds what the engine keeps; all in FP32 drops every rounding between pointwise ops", style="dim"))
