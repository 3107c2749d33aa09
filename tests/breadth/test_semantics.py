"""One side is made to compute something else: the diff names it, and nothing behind it is a site."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphalign.capture.training import record_forward
from graphalign.engines.examples import resolve_model
from graphalign.engines.trainer import build_trainer
from graphalign.ir.inference import Attention, Parameter
from graphalign.ir.training import Node, TrainingGraph
from graphalign.sites.find import diff
from tests.breadth.captured import captures, counts, report
from tests.fixtures import recorded


def edited(
    training: TrainingGraph, wanted: Callable[[Node], bool], change: Callable[[Node], Node], first: int | None = None
) -> TrainingGraph:
    """The capture with the first (or every) wanted node changed."""
    hits = [n for n, node in enumerate(training.nodes) if wanted(node)][:first]
    assert hits
    return training.model_copy(update={"nodes": tuple(change(x) if n in hits else x for n, x in enumerate(training.nodes))})


def replaced(node: Node, old: Any, new: Any) -> Node:
    """A node with one argument replaced."""
    return node.model_copy(update={"args": tuple(new if a == old else a for a in node.args)})


@pytest.mark.parametrize(
    ("name", "field", "value", "what"),
    [
        ("phi3", "scale", 0.5, "attention scale"),
        ("phi3", "window", 7, "attention window"),
        ("gemma2_eager", "window", None, "attention window"),
        ("gemma2_eager", "softcap", 30.0, "attention soft-cap"),
        ("gpt_oss", "sinks", False, "attention sinks"),
    ],
)
def test_attention_parameters(name: str, field: str, value: Any, what: str) -> None:
    inference, training = captures(name)

    def change(a: Attention) -> Attention:
        return a.model_copy(update={field: value}) if a.heads else a

    found = diff(inference.model_copy(update={"attention": tuple(change(a) for a in inference.attention)}), training)
    assert {e.what for e in found.semantic} == {what}


def test_a_window_that_no_sequence_exceeds_is_none() -> None:
    inference, training = captures("phi3")
    wide = tuple(a.model_copy(update={"window": 1 << 20}) for a in inference.attention)
    assert diff(inference.model_copy(update={"attention": wide}), training).semantic == ()


CHANGES: dict[str, tuple[str, Callable[[Node], bool], Callable[[Node], Node]]] = {
    "epsilon": ("phi3", lambda n: n.op == "aten.add.Tensor" and 1e-05 in n.args, lambda n: replaced(n, 1e-05, 2e-05)),
    "activation": ("phi3", lambda n: n.op == "aten.silu.default", lambda n: n.model_copy(update={"op": "aten.gelu.default"})),
    "sign": ("phi3", lambda n: n.op == "aten.neg.default", lambda n: n.model_copy(update={"op": "aten.alias.default"})),
    "multiplier": ("granite", lambda n: n.op == "aten.mul.Tensor" and 0.22 in n.args, lambda n: replaced(n, 0.22, 0.25)),
    "top-k renormalisation": (
        "qwen3_moe",
        lambda n: n.op == "aten.div_.Tensor",
        lambda n: n.model_copy(update={"op": "aten.add_.Tensor"}),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_op_of_one_layer(change: str) -> None:
    name, wanted, edit = CHANGES[change]
    inference, training = captures(name)
    found = diff(inference, edited(training, wanted, edit, first=1))
    whole = report(name)
    assert found.semantic, "the change was not noticed"
    assert found.sites <= whole.sites
    known = {(s.producer.module, s.producer.ordinal, s.consumer.module, s.consumer.ordinal, s.kind) for g in whole.groups for s in g.sites}
    for group in found.groups:
        for s in group.sites:
            assert (s.producer.module, s.producer.ordinal, s.consumer.module, s.consumer.ordinal, s.kind) in known


def test_a_bias_on_one_side_only() -> None:
    inference, training = captures("starcoder2")

    def drop(node: Any) -> Any:
        args = tuple((k, None if k == "bias" else a) for k, a in node.args)
        return node.model_copy(update={"args": args}) if node.op.startswith("_C.") else node

    graphs = tuple(
        g.model_copy(update={"kernels": tuple(k.model_copy(update={"nodes": tuple(drop(n) for n in k.nodes)}) for k in g.kernels)})
        for g in inference.graphs
    )
    found = diff(inference.model_copy(update={"graphs": graphs}), training)
    assert {e.what for e in found.semantic} == {"gemm bias"}


def inserted(
    training: TrainingGraph, before: Callable[[Node], bool], op: str, args: Callable[[dict[str, int]], tuple[Any, ...]]
) -> TrainingGraph:
    """The capture with an op put between the first wanted node and its first operand."""
    at = next(n for n, node in enumerate(training.nodes) if before(node))
    node = training.nodes[at]
    values = {i.value.id: i.value for i in training.inputs} | {o.id: o for x in training.nodes for o in x.outputs if o is not None}
    old = node.args[0]["v"]
    new = values[old].model_copy(update={"id": max(values) + 1})
    extra = node.model_copy(update={"op": op, "args": args({"v": old}), "kwargs": {}, "outputs": (new,)})
    reader = node.model_copy(update={"args": ({"v": new.id}, *node.args[1:])})
    return training.model_copy(update={"nodes": (*training.nodes[:at], extra, reader, *training.nodes[at + 1 :])})


@pytest.mark.parametrize(
    ("op", "args"), [("aten.neg.default", lambda v: (v,)), ("aten.flip.default", lambda v: (v, [1]))], ids=["sign", "heads swapped"]
)
def test_what_the_value_join_cannot_see(op: str, args: Callable[[dict[str, int]], tuple[Any, ...]]) -> None:
    """All of a query negated, or its heads in another order: the check sees it, and the query's region has no sites."""
    inference, training = captures("phi3")
    found = diff(inference, inserted(training, lambda n: n.op == "graphalign.attention", op, args))
    assert [e.what for e in found.semantic] == ["attention"]
    assert "another sign or in another place" in found.semantic[0].reason
    assert found.semantic[0].layers == (0,)
    assert found.sites == report("phi3").sites - 2  # the query's two products in layer 0; the key's stay


