"""On the real engine: find, change a compile setting, find again against the first patch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


def find(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "graphalign", "find", "example:qwen3", "--layers", "2", "--no-report", "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def test_regenerate_against_a_baseline(tmp_path: Path) -> None:
    first = find(tmp_path / "before")
    assert first.returncode == 0, first.stderr
    assert "as many sites as expected for Qwen3ForCausalLM on cpu" in first.stdout
    baseline = ["--baseline", str(tmp_path / "before" / "patch.yaml")]
    setting = ["--engine-arg", 'compilation_config={"inductor_compile_config": {"emulate_precision_casts": true}}']
    second = find(tmp_path / "after", *baseline, *setting)
    assert second.returncode == 5, second.stderr
    assert "the old patch is wrong" in second.stdout
    assert "inductor.emulate_precision_casts: False → True" in second.stdout
    assert "not the sites expected for Qwen3ForCausalLM on cpu" in second.stdout
    eager = find(tmp_path / "eager", *baseline, "--engine-arg", "enforce_eager=true")
    assert eager.returncode == 4
    assert "the engine compiled no graph of the model" in eager.stderr
    assert "a patch made from a compiled engine is not for it" in eager.stderr
