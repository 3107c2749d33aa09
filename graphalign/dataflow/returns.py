"""Ops that return their result where the rule's version of them writes an argument, and the other way round.

vLLM 0.28's `_C.weight_packed_linear(Tensor(a!) mat1, Tensor(b!) mat2, Tensor(c!)? bias, bool is_vnni) -> Tensor` became
`(Tensor(a!) out, …) -> ()` in 0.30, under the same name. Inductor wraps a returned tensor into `inductor.multi_output`, and takes the
annotations of the old schema, which calls its operands written, at their word.
"""

from __future__ import annotations

from graphalign.dataflow.declared import expand
from graphalign.dataflow.opaque import OpaqueOp
from graphalign.ir.args import references
from graphalign.ir.inference import Graph, InferenceGraph, Kernel, Node


def unwrap(capture: InferenceGraph, rules: dict[str, OpaqueOp]) -> InferenceGraph:
    """The same capture, in which an op that a rule describes defines the one buffer that holds its result.

    Only calls without the rule's `out` argument change: what they return is their result, and they write nothing else. Calls whose
    inside a rule declares become loops, see `declared`.
    """
    capture = expand(capture, rules)
    graphs = tuple(_graph(g, rules) for g in capture.graphs)
    same = all(a is b for a, b in zip(graphs, capture.graphs, strict=True))
    return capture if same else capture.model_copy(update={"graphs": graphs})


def _graph(graph: Graph, rules: dict[str, OpaqueOp]) -> Graph:
    results = {
        node.outputs[0]: node
        for kernel in graph.kernels
        for node in kernel.nodes
        if node.kind == "extern" and node.outputs and _returns(node, rules.get(node.op))
    }
    if not results:
        return graph
    wrappers = {_source(n): n for k in graph.kernels for n in k.nodes if n.op == "inductor.multi_output" and _source(n) in results}

    def own(node: Node) -> Node:
        if not node.outputs or results.get(node.outputs[0]) is not node:
            return node
        wrapper = wrappers.get(node.outputs[0])
        return node.model_copy(update={"outputs": wrapper.outputs if wrapper else node.outputs[:1], "mutates": ()})

    gone = {n.name for n in wrappers.values()}
    kernels: list[Kernel] = []
    for kernel in graph.kernels:
        nodes = tuple(own(n) for n in kernel.nodes if n.name not in gone)
        if nodes:
            kernels.append(kernel.model_copy(update={"nodes": nodes}))
    return graph.model_copy(update={"kernels": tuple(kernels)})


def _returns(node: Node, rule: OpaqueOp | None) -> bool:
    if rule is None or rule.kind not in ("gemm", "attention", "composite"):
        return False
    return (bool(rule.out) or rule.routed) and rule.out not in dict(node.args)


def _source(node: Node) -> str:
    """The call whose only output a `multi_output` picks, empty for one of several."""
    args = dict(node.args)
    return next(iter(references(args.get("self"), "b")), "") if not args.get("indices") else ""
