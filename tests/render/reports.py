"""Reports of recorded captures by name: the examples, other architectures, a simulated H100."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from graphalign.align import finer
from graphalign.ir.drawing import Drawing
from graphalign.ir.files import read_json
from graphalign.ir.inference import InferenceGraph
from graphalign.pictures.choose import draw
from graphalign.sites import find
from graphalign.sites.report import Report
from tests.breadth import captured
from tests.fixtures import recorded

H100 = Path(__file__).parents[1] / "gpu" / "data" / "qwen3.h100.inf.json.gz"


@functools.cache
def whole(name: str) -> Report:
    """The same as if no op could be taken apart: an edge into one that the engine reads in two ways is conflicting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finer, "taken_apart", lambda *_: None)
        return report.__wrapped__(name)


@functools.cache
def report(name: str) -> Report:
    """The diff of recorded captures, with diagrams of its semantic divergences."""
    if name == "h100":
        captures = read_json(H100, InferenceGraph, kind="inference capture"), captured.captures("qwen3_tail")[1]
    else:
        captures = (recorded if recorded.paths(name)[0].exists() else captured).captures(name)
    given: list[tuple[Any, ...]] = []
    parted: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        misplaced = find.find_misplaced
        patch.setattr(find, "find_misplaced", lambda *arguments: parted.append(misplaced(*arguments)) or parted[-1])
        found = find.diff(*captures, draw=lambda *arguments: given.append(arguments) or Drawing())
    return found.model_copy(update={"drawing": draw(*given[0][:4], parted[0].semantic)})
