"""What is checked of a simulated target only: its generated kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphalign import console

if TYPE_CHECKING:
    from graphalign.ir.inference import InferenceGraph
    from graphalign.sites.report import Report


def check_map(report: Report, stages: console.Stages, inference: InferenceGraph, kernels: Path, rules: Path, python: Path | None) -> Report:
    """Check a simulated capture's rounding map against the generated kernels, and say so in the report.

    Raises:
        KernelMismatchError: they do not round where the map says.
    """
    from graphalign.capture.inference import interpreter
    from graphalign.engines.kernel_check import TOLERANCE, check_kernels

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
