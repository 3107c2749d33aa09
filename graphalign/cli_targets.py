"""The command `graphalign targets`: where inference can be said to run; and what `find` does only for simulated ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from graphalign import console
from graphalign.cli import Rules, app

if TYPE_CHECKING:
    from graphalign.ir.inference import InferenceGraph
    from graphalign.sites.report import Report


@app.command("targets")
def targets_command(rules: Rules = None) -> None:
    """List what `--target` accepts: the CPU engine, which really runs, and GPUs that are simulated.

    Example:

      graphalign find example:qwen3 --target h100 --out out/h100
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


def check_map(report: Report, stages: console.Stages, inference: InferenceGraph, kernels: Path, rules: Path, python: Path | None) -> Report:
    """Check a simulated capture's rounding map against the generated kernels, and say so in the report.

    Raises:
        KernelMismatchError: they do not round where the map says.
    """
    from graphalign.capture.inference import interpreter
    from graphalign.verify.kernels import TOLERANCE, check_kernels

    stages.start("kernels")("interpret")
    found = check_kernels(inference, kernels, rules, python=interpreter(python))
    worst = max(k.differ["map"] for k in found.kernels)
    said = (
        f"{len(found.kernels)} generated kernels, run in Triton's interpreter, round where the captured map says"
        f" (at most {worst:.3%} of a kernel's elements differ, by summation order; {TOLERANCE:.1%} is allowed)"
    )
    skipped = tuple(f"not checked against its kernel: {name}, {why}" for name, why in dict.fromkeys(found.skipped))
    checked = {"kernels": len(found.kernels), "worst": worst, "skipped": len(found.skipped)}
    return report.model_copy(update={"notes": (said, *skipped, *report.notes), "stats": {**report.stats, "kernels": checked}})
