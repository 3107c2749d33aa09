"""`graphalign gap` on the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


def run(out: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "graphalign", "gap", "example:qwen3", "--out", str(out), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_gap_of_a_small_qwen3(tmp_path: Path) -> None:
    asked = ("--limit", 8, "--max-tokens", 24, "--seeds", "1,2", "--resamples", 500)
    first = run(tmp_path, *asked)
    assert first.returncode == 0, first.stderr[-3000:]
    report = json.loads((tmp_path / "gap.json").read_text())
    assert report["tokens"] == 8 * 24 * 2
    by_name = {v["name"]: v for v in report["variants"]}
    groups = by_name["everything"]["groups"]
    assert len(groups) == 5
    assert report["attribution"]["exact"]
    assert report["attribution"]["subsets"] == 32
    stock, everything = (by_name[n]["prefill"]["pooled"]["k3"]["value"] for n in ("stock", "everything"))
    assert 0 < everything < stock
    whole = sum(s["reduction"]["value"] for s in report["attribution"]["prefill"])
    assert whole == pytest.approx(stock - everything, rel=1e-6)
    # with the engine's kernels too, nearly nothing is left against the engine's own prefill
    both = next(v for n, v in by_name.items() if "gemm" in n and "attention" in n)
    assert both["prefill"]["pooled"]["k3"]["value"] < 0.6 * everything
    assert both["prefill"]["pooled"]["equal_share"]["value"] > 0.2
    assert by_name["everything"]["prefill"]["pooled"]["equal_share"]["value"] < 0.05
    residue = report["residue"]
    assert residue["gemm"]["results"] == 42
    assert residue["attention"]["results"] == 6
    assert residue["regions"]["equal"] > 0.999
    assert set(residue["gemm_rows"]) == {"1", "8", "16"}
    assert set(report["drift"]) == {"stock", "everything"}
    assert all(report["drift"]["everything"][k] < report["drift"]["stock"][k] for k in report["drift"]["stock"])
    page = (tmp_path / "gap.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")
    assert "k3 against stock, seed by seed" in first.stdout
    again = run(tmp_path, *asked)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "reuse engine.rollouts.json.gz" in again.stderr
    assert "variants were taken from an earlier run" in again.stdout
    repeated = json.loads((tmp_path / "gap.json").read_text())
    assert repeated["variants"] == report["variants"]
