"""What is recomputed is what the trainer's own kernels rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config

from graphalign.capture.recorder import record
from graphalign.clusters.unrounded import Unrounded, by_token
from graphalign.evaluate.aten import MATMULS, base
from tests.clusters.tiny import TEXT, forward, model


def watch_module(module: nn.Module, x: torch.Tensor) -> tuple[Unrounded, dict[str, Any]]:
    """Record one call; tallies by base op (the last of each)."""
    watch = Unrounded(x.shape[0])
    with record(module, {"x": x}, watch) as recorder:
        out = module(x)
    nodes = recorder.finish([out]).nodes
    return watch, {base(n.op): watch.tallies[v.id] for n in nodes for v in n.outputs if v is not None and v.id in watch.tallies}


class Ops(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x * x[:1], "mul"),
        (lambda x: x + 3.7 * x.flip(0), "add"),
        (lambda x: x / (x.abs() + 0.1), "div"),
        (lambda x: x.float().pow(2).bfloat16(), "_to_copy"),
        (lambda x: torch.empty_like(x).copy_(x.float() * 1.1), "copy"),
        (lambda x: (x + 0).mul_(x.flip(0)), "mul"),
        (lambda x: (x + 0).add_(x.flip(0)), "add"),
        (lambda x: torch.addcmul(x, x, x), "addcmul"),
        (lambda x: torch.clamp(x * 1.5, -1, 1), "mul"),
    ],
)
def test_pointwise_results_round_to_what_torch_returned_always(function: Any, op: str) -> None:
    watch, tallies = watch_module(Ops(function), torch.randn(40, 33, generator=torch.Generator().manual_seed(1)).bfloat16())
    assert watch.unmeasured == {}
    assert tallies[op].n == 40 * 33
    assert tallies[op].agreeing == 40 * 33
    assert tallies[op].exact < 40 * 33 / 2


@pytest.mark.parametrize("function", [torch.nn.functional.silu, torch.nn.functional.gelu, torch.exp, torch.sigmoid])
def test_transcendental_ones_almost_always(function: Any) -> None:
    _, tallies = watch_module(Ops(function), torch.randn(200, 100, generator=torch.Generator().manual_seed(2)).bfloat16())
    (tally,) = tallies.values()
    assert tally.agreeing / tally.n > 0.999


def test_selections_and_copies_are_exact_or_not_looked_at() -> None:
    _, tallies = watch_module(Ops(lambda x: torch.where(x > 0, x, -x).relu()[:, :5].clone()), torch.randn(20, 8).bfloat16())
    assert set(tallies) == {"where", "relu"}
    assert all(t.exact == t.n for t in tallies.values())


def test_the_observed_forward_is_bitwise_the_plain_one() -> None:
    ids = torch.tensor([TEXT[0]])
    found: list[torch.Tensor] = []
    hook = model().register_forward_hook(lambda m, a, out: found.append(out.logits.detach().clone()))
    try:
        forward(model(), TEXT[0], Unrounded(50))
        model()(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_whole_model_agrees_with_itself(attention: str) -> None:
    watch = Unrounded(50)
    graph = forward(model(Qwen3Config, attention), TEXT[0], watch)
    assert watch.unmeasured == {}
    names = {v.id: base(n.op) for n in graph.nodes for v in n.outputs if v is not None}
    shares: dict[str, float] = {}
    for value, tally in watch.tallies.items():
        shares[names[value]] = min(shares.get(names[value], 1.0), tally.agreeing / tally.n)
    assert {"mul", "add", "silu", "mm", "_to_copy", "attention"} <= set(shares)
    assert shares["mul"] == shares["add"] == shares["_to_copy"] == 1
    assert all(shares[op] > 0.99 for op in shares if op in MATMULS)
    assert shares["silu"] > 0.999
    assert shares["attention"] > 0.5  # the kernel rounds probabilities to BF16 inside


def test_an_op_that_takes_only_bf16_is_named_with_the_reason() -> None:
    lib = torch.library.Library("graphalign_tests", "DEF")
    lib.define("only_bf16(Tensor x) -> Tensor")
    lib.define("always_bf16(Tensor x) -> Tensor")

    def only(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.bfloat16:
            raise RuntimeError("expected BF16")
        return x * 1.1

    lib.impl("only_bf16", only, "CPU")
    lib.impl("always_bf16", lambda x: (x * 1.1).bfloat16(), "CPU")
    ops = torch.ops.graphalign_tests
    watch, tallies = watch_module(Ops(lambda x: ops.always_bf16(ops.only_bf16(x))), torch.randn(4, 4).bfloat16())
    assert watch.unmeasured == {
        "graphalign_tests.only_bf16.default": "it does not run in float32: expected BF16",
        "graphalign_tests.always_bf16.default": "its result is BF16 whatever it is given",
    }
    assert tallies == {}


def test_the_token_axis() -> None:
    x = torch.arange(2 * 5 * 3).reshape(1, 2, 5, 3)
    assert by_token(x, 5).tolist() == [x[0, :, t].reshape(-1).tolist() for t in range(5)]
    assert by_token(x, 7).shape == (10, 3)
    assert by_token(torch.tensor(1.0), 7).shape == (1, 1)
