"""Files outlive the version that wrote them: those of 0.1 are read as they were meant, later ones are refused by name.

`written_by_0.1` was made by graphalign 0.1.0 from the recorded captures of a small Qwen3: its sites, and a patch of a group in 3 layers.
The recorded captures under `tests` are of 0.1 too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

import graphalign
from graphalign.drift.compare import drift
from graphalign.drift.snapshot import of_report, of_spec
from graphalign.errors import CaptureFileError
from graphalign.ir.files import read_json
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph
from graphalign.patch.make import make_spec
from graphalign.patch.spec import load
from graphalign.render.textdiff import render_text
from graphalign.sites.report import Report
from tests.fixtures.recorded import report

OLD = Path(__file__).parent / "written_by_0.1"


def test_the_package_and_its_metadata_name_one_version() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{graphalign.__version__}"' in text


def test_a_sites_file_of_0_1_is_read_and_says_what_one_of_today_says() -> None:
    old, new = read_json(OLD / "sites.json.gz", Report, kind="sites file"), report("qwen3")
    assert old.model_dump(exclude={"stats": {"seconds"}}) == new.model_dump(exclude={"stats": {"seconds"}})
    assert "rope.8" in render_text(old)
    assert not drift(of_report(old), of_report(new)).moved


def test_a_patch_of_0_1_is_read_with_what_it_leaves_out() -> None:
    old = load(OLD / "rope.yaml")
    assert old == make_spec(report("qwen3"), only=["rope"], layers="0-2")
    found = drift(of_spec(old), of_report(report("qwen3")))
    assert (found.verdict, found.moved) == ("safe", False)


@pytest.mark.parametrize(("model", "format"), [(InferenceGraph, "inference"), (TrainingGraph, "training"), (Report, "sites")])
def test_a_file_of_a_later_version_is_refused_by_name(model: type[BaseModel], format: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"format": f"graphalign.{format}", "version": 2, "new": 1}))
    with pytest.raises(CaptureFileError, match=r"x\.json is a file of format version 2; this graphalign reads up to 1"):
        read_json(tmp_path / "x.json", model, kind="file")
