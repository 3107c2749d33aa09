"""`graphalign.load_graph`: a capture as a networkx graph."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest

import graphalign
from graphalign.errors import CaptureFileError
from tests.fixtures import recorded


@pytest.mark.parametrize(("side", "gate", "rounded"), [(0, "gate_up_proj", 0), (1, "gate_proj", 3)], ids=["inference", "training"])
def test_what_is_rounded_between_two_gemms_is_a_question_for_networkx(side: int, gate: str, rounded: int) -> None:
    """The engine rounds nothing between `o_proj` and the MLP; the trainer the sum, the normalised value and its product."""
    graph = graphalign.load_graph(recorded.paths("qwen3")[side])
    assert graph.graph["side"] == ("inference", "training")[side]
    gemms = {d["module"]: n for n, d in graph.nodes(data=True) if d["target"] == "gemm"}
    between = nx.descendants(graph, gemms["model.layers.2.self_attn.o_proj"]) & nx.ancestors(graph, gemms[f"model.layers.2.mlp.{gate}"])
    found = [formats for _, _, formats in graph.subgraph(between).edges(data="roundings") if formats]
    assert found == [("bfloat16",)] * rounded
    assert nx.is_directed_acyclic_graph(graph)


def test_its_nodes_are_those_of_a_report() -> None:
    inference, training = recorded.paths("qwen3")
    report = recorded.report("qwen3")
    sites = [s for g in report.groups for s in g.sites]
    evidence = {n for s in sites for e in s.evidence for n in (e.producer, e.consumer)}
    assert evidence
    assert evidence <= set(graphalign.load_graph(inference))
    assert {n.name for n in report.nodes if n.side == "training"} <= set(graphalign.load_graph(training))


def test_what_is_no_capture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"format": "graphalign.sites"}')
    with pytest.raises(CaptureFileError, match="is no capture"):
        graphalign.load_graph(tmp_path / "x.json")
