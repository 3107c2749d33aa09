"""A proof as text for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphalign.verify.proof import ENOUGH, Proof


def render_proof(proof: Proof, console: Console) -> None:
    """Print the fixed point and the replay."""
    c = proof.patched.stats["check"]
    console.print(Text(f"stock model:   {proof.stock.sites} edges round elsewhere than the engine"))
    left = f", in {', '.join(g.name for g in proof.patched.groups)}" if proof.patched.groups else ""
    console.print(
        Text(
            f"patched model: {proof.patched.sites} edges{left}; {c['equal_stock']:.3%} of anchor operands' elements as the engine's rounding gives them"
        )
    )
    if not proof.summaries:
        console.print(Text(f"replay left out: {proof.skipped}", style="yellow"))
    else:
        _replay(proof, console)
    for problem in proof.problems:
        console.print(Text(f"NOT PROVEN: {problem}", style="bold red"))
    if not proof.problems:
        console.print(
            Text(
                "proven: the patched model rounds where the engine rounds"
                + ("" if proof.summaries else " (consistency only: nothing was replayed)"),
                style="bold green",
            )
        )


def _replay(proof: Proof, console: Console) -> None:
    table = Table(title="Region outputs on the engine's real values: bitwise equal elements, mean (lowest region)", title_justify="left")
    table.add_column("group")
    table.add_column("regions", justify="right")
    for name in proof.summaries:
        table.add_column(f"{name}\n{proof.edges.get(name, 0)} edges", justify="right")
    table.add_column("largest ULP, patched", justify="right")
    first = next(iter(proof.summaries.values()))
    for group in sorted(first.equal):
        cells = [f"{s.equal[group]:.5f} ({s.lowest[group]:.5f})" for s in proof.summaries.values()]
        table.add_row(group, str(first.operands[group]), *cells, str(proof.summaries["patched"].ulp[group]))
    console.print(table)
    console.print(
        Text(
            f"a patched region must reach {ENOUGH}; `negated` rounds where the engine doesn't, `everything in FP32` drops every rounding between pointwise ops",
            style="dim",
        )
    )
