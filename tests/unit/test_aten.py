"""Ops by name: exactly the recorded overload, or none."""

from __future__ import annotations

import pytest

from graphalign.errors import UnsupportedOpError
from graphalign.evaluate.aten import resolve
from tests.breadth.captured import CAPTURES
from tests.breadth.captured import captures as recorded


@pytest.mark.parametrize("op", ["aten.add.Quaternion", "aten.sum.over_tokens", "aten.mul.", "aten.clamp.default2", "aten.add.__name__"])
def test_an_overload_that_does_not_exist_is_not_another_one(op: str) -> None:
    with pytest.raises(UnsupportedOpError, match="not an op that graphalign can evaluate"):
        resolve(op)


def test_in_place_and_functional_are_the_same_op() -> None:
    assert resolve("aten.add_.Tensor") is resolve("aten.add.Tensor")


def test_every_recorded_op_has_its_overload() -> None:
    """What the trainers of all recorded models call is evaluated as recorded, or it is an anchor, or known not to be evaluated."""
    import torch

    for path in CAPTURES.glob("*.train.json.gz"):
        for node in recorded(path.name.removesuffix(".train.json.gz"))[1].nodes:
            space, _, rest = node.op.partition(".")
            if space == "aten":
                try:
                    found = resolve(node.op)
                except UnsupportedOpError:
                    continue
                assert isinstance(found, torch._ops.OpOverload)
                assert found._overloadname == rest.split(".")[1], node.op
