"""The command `graphalign targets`: where inference can be said to run."""

from __future__ import annotations

from rich.table import Table

from graphalign import console
from graphalign.cli import Rules, app


@app.command("targets")
def targets_command(rules: Rules = None) -> None:
    """List what `--target` accepts: the CPU engine, which really runs, and GPUs that are simulated.

    Example:

      graphalign find example:qwen3 --target h100 --out out/h100
    """
    from rich import box

    from graphalign.engines.gpu.targets import load_targets

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (("target", "left"), ("device", "left"), ("capability", "left"), ("processors", "right"), ("memory", "right"), ("how", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_row("cpu", "this machine", "", "", "", "runs")
    for t in load_targets(rules).values():
        major, minor = t.capability
        table.add_row(t.key, t.name, f"{major}.{minor}", str(t.processors), f"{t.memory:.0f} GiB", "simulated")
    console.output().print(table)
