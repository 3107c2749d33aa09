"""Two captures compared, with what `render` draws of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphalign.ir.inference import InferenceGraph
    from graphalign.ir.training import TrainingGraph
    from graphalign.sites.report import Report


def diff(
    inference: InferenceGraph,
    training: TrainingGraph,
    *,
    rules: Path | None = None,
    progress: Callable[[str, float | None], None] | None = None,
) -> Report:
    """`sites.find.diff`, and the report's diagrams prepared."""
    from graphalign.pictures.choose import draw
    from graphalign.sites import find

    return find.diff(inference, training, rules=rules, progress=progress, draw=draw)
