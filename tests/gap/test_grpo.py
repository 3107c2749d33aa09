"""The example: TRL's GRPOTrainer with real vLLM rollouts, a patched trainer and a monitor."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from graphalign.gap.statistics import GapStatistics, PairedDifference

EXAMPLE = Path(__file__).resolve().parents[2] / "notebooks" / "grpo_with_gap_monitor.py"
STEPS = 3


@pytest.mark.vllm
def test_the_grpo_example_runs_and_the_patch_narrows_the_gap(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", str(STEPS), "--out", str(out)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(out.read_text())

    steps = [(step, GapStatistics.model_validate(found)) for step, found in result["steps"]]
    assert [step for step, _ in steps] == list(range(STEPS))
    for _, found in steps:
        assert found.sequences == 16
        assert 0 < found.k3.value < 1e-3
        assert all(math.isfinite(x) for x in (found.mean_d.value, found.mean_abs_d.value, found.max_abs_d))

    compared = [PairedDifference.model_validate(x) for x in result["compared"]]
    for found in compared:  # on the same tokens, against the trainer without the patch
        assert found.k3.value <= 0
        assert found.k3.high is not None
        assert found.k3.high < 0

    # The weights moved far more than the gap is wide, so a gap that stays shows that the engine got them.
    assert result["stale"] > 5 * steps[-1][1].mean_abs_d.value

    logged = [x["gap/k3"] for x in result["logged"] if "gap/k3" in x]
    assert logged == [found.k3.value for _, found in steps]
    for step, found in steps:
        assert f"step {step}: {found}" in done.stdout
