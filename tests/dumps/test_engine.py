"""A dump of the real engine's samples, scored here, gives the figures that `gap MODEL` gave for them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from graphalign.dumps import write_rows

pytestmark = pytest.mark.vllm


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "graphalign", *map(str, arguments)], capture_output=True, text=True, check=False)


def test_the_gap_of_a_dump_is_that_of_the_engine(tmp_path: Path) -> None:
    asked = ("--limit", 4, "--max-tokens", 16, "--seeds", "1", "--no-attribution")
    first = run("gap", "example:qwen3", "--out", tmp_path / "live", *asked)
    assert first.returncode == 0, first.stderr[-3000:]
    rollouts = json.loads(gzip.decompress((tmp_path / "live" / "engine.rollouts.json.gz").read_bytes()))
    rows = (
        {"prompt_token_ids": rollouts["prompts"][s["prompt"]], "response_token_ids": s["tokens"], "inference_logprobs": s["sampled"]}
        for s in rollouts["sequences"]
    )
    assert write_rows(tmp_path / "rows.jsonl", rows) == 4
    dump = ("--dump", tmp_path / "rows.jsonl", "--model", "example:qwen3", "--patch", tmp_path / "live" / "patch.yaml")
    second = run("gap", *dump, "--out", tmp_path / "gap")
    assert second.returncode == 0, second.stderr[-3000:]
    whole = {v["name"]: v for v in json.loads((tmp_path / "live" / "gap.json").read_text())["variants"]}
    scored = json.loads((tmp_path / "gap" / "gap.json").read_text())["scored"]
    assert [s["name"] for s in scored][:2] == ["stock", "everything"]
    for s in scored:
        assert s["gap"] == whole[s["name"]]["sampled"]["pooled"]
    assert scored[1]["gap"]["k3"]["value"] < scored[0]["gap"]["k3"]["value"]
