"""The inside of composite anchors: what the engine's op gave for drawn weights and inputs, against the trainer's recorded subgraph.

The trainer is changed in its capture, one op at a time, in ways that public bug reports describe. `inside` holds captures of the recipes of
`models.yaml`; its Qwen3-Next has heads of 128 elements (one for keys, two for values): vLLM's delta net on the CPU has no kernel for 32;
its LFM2 names the width of its convolution, which vLLM 0.32 reads. Every second mixer of Zamba 2 is a module deeper than the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphalign.align.align import align, prepare
from graphalign.align.inside import compare_inside
from graphalign.ir.files import read_json
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import Node, TrainingGraph
from graphalign.rules import rules_dir
from graphalign.sites.find import diff
from graphalign.sites.why import explain
from tests.breadth import captured

INSIDE = Path(__file__).parent / "inside"
Change = Callable[[Node], Node]


@functools.cache
def captures(name: str) -> tuple[InferenceGraph, TrainingGraph]:
    if not (INSIDE / f"{name}.inf.json.gz").exists():
        return captured.captures(name)
    sides = INSIDE / f"{name}.inf.json.gz", INSIDE / f"{name}.train.json.gz"
    return read_json(sides[0], InferenceGraph, kind="inference capture"), read_json(sides[1], TrainingGraph, kind="training capture")


def dropped(operand: int = 0) -> Change:
    """The op hands on one of its operands."""
    return lambda node: node.model_copy(update={"op": "aten.clone.default", "args": (node.args[operand],), "kwargs": {}})


def constant(old: Any, new: Any) -> Change:
    return lambda node: node.model_copy(update={"args": tuple(new if a == old else a for a in node.args)})


def other(op: str) -> Change:
    return lambda node: node.model_copy(update={"op": op})


def edited(training: TrainingGraph, module: str, op: str, change: Change, ordinal: int | None = None) -> TrainingGraph:
    """The capture with an op of a module changed: one of them in every layer, or all."""
    seen: dict[str, int] = {}
    nodes, hits = [], 0
    for node in training.nodes:
        if node.op == op and node.module.endswith(module):
            n = seen[node.module] = seen.get(node.module, -1) + 1
            if ordinal is None or n == ordinal:
                nodes.append(change(node))
                hits += nodes[-1] != node
                continue
        nodes.append(node)
    assert hits
    return training.model_copy(update={"nodes": tuple(nodes)})


@pytest.mark.parametrize("name", ["gpt_oss", "lfm2", "nemotron_h", "qwen3_moe", "qwen3_next", "zamba2"])
def test_stock_trainers_are_the_same_function(name: str) -> None:
    found = diff(*captures(name))
    assert found.semantic == ()
    assert found.assumed == ()
    composite = next(n for n in found.nodes if n.side == "training" and n.target == "composite")
    said = explain(found, composite.name)
    assert "the same function: run on the same inputs with the same weights" in said


DEVIATIONS: dict[str, tuple[str, str, str, Change, int | None]] = {
    "another alpha": ("gpt_oss", ".experts", "aten.mul.Tensor", constant(1.702, 1.0), None),
    "another limit": ("gpt_oss", ".experts", "aten.clamp.default", constant(7.0, 10.0), None),
    "no + 1": ("gpt_oss", ".experts", "aten.add.Tensor", dropped(), None),
    "no softplus": ("nemotron_h", ".mixer", "aten.softplus.default", dropped(), None),
    "no dt_bias": ("nemotron_h", ".mixer", "aten.add.Tensor", dropped(), 0),
    "another dt clamp": ("nemotron_h", ".mixer", "aten.clamp.default", constant(0.001, 0.1), None),
    "A is positive": ("nemotron_h", ".mixer", "aten.neg.default", dropped(), None),
    "no activation behind the convolution": ("nemotron_h", ".mixer", "aten.silu.default", dropped(), None),
    "no gate behind the short convolution": ("lfm2", ".conv", "aten.mul.Tensor", dropped(1), 1),
    "no softplus where the mixer is deeper inside": ("zamba2", ".mamba_decoder.mamba", "aten.softplus.default", dropped(), None),
    "another activation in the experts": ("qwen3_moe", ".act_fn", "aten.silu.default", other("aten.relu.default"), None),
    "no routing weights": ("qwen3_moe", ".experts", "aten.mul.Tensor", dropped(), 1),
    "no l2norm of the query": ("qwen3_next", ".linear_attn", "aten.rsqrt.default", dropped(), 0),
    "no decay": ("qwen3_next", ".linear_attn", "aten.softplus.default", dropped(), None),
    "a delta rule without its scale": ("qwen3_next", ".linear_attn", "aten.mul.Tensor", constant(128**-0.5, 1.0), None),
}


@pytest.mark.parametrize("case", DEVIATIONS)
def test_another_function_inside_is_semantic(case: str) -> None:
    name, module, op, change, ordinal = DEVIATIONS[case]
    inference, training = captures(name)
    found = diff(inference, edited(training, module, op, change, ordinal))
    assert {e.what for e in found.semantic} == {"composite function"}
    assert all("another function inside" in e.reason for e in found.semantic)


def test_what_was_not_drawn_is_assumed() -> None:
    inference, training = captures("qwen3_moe")
    renamed = tuple(
        i.model_copy(update={"name": i.name.replace("down_proj", "out_proj")}) if "experts" in i.name else i for i in training.inputs
    )
    pair = prepare(inference, training.model_copy(update={"inputs": renamed}), rules_dir(None))
    found = compare_inside(pair, align(pair))
    assert not found.equal
    assert not found.differing
    assert all("was not given the trainer's parameter" in why for why in found.assumed.values())
