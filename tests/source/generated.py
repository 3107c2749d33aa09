"""Recorded models as source: `python -m tests.source.generated [NAME …]` prints a table of all of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from graphalign.capture.training import record_forward
from graphalign.errors import GraphalignError
from graphalign.patch.make import make_spec
from graphalign.patch.spec import PatchSpec
from graphalign.sites.find import diff
from graphalign.sites.report import Report
from graphalign.source.generate import Generated
from graphalign.source.verify import Reference, generate_verified
from tests.breadth import models
from tests.breadth.captured import captures, report


@dataclass(frozen=True)
class Outcome:
    """What became of one model."""

    name: str
    lines: int = 0
    """Lines that the diff changes."""
    refused: str = ""
    """Why there is no file."""

    def __str__(self) -> str:
        return f"{self.name:20} {self.lines:3} lines, verified" if not self.refused else f"{self.name:20} refused: {self.refused}"


def spec(name: str) -> PatchSpec:
    return make_spec(report(name))


def again(name: str, model: Any) -> Report:
    """The model captured again, and compared with the recorded engine."""
    options = {"logprobs": chosen} if (chosen := models.recipes()[name]["logprobs"]) else {}
    return diff(captures(name)[0], record_forward(model, **options))


def verified(name: str) -> Generated:
    """The generated file of a recorded model; raises what `graphalign source` raises."""
    model, patch = models.build(name), spec(name)
    reference = Reference(model, patch, allow_stale=True)  # Transformers stamps another config into what is built in memory
    return generate_verified(reference, lambda m: again(name, m)).generated


def outcome(name: str) -> Outcome:
    try:
        return Outcome(name, verified(name).changed_lines)
    except GraphalignError as e:
        return Outcome(name, refused=" ".join(f"{e.what} ({e.where})".split())[:300])


if __name__ == "__main__":
    for one in sys.argv[1:] or models.recipes():
        print(outcome(one), flush=True)
