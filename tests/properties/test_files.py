"""What is written is read back, as it was."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from graphalign.ir.files import read_json, write_json
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph
from graphalign.sites.find import diff
from graphalign.sites.report import Report
from tests.synthetic import random_pair


@settings(max_examples=5)
@given(st.integers(0, 2**32 - 1), st.sampled_from([".json", ".json.gz"]))
def test_files_keep_everything(seed: int, ending: str) -> None:
    _, _, i, t = random_pair(seed)
    report = diff(i, t)
    with tempfile.TemporaryDirectory() as folder:
        for n, (model, kind) in enumerate(((i, InferenceGraph), (t, TrainingGraph), (report, Report))):
            path = Path(folder) / f"{n}{ending}"
            write_json(path, model)
            first = path.read_bytes()
            back = read_json(path, kind, kind="file")
            assert back == model
            write_json(path, back)
            assert path.read_bytes() == first
