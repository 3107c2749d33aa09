"""FSDP2 on two gloo ranks, FP32 master weights: bit for bit the patch by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCENES = {"policies": 8, "inputs": 9, "adapters": 2, "frameworks": 3, "tables": 4, "bf16": 2}
"""Of `sharded_ranks.py`, with the number of statements that must hold."""


def ranks(script: str, *args: str) -> str:
    """Run a script on two gloo ranks."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(ROOT / script), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_two_ranks() -> None:
    out = ranks("tests/rewrite/sharded_ranks.py", *SCENES)
    assert "FAILS" not in out, out
    assert out.count("holds: ") == 2 * sum(SCENES.values()), out
