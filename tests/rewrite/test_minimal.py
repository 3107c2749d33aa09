"""The rewriter changes the spec's edges and nothing else; seen in the graphs, and by capturing the patched model again."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx

import graphalign
import graphalign.rewrite.live as live
from graphalign.capture.training import record_forward
from graphalign.engines.dummy import fill_dummy
from graphalign.patch.make import make_spec
from graphalign.patch.spec import PatchSpec
from graphalign.sites.find import diff
from tests.fixtures.recorded import captures
from tests.rewrite.tiny import build, patch, tokens


def kind(node: fx.Node) -> str:
    """What a node computes, in-place forms as their functions."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return {"iadd": "add", "imul": "mul"}.get(name, name)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Counter[str], fx.GraphModule]]:
    """(kinds of nodes before, graph after) of every rewritten graph, in order."""
    seen: list[tuple[Counter[str], fx.GraphModule]] = []
    real = live.rewrite

    def rewrite(gm: fx.GraphModule, *args: Any) -> Any:
        before = Counter(kind(n) for n in gm.graph.nodes)
        out = real(gm, *args)
        seen.append((before, gm))
        return out

    monkeypatch.setattr(live, "rewrite", rewrite)
    return seen


def test_no_anchor_reads_fp32_and_only_casts_were_added(graphs: list[tuple[Counter[str], fx.GraphModule]]) -> None:
    model = build(3)
    patch(model)
    x = tokens(2, 9)
    dtypes: list[tuple[str, str]] = []
    with torch.no_grad():
        model(x, use_cache=False)
        real = torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention
        for _, gm in graphs:
            for node in gm.graph.nodes:
                if node.target in real or node.target is torch._C._nn.linear:
                    for a in node.all_input_nodes:
                        if isinstance(value := a.meta.get("example_value"), torch.Tensor):
                            dtypes.append((f"{kind(node)} of {a.name}", str(value.dtype)))
    assert len(graphs) == 3
    assert len(dtypes) >= 2 * (7 * 2 + 3)
    assert [d for d in dtypes if d[1] != "torch.bfloat16"] == []
    layout = {
        "to",
        "neg",
        "getitem",
        "cat",
        "transpose",
        "float",
        "unsqueeze",
        "type_as",
    }  # casts; and a copy of what carries FP32 to one reader
    for before, gm in graphs:
        after = Counter(kind(n) for n in gm.graph.nodes)
        changed = {k: after[k] - before[k] for k in before | after if after[k] != before[k]}
        assert set(changed) <= layout, changed
        assert gm.graph.find_nodes(op="call_function", target=operator.iadd) == []


def test_rope_alone_changes_only_rope(graphs: list[tuple[Counter[str], fx.GraphModule]]) -> None:
    model = build(2)
    patch(model, ["rope"])
    with torch.no_grad():
        model(tokens(), use_cache=False)
    for _, gm in graphs:
        touched = {
            next(iter((n.meta.get("nn_module_stack") or {"": ("the layer",)}).values()))[0].rsplit(".", 1)[-1]
            for n in gm.graph.nodes
            if n.op == "call_function" and kind(n) in ("mul", "add") and n.meta["example_value"].dtype != node_dtype(gm, n)
        }
        assert touched == {"self_attn"}, touched


def node_dtype(gm: fx.GraphModule, node: fx.Node) -> torch.dtype:
    """The dtype that a node's operands give it now."""
    dtypes = [a.meta["example_value"].dtype for a in node.all_input_nodes if isinstance(a.meta.get("example_value"), torch.Tensor)]
    return torch.float32 if torch.float32 in dtypes else node.meta["example_value"].dtype


# -- the fixed point, on recorded engine captures -----------------------------------------------------------------------


def recorded_model() -> Any:
    """The recorded Qwen3: rounding does not depend on weights, so noise will do."""
    inference, training = captures("qwen3")
    from transformers import Qwen3Config

    layers = training.header.model["layers"]
    config = Qwen3Config(
        vocab_size=training.header.model["vocab"], hidden_size=128, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=training.header.model["max_position_embeddings"],
    )  # fmt: skip
    model = build(cfg=config)
    fill_dummy(model)
    return model, inference, training


def without(spec: PatchSpec, group: str, index: int) -> PatchSpec:
    """A spec less one edit."""
    groups = tuple(
        g.model_copy(update={"edits": tuple(e for i, e in enumerate(g.edits) if (g.name, i) != (group, index))}) for g in spec.groups
    )
    return spec.model_copy(update={"groups": tuple(g for g in groups if g.edits)})


def remaining(model: Any, inference: Any, spec: PatchSpec) -> Counter[str]:
    with graphalign.apply(model, spec, allow_stale=True, trial=False):
        report = diff(inference, record_forward(model))
    assert not report.semantic
    return Counter({g.name: sum(s.count for s in g.sites) for g in report.groups if g.sites})


@pytest.mark.slow
def test_a_dropped_edit_or_group_comes_back_and_nothing_else() -> None:
    model, inference, training = recorded_model()
    spec = make_spec(diff(inference, training))
    sites = Counter({g.name: sum(len(e.pairs()) for e in g.edits) for g in spec.groups})
    assert remaining(model, inference, spec) == Counter()
    for group, index in (("swiglu", 0), ("rope", 2), ("residual_rmsnorm", 0)):
        edit = next(g for g in spec.groups if g.name == group).edits[index]
        assert remaining(model, inference, without(spec, group, index)) == Counter({group: len(edit.pairs())})
    only = spec.model_copy(update={"groups": tuple(g for g in spec.groups if g.name in ("rope", "residual_stream"))})
    assert remaining(model, inference, only) == sites - Counter({n: sites[n] for n in ("rope", "residual_stream")})
