"""Clamps that never act on ordinary inputs: inputs are chosen so that they act, and what no input reaches is listed."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console

from graphalign.align.join import Join
from graphalign.ir.training import Node, TrainingGraph
from graphalign.pipeline.diff import diff
from graphalign.render.page import render_page
from graphalign.render.sites_table import render_table
from graphalign.sites.why import explain
from tests.breadth.captured import captures, counts, report

MODEL = "llama_odd"
NEW = 1 << 20
"""First number of values that are added to a capture."""


def before(training: TrainingGraph, reader: str, *steps: tuple[str, tuple[Any, ...]]) -> TrainingGraph:
    """The capture with steps (op, further arguments) put before every op called `reader`, on its first operand.

    An argument `"previous"` is the result of the step before.
    """
    values = {o.id: o for n in training.nodes for o in n.outputs if o is not None}
    nodes: list[Node] = []
    added = NEW
    for node in training.nodes:
        if node.op == reader:
            v = values[node.args[0]["v"]]
            now, previous = v.id, v.id
            for op, rest in steps:
                dtype = "bool" if op.split(".")[1] in ("isinf", "gt") else v.dtype
                out = v.model_copy(update={"id": added, "dtype": dtype})
                first = {"v": previous} if op.startswith("aten.where") else {"v": now}
                args = (first, *({"v": now} if a == "value" else a for a in rest))
                nodes.append(node.model_copy(update={"op": op, "args": args, "kwargs": {}, "outputs": (out,)}))
                previous = added
                now = added if dtype != "bool" else now
                added += 1
            node = node.model_copy(update={"args": ({"v": now}, *node.args[1:])})
        nodes.append(node)
    return training.model_copy(update={"nodes": tuple(nodes)})


@pytest.mark.parametrize(
    ("op", "rest"),
    [
        ("aten.clamp.default", (None, 7.0)),
        ("aten.clamp.default", (-65504.0, 65504.0)),
        ("aten.clamp_min.default", (-30.0,)),
        ("aten.hardtanh.default", (-10.0, 10.0)),
        ("aten.threshold.default", (-12.0, 0.0)),
    ],
)
def test_a_clamp_of_the_trainer_only_is_semantic(op: str, rest: tuple[Any, ...]) -> None:
    inference, training = captures(MODEL)
    found = diff(inference, before(training, "aten.silu.default", (op, rest)))
    assert {e.what for e in found.semantic} == {op}
    assert "swiglu" not in counts(found)


def test_values_behind_a_limit_are_not_one_missing_value() -> None:
    x = torch.linspace(0.1, 10.0, 4000, dtype=torch.float64)
    join = Join()
    join.key(1, x.clamp(max=7.123))
    join.key(2, x)
    assert not join.inside(1, 2)
    assert join.partners(1, (2,)) == ()


def test_a_guard_against_infinity_is_listed() -> None:
    inference, training = captures(MODEL)
    guarded = before(training, "aten.silu.default", ("aten.isinf.default", ()), ("aten.where.ScalarSelf", (0.0, "value")))
    found = diff(inference, guarded)
    assert counts(found) == counts(report(MODEL))
    listed = [e for e in found.unexercised if e.side == "training"]
    assert [e.what for e in listed] == ["aten.where.ScalarSelf"]
    out = StringIO()
    render_table(found, Console(file=out, width=200))
    assert "not exercised: " in out.getvalue()
    assert "not exercised" in render_page(found)
    assert "not exercised" in explain(found, listed[0].names[0])


def test_ordinary_models_have_none() -> None:
    assert not report(MODEL).unexercised
    assert not report("helium").unexercised
