"""The commands about targets: `graphalign targets | compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from graphalign import console
from graphalign.cli.app import Rules, app


@app.command("targets")
def targets_command(rules: Rules = None) -> None:
    """List what `--target` accepts: the CPU engine, which really runs, and GPUs that are simulated.

    Of a GPU, one rank of a tensor-parallel engine can be simulated too.

    Examples:

      graphalign find example:qwen3 --target h100 --out out/h100

      graphalign find example:qwen3 --target h100 --tensor-parallel 2 --out out/tp2
    """
    from rich import box

    from graphalign.engines.gpu.targets import load_targets

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("target", "device", "capability", "processors", "memory", "how"):
        table.add_column(name, justify="right" if name in ("processors", "memory") else "left", no_wrap=True)
    table.add_row("cpu", "this machine", "", "", "", "runs")
    for t in load_targets(rules).values():
        major, minor = t.capability
        table.add_row(t.key, t.name, f"{major}.{minor}", str(t.processors), f"{t.memory:.0f} GiB", "simulated")
    console.output().print(table)


@app.command("compare")
def compare_command(
    first: Annotated[Path, typer.Argument(metavar="SITES", help="A sites file for one target.")],
    second: Annotated[Path, typer.Argument(metavar="SITES", help="A sites file of the same trainer for another target.")],
) -> None:
    """Say what differs between two targets of one model.

    Example:

      graphalign compare out/cpu/sites.json out/h100/sites.json
    """
    from rich import box
    from rich.text import Text

    from graphalign.ir.files import read_json
    from graphalign.ir.paths import ranges
    from graphalign.render.sites_table import describe
    from graphalign.sites.between import compare_targets
    from graphalign.sites.report import Report

    found = compare_targets(read_json(first, Report, kind="sites file"), read_json(second, Report, kind="sites file"))
    a, b = found.names
    out = console.output()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("group", f"edges on {a}", f"on {b}"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for group, left, right in found.groups:
        table.add_row(group, str(left), Text(str(right), style="bold" if left != right else ""))
    out.print(table)
    for m in found.moves:
        for here, there, layers, outside in ((a, b, m.first, m.outside[0]), (b, a, m.second, m.outside[1])):
            where = " and ".join(x for x in (f"layers {ranges(layers)}" if layers else "", "outside of layers" if outside else "") if x)
            if where:
                does = "stays in FP32" if m.kind == "keep" else "is rounded"
                what = f"{m.group}: {describe(m.producer, m.consumer)} {does} on {here}, not on {there} ({where})"
                out.print(Text(what), soft_wrap=True)
    if not found.moves:
        out.print(f"{a} and {b} round at the same places")
