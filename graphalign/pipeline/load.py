"""A capture as a graph to ask questions of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import networkx as nx

from graphalign.errors import CaptureFileError

if TYPE_CHECKING:
    from graphalign.ir.dataflow import Dataflow

FORMATS = {"graphalign.inference": "inference", "graphalign.training": "training"}


def load_graph(file: str | Path, *, rules: str | Path | None = None) -> nx.MultiDiGraph:
    """The dataflow of a capture, either side: ops joined by edges that carry roundings.

    Casts, views, stores and loads are not nodes: they are what an edge passes through.

    Args:
        file: `inference.json.gz` or `training.json.gz`, as `find` leaves them.
        rules: folder of rules, for what the engine's opaque ops read and return; None for those that ship with graphalign.

    Returns:
        Nodes are named as in `sites.json`, in execution order, with `kind` ("op", "anchor", "parameter", "table", "input", "output"),
        `target` (what it computes: "mul", "aten.mul.Tensor", "gemm", a parameter's name), `module`, `dtype` and `kernel` (inference).
        Edges go from a producer to a reader, with `slot` (the reader's operand), `roundings` (the formats that the value is rounded to
        on the way, in order) and `via` (buffers that it passes through). An operand that several producers fill has several edges.
        Of the graph: `side`, `notes`.

    Raises:
        CaptureFileError: the file is no capture.
    """
    flow = read_flow(file, rules)
    graph = nx.MultiDiGraph(side=flow.side, notes=flow.notes)
    for op in flow.ops:
        graph.add_node(op.name, kind=op.kind, target=op.target, module=op.module, dtype=op.dtype, kernel=op.where)
    for producer, reader, (slot, _), ref in flow.graph.edges(keys=True, data="ref"):
        tail, head = flow.ops[producer].name, flow.ops[reader].name
        graph.add_edge(tail, head, slot=slot, roundings=ref.roundings, via=ref.via)
    return graph


def read_flow(file: str | Path, rules: str | Path | None = None) -> Dataflow:
    """The traced dataflow of a capture file, as the comparison sees it."""
    from graphalign.dataflow import trace_inference, trace_training
    from graphalign.dataflow.opaque import load_opaque_ops
    from graphalign.dataflow.ranges import decode_range
    from graphalign.dataflow.returns import unwrap
    from graphalign.ir.files import load_raw, read_json
    from graphalign.ir.inference import InferenceGraph
    from graphalign.ir.training import TrainingGraph
    from graphalign.ir.verify import verify_inference, verify_training
    from graphalign.rules import rules_dir

    raw = load_raw(file, kind="capture")
    side = FORMATS.get(str(raw.get("format"))) if isinstance(raw, dict) else None
    if side == "training":
        training = read_json(file, TrainingGraph, kind="training capture")
        verify_training(training)
        return trace_training.Tracer(training).run()
    if side == "inference":
        inference, folder = read_json(file, InferenceGraph, kind="inference capture"), rules_dir(rules)
        verify_inference(inference)
        known = load_opaque_ops(folder)
        return trace_inference.Tracer(unwrap(decode_range(inference, folder, None)[0], known), known).run()
    raise CaptureFileError(
        f"{file} is no capture", where=str(file), hint="give inference.json.gz or training.json.gz, as `find` leaves them"
    )
