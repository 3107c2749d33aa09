"""A trainer in training mode: what it drops or draws at random is named, and the rest is compared as if it did not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphalign.align.dropped import take_out
from graphalign.capture.training import record_forward
from graphalign.ir.training import Node, TrainingGraph
from graphalign.sites.find import diff
from tests.breadth.captured import captures, counts, report

NAME = "llama_odd"


def inserted(training: TrainingGraph, module: str, ops: list[tuple[str, tuple[Any, ...]]]) -> TrainingGraph:
    """The capture with ops behind the last one of a module. In their arguments `x` is its value, a number one of theirs."""
    at = max(n for n, node in enumerate(training.nodes) if node.module == module)
    x = training.nodes[at].outputs[0]
    assert x is not None
    names = {"x": x.id} | {n: 10**6 + n for n in range(len(ops))}
    new = []
    for n, (op, args) in enumerate(ops):
        read = tuple({"v": names[a[0]]} if isinstance(a, list) else a for a in args)
        new.append(Node(op=op, args=read, outputs=(x.model_copy(update={"id": names[n]}),), module=f"{module}.dropout"))
    last = names[len(ops) - 1]

    def moved(a: Any) -> Any:
        return {"v": last} if a == {"v": x.id} else [moved(b) for b in a] if isinstance(a, list | tuple) else a

    behind = [n.model_copy(update={"args": tuple(moved(n.args))}) for n in training.nodes[at + 1 :]]
    return training.model_copy(update={"nodes": (*training.nodes[: at + 1], *new, *behind)})


DRAWN = [
    ("aten.empty_like.default", (["x"],)),
    ("aten.bernoulli_.float", ([0], 0.9)),
    ("aten.div_.Scalar", ([1], 0.9)),
    ("aten.mul.Tensor", (["x"], [2])),
]


@pytest.mark.parametrize("ops", [DRAWN, [("aten.native_dropout.default", (["x"], 0.1, True))]])
def test_a_dropout_is_semantic_and_hides_no_site(ops: list[tuple[str, tuple[Any, ...]]]) -> None:
    inference, training = captures(NAME)
    found = diff(inference, inserted(training, "model.layers.1.mlp.down_proj", ops))
    assert [(e.what, e.layers, e.count) for e in found.semantic] == [("dropout", (1,), 1)]
    assert found.semantic[0].where.startswith("model.layers.*.mlp.down_proj.dropout")
    assert "the trainer drops 0.1 of these values" in found.semantic[0].reason
    assert counts(found) == counts(report(NAME))


@pytest.mark.parametrize("op", [("aten.native_dropout.default", (["x"], 0.0, True)), ("aten.native_dropout.default", (["x"], 0.1, False))])
def test_a_dropout_that_drops_nothing_is_none(op: tuple[str, tuple[Any, ...]]) -> None:
    assert take_out(inserted(captures(NAME)[1], "model.layers.1.mlp.down_proj", [op]))[1] == ()


def test_noise_is_semantic() -> None:
    noise = [("aten.zeros_like.default", (["x"],)), ("aten.uniform_.default", ([0], -0.1, 0.1)), ("aten.add.Tensor", (["x"], [1]))]
    found = take_out(inserted(captures(NAME)[1], "model.layers.1.mlp.down_proj", noise))[1]
    assert [d.what for d in found] == ["random numbers"]


def test_as_torch_writes_it() -> None:
    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.drop, self.head = torch.nn.Embedding(32, 16), torch.nn.Dropout(0.25), torch.nn.Linear(16, 32)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.drop(self.embed(input_ids)))

    changed, found = take_out(record_forward(Dropping().train()))
    assert [(d.what, d.node.module) for d in found] == [("dropout", "drop")]
    assert "drops 0.25" in found[0].reason
    assert not any(n.op == "aten.mul.Tensor" for n in changed.nodes)
    assert take_out(record_forward(Dropping().eval()))[1] == ()
