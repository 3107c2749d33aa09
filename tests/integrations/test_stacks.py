"""The hooks on the real code of verl, OpenRLHF and SkyRL, each in an environment of its own: `make trainers`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from graphalign.patch.spec import save
from tests.rewrite.tiny import build, spec_for

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.trainers, pytest.mark.timeout(1000)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """FP32 weights, and a patch for BF16 ones."""
    build(2, dtype=torch.float32).save_pretrained(tmp_path / "model")
    save(spec_for(2), tmp_path / "patch.yaml")
    return tmp_path


def run(stack: str, folder: Path, *command: str) -> str:
    """Run a script in the stack's environment."""
    python = ROOT / ".trainers" / stack / "bin" / "python"
    assert python.exists(), f"{stack} is not installed: run `make trainers`"
    # the patch is of another Transformers: its edits must match, its modeling file need not
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GRAPHALIGN_PATCH": str(folder / "patch.yaml")}
    env["GRAPHALIGN_ALLOW_STALE"] = "1"
    done = subprocess.run([str(python), *command], capture_output=True, text=True, env=env, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def held(said: str) -> list[str]:
    """What holds; nothing may fail."""
    assert "FAILS" not in said, said
    return [line.removeprefix("holds: ") for line in said.splitlines() if line.startswith("holds: ")]


def test_verl(folder: Path) -> None:
    """verl's `FSDPEngineWithLMHead` on two gloo ranks: FP32 masters, FSDP2, checkpointing, with and without autocast, its optimiser."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run("verl", folder, *launch, "tests/integrations/verl_ranks.py", str(folder))
    first, second = (held((folder / f"rank{n}").read_text()) for n in range(2))
    assert first == second
    assert len(first) == 7


@pytest.mark.parametrize("stack", ["openrlhf", "skyrl"])
def test_one_process(stack: str, folder: Path) -> None:
    """OpenRLHF's `Actor` and SkyRL's `HFModelWrapper`: their log-probabilities and all gradients, both kinds of checkpointing, LoRA."""
    assert len(held(run(stack, folder, "tests/integrations/one_process.py", stack, str(folder)))) == 12
