"""Reading the engine's values: bounds, order, and distances."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from graphalign.capture import engine_script
from graphalign.errors import CaptureFileError
from graphalign.proof.replay import ulp_distance
from graphalign.proof.values import read_values
from tests.fixtures.recorded import captures


def _calls() -> list[dict[str, str]]:
    graph = captures("qwen3")[0]
    nodes = [n for g in graph.graphs for k in g.kernels for n in k.nodes if n.kind == "extern" and n.op != "inductor.multi_output"]
    return [{"op": n.op} for n in nodes]


def _write(path: Path, tensors: dict[str, torch.Tensor], calls: list[dict[str, str]]) -> None:
    meta = {"format": "graphalign.values", "version": "1", "tokens": "[1, 2, 3]", "calls": json.dumps(calls)}
    engine_script.write_tensors(str(path), tensors, meta)


def test_values_are_assigned_to_the_extern_nodes(tmp_path: Path) -> None:
    graph = captures("qwen3")[0]
    x = torch.randn(3, 128).bfloat16()
    _write(tmp_path / "v", {"0.mat1": x, "0.out": x * 2, "output": x}, _calls())
    values = read_values(tmp_path / "v", graph)
    first = next(n for g in graph.graphs for k in g.kernels for n in k.nodes if n.kind == "extern")
    assert values.tokens == (1, 2, 3)
    assert torch.equal(values.reads[first.name, "mat1"], x)
    assert torch.equal(values.writes[first.name], x * 2)
    assert values.output is not None
    assert torch.equal(values.output, x)


def test_calls_in_another_order_are_refused(tmp_path: Path) -> None:
    _write(tmp_path / "v", {}, list(reversed(_calls())))
    with pytest.raises(CaptureFileError, match="in another order"):
        read_values(tmp_path / "v", captures("qwen3")[0])


@pytest.mark.parametrize(
    "damage", [lambda d: d[:20], lambda d: b"\xff" * 8 + d[8:], lambda d: d[:-40], lambda d: b"", lambda d: d.replace(b"BF16", b"NOPE")]
)
def test_damaged_files_are_refused(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    _write(tmp_path / "v", {"0.out": torch.randn(8, 8).bfloat16()}, _calls())
    (tmp_path / "v").write_bytes(damage((tmp_path / "v").read_bytes()))
    with pytest.raises(CaptureFileError, match="engine values"):
        read_values(tmp_path / "v", captures("qwen3")[0])


def test_ulp_distance_counts_representable_numbers_between() -> None:
    one = torch.tensor([1.0]).bfloat16()
    following = (one.view(torch.int16) + 1).view(torch.bfloat16)
    assert ulp_distance(one, one) == 0
    assert ulp_distance(one, following) == 1
    assert ulp_distance(torch.tensor([0.0]).bfloat16(), torch.tensor([-0.0]).bfloat16()) == 0
    tiny = torch.tensor([1], dtype=torch.int16).view(torch.bfloat16)
    assert ulp_distance(tiny, -tiny) == 2
