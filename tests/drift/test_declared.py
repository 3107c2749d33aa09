"""Custom kernels whose rule declares their inside: what the declaration gives, when it does not apply, and that the kernel does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphalign.dataflow.declared import DECLARED, expand
from graphalign.dataflow.opaque import OpaqueOp, load_opaque_ops
from graphalign.drift.compare import drift
from graphalign.ir.inference import Graph, InferenceGraph, Node
from graphalign.rules import rules_dir
from graphalign.sites.find import diff
from tests.drift.data import capture, report, sites
from tests.fixtures import recorded

ROTARY = "_C.rotary_embedding.default"


def calls(graph: InferenceGraph) -> list[Node]:
    return [n for g in graph.graphs for k in g.kernels for n in k.nodes if n.op == ROTARY]


def rules(**change: Any) -> dict[str, OpaqueOp]:
    known = load_opaque_ops(rules_dir())
    computes = known[ROTARY].computes
    assert computes is not None
    return {**known, ROTARY: known[ROTARY].model_copy(update={"computes": computes.model_copy(update=change)})}


def test_every_call_becomes_a_loop_per_rotated_tensor() -> None:
    before = capture("qwen3.rotary")
    after = expand(before, load_opaque_ops(rules_dir()))
    assert len(calls(before)) == 6
    assert calls(after) == []
    kernels = [k for g in after.graphs for k in g.kernels if k.kind == DECLARED]
    assert [len(k.nodes) for k in kernels] == [2] * 6
    assert {k.generated for k in kernels} == {ROTARY}


def test_its_edges_are_judged_and_everything_agrees_with_the_engine() -> None:
    """Behind the kernel nothing is lost, and the norm in front of it rounds where the trainer rounds."""
    found = report("qwen3.rotary")
    for bucket in (found.leftovers, found.undetermined, found.conflicting, found.unpatchable, found.semantic):
        assert bucket == ()
    assert found.stats["check"]["lowest_with_sites"] == 1.0
    (rope,) = [g for g in found.groups if g.name == "rope"]
    assert sorted((s.producer.text, s.layers) for s in rope.sites) == [
        (text, (0, 1, 2, 3, 4, 5)) for text in ("k * cos", "q * cos", "rotate_half(k) * sin", "rotate_half(q) * sin")
    ]
    other = {g.name: sum(s.count for s in g.sites) for g in report("qwen3").groups if g.name != "rope"}
    assert {g.name: sum(s.count for s in g.sites) for g in found.groups if g.name != "rope"} == other


def test_slices_of_the_merged_projection_are_rotated_too() -> None:
    """Without Q/K norms the kernel reads what GEMMs stored: nothing moves."""
    assert len(calls(capture("qwen2.rotary"))) == 6
    found = report("qwen2.rotary")
    assert found.stats["check"]["lowest_with_sites"] == 1.0
    assert drift(sites("qwen2"), sites("qwen2.rotary")).verdict == "right"


@pytest.mark.parametrize("change", [{"device": "cuda"}, {"only": {"is_neox": False}}, {"positions": "key"}, {"head_size": "is_neox"}])
def test_a_call_that_the_declaration_does_not_cover_stays_opaque(change: dict[str, Any]) -> None:
    before = capture("qwen3.rotary")
    assert len(calls(expand(before, rules(**change)))) == 6


def _sliced(graph: Graph) -> Graph:
    """Query and key as slices of one buffer, as engines without Q/K norms pass them."""

    def change(node: Node) -> Node:
        if node.op != ROTARY:
            return node
        args = {**dict(node.args), "key": {"b": "qkv", "size": ["s72", "64"], "stride": ["256", "1"], "offset": "128"}}
        args["query"] = {"b": "qkv", "size": ["s72", "128"], "stride": ["256", "1"], "offset": "0"}
        return node.model_copy(update={"args": tuple(args.items())})

    whole = graph.buffers[0].model_copy(update={"name": "qkv", "size": ("s72", "256"), "stride": ("256", "1"), "view_of": None})
    kernels = tuple(k.model_copy(update={"nodes": tuple(change(n) for n in k.nodes)}) for k in graph.kernels)
    return graph.model_copy(update={"kernels": kernels, "buffers": (*graph.buffers, whole)})


def test_slices_of_one_buffer_are_rotated_and_the_rest_is_handed_on() -> None:
    before = capture("qwen3.rotary")
    before = before.model_copy(update={"graphs": tuple(_sliced(g) for g in before.graphs)})
    after = expand(before, load_opaque_ops(rules_dir()))
    first = next(k for g in after.graphs for k in g.kernels if k.kind == DECLARED)
    assert [n.buffers[0] for n in first.nodes] == ["qkv"] * 3
    copy, query, key = (after.bodies[n.body or ""] for n in first.nodes)
    assert copy.indexing == {"at": "256*p0 + p1"}
    assert query.indexing["at_x"] == "256*p0 + 32*p1 + 0 + p2"
    assert key.indexing["at_y"] == "256*p0 + 32*p1 + 128 + p2 + 16"


def test_without_the_declaration_the_op_is_opaque_and_says_so() -> None:
    known = load_opaque_ops(rules_dir())
    assert known[ROTARY].inside.startswith("reads query, key and cos_sin_cache in the model's dtype")
    graph = capture("qwen3.rotary")
    assert expand(graph, {**known, ROTARY: known[ROTARY].model_copy(update={"computes": None})}) is graph
    assert expand(capture("qwen3"), known) is capture("qwen3")
    assert diff(graph, recorded.captures("qwen3")[1]).leftovers == ()


@pytest.mark.vllm
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary", [64, 32])
def test_the_kernel_does_what_its_rule_declares(neox: bool, rotary: int) -> None:
    """Bitwise: operands in BF16, products and sum in FP32, one rounding; the negated hypotheses differ."""
    pytest.importorskip("vllm._custom_ops")
    torch.manual_seed(0)
    tokens, heads, head = 7, 3, 64
    table = torch.randn(128, rotary).to(torch.bfloat16)
    positions = torch.tensor([0, 1, 2, 30, 64, 99, 127])
    tensors = [torch.randn(tokens, n * head).to(torch.bfloat16) for n in (heads, 1)]
    rotated = [t.clone() for t in tensors]
    torch.ops._C.rotary_embedding(positions, rotated[0], rotated[1], head, table, neox)

    def emulate(t: torch.Tensor, every: bool) -> torch.Tensor:
        out = t.view(tokens, -1, head).clone()
        half, x = rotary // 2, t.view(tokens, -1, head).float()
        a, b = (x[..., :half], x[..., half:rotary]) if neox else (x[..., 0:rotary:2], x[..., 1:rotary:2])
        cos, sin = (c.float()[:, None] for c in (table[positions, :half], table[positions, half:]))
        products = [a * cos, b * sin, b * cos, a * sin]
        p = [q.to(torch.bfloat16).float() for q in products] if every else products
        first, second = (p[0] - p[1]).to(torch.bfloat16), (p[2] + p[3]).to(torch.bfloat16)
        if neox:
            out[..., :half], out[..., half:rotary] = first, second
        else:
            out[..., 0:rotary:2], out[..., 1:rotary:2] = first, second
        return out.view_as(t)

    for t, got in zip(tensors, rotated, strict=True):
        assert torch.equal(got, emulate(t, every=False))
        assert not torch.equal(got, emulate(t, every=True))


@pytest.mark.vllm
def test_the_experts_kernel_adds_up_in_fp32() -> None:
    """Three experts give constants (their biases), times FP32 routing weights: no product and no sum is rounded before the store."""
    ops = pytest.importorskip("vllm._custom_ops")
    experts, width, inner = 3, 64, 64
    assert load_opaque_ops(rules_dir())["_C.cpu_fused_moe.default"].sums == "float32"

    def run(constants: list[float], weights: list[float]) -> float:
        packed = [
            ops.cpu_prepack_moe_weight(torch.zeros(experts, *shape, dtype=torch.bfloat16), "vec")
            for shape in ((2 * inner, width), (width, inner))
        ]
        biases = [torch.zeros(experts, 2 * inner), torch.tensor(constants)[:, None].expand(experts, width)]
        out = torch.empty(1, width, dtype=torch.bfloat16)
        routing = torch.tensor([weights], dtype=torch.float32), torch.arange(experts, dtype=torch.int32)[None]
        ops.cpu_fused_moe(out, torch.ones_like(out), *packed, *(b.bfloat16().contiguous() for b in biases), *routing, "silu", "vec")
        assert out.unique().numel() == 1
        return out[0, 0].item()

    assert run([1, 2**-8, 2**-8], [1, 1, 1]) == 1 + 2**-7  # 1 if each sum were rounded
    other = 2**-9 + 2**-12
    exact = (1 + 2**-7) * (1 + 2**-9) + other
    rounded = torch.tensor((1 + 2**-7) * (1 + 2**-9)).bfloat16().item() + other
    to_bf16 = [torch.tensor(x).bfloat16().item() for x in (exact, rounded)]
    assert to_bf16[0] != to_bf16[1]
    assert run([1 + 2**-7, 1, 0], [1 + 2**-9, other, 0]) == to_bf16[0]
