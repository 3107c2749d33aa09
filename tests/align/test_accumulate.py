"""In which format experts' results are added up, read off the trainer's own ops."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from graphalign.align.accumulate import summed_in
from graphalign.capture.training import record_forward
from graphalign.ir.training import TrainingGraph
from graphalign.rules import rules_dir
from graphalign.sites.find import diff
from tests.breadth.captured import captures, report

WIDTH, CHOSEN = 8, 2


class Experts(nn.Module):
    """Adds up two results per token as `how` says, from weights in `dtype`."""

    def __init__(self, how: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH, dtype=dtype)
        self.how = how

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)[0]
        results = torch.stack([x * 3, x * 5], 1)
        if self.how == "sum":
            return results.sum(1).to(x.dtype)[None]
        if self.how == "neither":
            return results[:, 0].tanh()[None]
        out = torch.zeros_like(x, dtype=torch.float32 if self.how == "upcast" else x.dtype)
        rows = torch.arange(x.shape[0])
        for k in range(CHOSEN):
            out.index_add_(0, rows, results[:, k].to(out.dtype))
        return out.to(x.dtype)[None]


def recorded(how: str, dtype: torch.dtype) -> TrainingGraph:
    return record_forward(Experts(how, dtype), ids=[1, 2, 3, 4], logprobs=None)


@pytest.mark.parametrize(
    ("how", "dtype", "found"),
    [
        ("index_add", torch.bfloat16, "bfloat16"),
        ("index_add", torch.float32, "float32"),
        ("upcast", torch.bfloat16, "float32"),
        ("sum", torch.bfloat16, "float32"),
        ("neither", torch.bfloat16, ""),
    ],
)
def test_the_format_of_the_last_additions(how: str, dtype: torch.dtype, found: str) -> None:
    graph = recorded(how, dtype)
    result = next(o for n in graph.nodes for o in n.outputs if o is not None and o.id == graph.outputs[0])
    assert summed_in(list(graph.nodes), result) == found


def test_a_difference_is_unpatchable_and_said(tmp_path: Path) -> None:
    """Transformers' grouped experts and vLLM's CPU kernel both add up in FP32; if the kernel did in BF16, that would be listed."""
    assert [e for e in report("mixtral").unpatchable if e.what == "composite"] == []
    rules = tmp_path / "rules"
    shutil.copytree(rules_dir(), rules)
    moe = rules / "ops" / "moe.yaml"
    assert "sums: float32" in moe.read_text()
    moe.write_text(moe.read_text().replace("sums: float32", "sums: bfloat16"))
    found = [e for e in diff(*captures("mixtral"), rules=rules).unpatchable if e.what == "composite"]
    assert [e.reason for e in found] == ["inside it, the trainer adds up the experts' results in float32, the engine's kernel in bfloat16"]
    assert found[0].count == len(found[0].layers) > 1
