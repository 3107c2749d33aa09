"""The acceptance matrix and FSDP2 on two gloo ranks, bit for bit the patch by hand; writes the table in `docs/trainers.md`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rewrite.matrix import ATTENTION, CHECKPOINTING, MASTERS, REGIMES, Cells, cells

ROOT = Path(__file__).parents[2]
SCENES = {"nemo_rl": 2, "cells": 4, "adapters": 2, "frameworks": 3, "tables": 3, "bf16": 2}
"""Of `sharded_ranks.py`, with the number of statements that must hold."""
PAGE = ROOT / "docs" / "trainers.md"


def ranks(script: str, folder: Path, *args: str) -> list[list[str]]:
    """Run a script on two gloo ranks; what each of them said."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(ROOT / script), str(folder), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [(folder / f"rank{n}").read_text().splitlines() for n in range(2)]


@pytest.mark.slow
def test_two_ranks(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    first, second = ranks("tests/rewrite/sharded_ranks.py", tmp_path, *SCENES)
    assert first == second
    assert [line for line in first if line.startswith("FAILS")] == []
    assert sum(line.startswith("holds: ") for line in first) == sum(SCENES.values()), first
    found = {(a, c): word for _, a, c, word in (line.split("|") for line in first if line.startswith("cell|"))}
    assert set(found) == {(a, c) for a in ATTENTION for c in CHECKPOINTING}
    agree_with_docs(MASTERS, found, update=bool(request.config.option.update_snapshots))


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
def test_one_process(regime: str, request: pytest.FixtureRequest) -> None:
    make, cast = REGIMES[regime]
    found: Cells = {}
    for attention, (implementation, _, _) in ATTENTION.items():
        with pytest.MonkeyPatch.context() as patcher:
            found |= cells(attention, *make(implementation, patcher), cast)
    agree_with_docs(regime, found, update=bool(request.config.option.update_snapshots))


def agree_with_docs(regime: str, found: Cells, *, update: bool) -> None:
    """The regime's rows of the table in `docs/trainers.md` are what was found; `make goldens` writes them."""
    rows = [
        f"| {regime} | {attention} | {' | '.join(found[attention, c] for c in CHECKPOINTING)} |" for attention in ATTENTION
    ]  # fmt: skip
    lines = PAGE.read_text().splitlines()
    there = [n for n, line in enumerate(lines) if line.startswith(f"| {regime} |")]
    if update:
        lines[there[0] : there[-1] + 1] = rows
        PAGE.write_text("\n".join(lines) + "\n")
        return
    assert [lines[n] for n in there] == rows