def test_rows_in_another_order_on_one_side_only() -> None:
    """Bloom's merged queries, keys and values, as if the engine had not regrouped them."""
    inference, training = captures("bloom")
    assert any(s.order for p in inference.parameters for s in p.segments)

    def flat(p: Parameter) -> Parameter:
        return p.model_copy(update={"segments": tuple(s.model_copy(update={"order": ()}) for s in p.segments)})

    found = diff(inference.model_copy(update={"parameters": tuple(map(flat, inference.parameters))}), training)
    assert "attention" in {e.what for e in found.semantic}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
    ],
    ids=lambda s: str(s["rope_type"]),
)
def test_rope_scaling_on_one_side_only(scaling: dict[str, Any], tmp_path: Path) -> None:
    """The tables differ over the whole range of positions; what reads them is no site."""
    folder = tmp_path / "qwen3"
    shutil.copytree(resolve_model("example:qwen3", tmp_path / "cache"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {**(config.get("rope_parameters") or {}), "rope_theta": 10000.0, **scaling}
    (folder / "config.json").write_text(json.dumps(config))
    found = diff(recorded.captures("qwen3")[0], record_forward(build_trainer(folder)))
    assert found.semantic, "the change was not noticed"
    assert all("rotary" in e.what + e.reason + e.where or "cos" in e.what + e.reason + e.where for e in found.semantic)
    whole = counts(recorded.report("qwen3"))
    assert "rope" not in counts(found)
    assert {k: n for k, n in counts(found).items() if k != "norm_weight"} == {
        k: n for k, n in whole.items() if k not in ("rope", "norm_weight")
    }
