"""The main job on the real engine: find, patch, prove."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GROUPS = {"norm_weight", "residual_rmsnorm", "residual_stream", "rope", "swiglu"}
pytestmark = pytest.mark.vllm


def _graphalign(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "graphalign", *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["qwen3"])
def test_find_on_the_real_engine(name: str, tmp_path: Path) -> None:
    result = _graphalign("find", f"example:{name}", "--out", tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    sites = json.loads((tmp_path / "sites.json").read_text())
    assert {g["name"] for g in sites["groups"]} == GROUPS
    for kind in ("leftovers", "undetermined", "conflicting", "unpatchable", "semantic"):
        assert sites[kind] == [], kind
    for group in sites["groups"]:
        assert group["layers"] == list(range(6)), group["name"]
    assert sites["stats"]["check"]["equal_with_sites"] == 1.0
    assert sites["stats"]["check"]["equal_stock"] < 0.8
    assert (tmp_path / "patch.yaml").is_file()


@pytest.mark.parametrize("name", ["llama", "smollm2"])
def test_a_patch_is_proven_on_the_real_engine(name: str, tmp_path: Path) -> None:
    """Random weights, and the first layers of real ones."""
    cut = ("--layers", 10) if name == "smollm2" else ()
    found = _graphalign("find", f"example:{name}", "--out", tmp_path, *cut)
    assert found.returncode == 0, found.stderr[-2000:]
    result = _graphalign("check", f"example:{name}", "--patch", tmp_path / "patch.yaml", "-o", tmp_path / "proof.json", *cut)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert proof["sites"]["stock"] > 0
    assert proof["sites"]["patched"] == 0
    assert set(proof["replay"]["patched"]["equal"]) == GROUPS
    for group in GROUPS:
        assert proof["replay"]["patched"]["lowest"][group] >= 0.9995, group
        assert proof["replay"]["stock"]["equal"][group] < 0.9, group
        assert proof["replay"]["negated"]["equal"][group] < 0.9, group
