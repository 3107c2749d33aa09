"""Lowering for a GPU that isn't there, and the generated kernels run in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from graphalign.capture.inference import capture_inference
from graphalign.engines.examples import resolve_model
from graphalign.engines.kernel_check import check_kernels
from graphalign.errors import KernelMismatchError
from graphalign.ir.files import read_json
from graphalign.ir.inference import InferenceGraph, Node
from graphalign.rules import rules_dir

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
CASES = ("norm:1024", "norm:4096", "stored:1024", "stored:4096", "stored:16384", "realised:1024", "realised:4096")


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lowered")
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    subprocess.run([sys.executable, str(HERE / "lower.py"), str(out), *CASES], check=True, env=environment, timeout=600)
    return out


@pytest.fixture(scope="module")
def capture(lowered: Path) -> InferenceGraph:
    return read_json(lowered / "capture.json", InferenceGraph, kind="inference capture")


def nodes(capture: InferenceGraph, case: str) -> list[Node]:
    return [n for k in capture.graphs[CASES.index(case)].kernels for n in k.nodes]


@pytest.mark.parametrize(("case", "looped"), [("norm:1024", False), ("norm:4096", True), ("stored:16384", True)])
def test_wide_reductions_are_looped(capture: InferenceGraph, case: str, looped: bool) -> None:
    kernel = capture.graphs[CASES.index(case)].kernels[0].generated
    assert kernel.startswith("triton_red" if looped else "triton_per")


@pytest.mark.parametrize("case", ["stored:1024", "realised:1024"])
def test_a_persistent_reduction_reads_its_sum_from_registers(capture: InferenceGraph, case: str) -> None:
    assert all("buf0" in n.forwarded and not n.reloaded for n in nodes(capture, case)[1:])


@pytest.mark.parametrize("case", ["stored:4096", "stored:16384", "realised:4096"])
def test_the_second_loop_reloads_the_sum(capture: InferenceGraph, case: str) -> None:
    """One BF16 buffer, read unrounded in the first loop and rounded in the second."""
    first, second = nodes(capture, case)[1:]
    assert first.forwarded == ("buf0",)
    assert second.reloaded == ("buf0",)


def test_the_kernels_agree_with_the_map_and_with_no_other(lowered: Path, capture: InferenceGraph) -> None:
    report = check_kernels(capture, lowered, rules_dir())
    assert not report.skipped
    assert len(report.kernels) == len(CASES)
    assert all(k.ok and k.choice["negated"] for k in report.kernels)
    swapped = {CASES[int(k.piece.removeprefix("piece")) - 1] for k in report.kernels if k.choice["swapped"]}
    assert {"stored:1024", "stored:4096", "stored:16384"} <= swapped


def test_a_wrong_map_is_an_error(lowered: Path, capture: InferenceGraph) -> None:
    data = capture.model_dump()
    for graph in data["graphs"]:
        for kernel in graph["kernels"]:
            for node in kernel["nodes"]:
                node["forwarded"], node["reloaded"] = node["reloaded"], node["forwarded"]
    with pytest.raises(KernelMismatchError, match="do not round where the captured map says"):
        check_kernels(InferenceGraph.model_validate(data), lowered, rules_dir())


def test_a_model_is_lowered_by_vllms_own_backend(tmp_path: Path) -> None:
    stages: dict[str, int] = defaultdict(int)
    found = capture_inference(
        resolve_model("example:qwen3"),
        tmp_path / "inf.json.gz",
        layers=2,
        target="h100",
        keep_kernels=tmp_path / "kernels",
        progress=lambda stage, _: stages.__setitem__(stage, stages[stage] + 1),
    )
    assert list(stages) == ["start", "probe", "load", "compile", "write"]
    assert found.header.simulated
    assert found.header.model["layers"] == 2
    assert not [n for n in found.header.notes if "could not" in n]
    report = check_kernels(found, tmp_path / "kernels", rules_dir())
    assert report.ok
    assert not report.skipped
    assert len(report.kernels) >= 9
