"""The models built from `models.yaml` are those that were recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphalign.ir.training import TrainingGraph
from graphalign.sites.find import diff
from tests.breadth import models
from tests.breadth.captured import CAPTURES, captures, counts, entries, report
from tests.breadth.record import training


def parameters(graph: TrainingGraph) -> set[tuple[str, tuple[int, ...]]]:
    return {(i.name, tuple(i.value.shape)) for i in graph.inputs if i.kind == "parameter"}


def test_every_recorded_model_has_a_recipe() -> None:
    assert set(models.recipes()) == {p.name.removesuffix(".train.json.gz") for p in CAPTURES.glob("*.train.json.gz")}


@pytest.mark.parametrize("name", models.recipes())
def test_a_model_built_anew_is_the_recorded_one(name: str, tmp_path: Path) -> None:
    """Same parameters, and against the recorded engine the same diff."""
    inference, recorded = captures(name)
    again = training(name, models.save(name, tmp_path))
    assert parameters(again) == parameters(recorded)
    found = diff(inference, again)
    assert (counts(found), entries(found)) == (counts(report(name)), entries(report(name)))
