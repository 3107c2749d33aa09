"""Random values and their identities: what layers share, and a residual stream that comes back to what it was."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from graphalign.evaluate.storage import Rows
from graphalign.evaluate.values import SUMS, TURNS, Arithmetic, draw, round_slowly, round_to, seed_of, stream_term

N = 4096


def arithmetic(**settings: object) -> Arithmetic:
    return Arithmetic(1, (0, 1), (3, 4), **settings)  # type: ignore[arg-type]


def stream(rounded: str, sums: int) -> list[torch.Tensor]:
    """The stream after each sum: `every` is rounded to BF16, every `second`, or `none`."""
    x, seen = round_to(draw(seed_of("embedding"), torch.arange(N)), "bfloat16"), []
    for ordinal in range(sums):
        x = x + round_to(stream_term(7, ordinal, 0, N), "bfloat16")
        if rounded == "every" or (rounded == "second" and ordinal % 2):
            x = round_to(x, "bfloat16")
        seen.append(x)
    return seen


@pytest.mark.parametrize("rounded", ["none", "second", "every"])
def test_the_stream_comes_back_to_the_same_bits(rounded: str) -> None:
    seen = stream(rounded, 5 * SUMS)
    assert all(torch.equal(a, b) for a, b in zip(seen[2 * SUMS :], seen[3 * SUMS :], strict=False))


@pytest.mark.parametrize("rounded", ["none", "second", "every"])
def test_no_two_successive_sums_are_equal_and_every_rounding_shows(rounded: str) -> None:
    seen = stream(rounded, 3 * SUMS)
    for a, b in ((a, b) for n, a in enumerate(seen) for b in seen[n + 1 : n + SUMS]):
        assert float((a == b).double().mean()) < 0.5
    for a, b in pairwise(seen):
        assert float((round_to(b, "bfloat16") == b).double().mean()) < 0.1 or torch.equal(round_to(b, "bfloat16"), b)
        assert not torch.equal(a, b)


def test_layers_take_turns() -> None:
    turns, own, alike = (arithmetic(layers=kind) for kind in ("turns", "own", "alike"))
    name = "gemm|model.layers.{}.mlp.experts.3.up.weight|0"
    assert turns.name(name.format(2)) == turns.name(name.format(2 + TURNS)) != turns.name(name.format(3))
    assert own.name(name.format(2)) != own.name(name.format(2 + TURNS))
    assert alike.name(name.format(2)) == alike.name(name.format(3))


def test_equal_content_is_one_value_and_only_equal_content() -> None:
    values = arithmetic()
    x = torch.tensor([1.0, float("nan"), 0.0], dtype=torch.float64)
    first = values.settle(x)
    assert values.settle(x.clone()) is first
    assert values.settle(x[[0, 1, 2]]) is first
    assert values.settle(torch.tensor([1.0, float("nan"), -0.0], dtype=torch.float64)) is not first
    assert values.settle(x.view(1, 3)) is not first
    assert values.settle(torch.tensor([1, 2])) is values.settle(torch.tensor([1, 2]))
    apart = arithmetic(share=False)
    assert apart.settle(x).id != apart.settle(x).id


def test_what_is_evaluated_aside_is_forgotten() -> None:
    values = arithmetic()
    aside, x = values.aside(), torch.ones(4, dtype=torch.float64)
    there = aside.settle(x)
    assert values.settle(x.clone()).id != there.id


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_bits_is_rounding_to_odd_first(dtype: str) -> None:
    exponents = torch.randint(-10, 12, (20_000,), generator=torch.Generator().manual_seed(3))
    x = torch.ldexp(draw(seed_of("bits"), torch.arange(20_000)), exponents)
    x[::7] = round_to(x[::7].clone(), dtype)
    x[::11] = 0.0
    assert torch.equal(round_to(x, dtype), round_slowly(x, dtype))


def test_rows_of_a_table() -> None:
    rows = Rows("table", (1, 3), 4, torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64))
    assert rows.read(torch.tensor([[2, 7]])).tolist() == [[1.0, 4.0]]
    assert bool(rows.read(torch.tensor([0, 5])).isnan().all())
    assert rows.read(torch.tensor([99])).tolist() == [4.0], "a masked-out lane reads some element"
    assert rows.memory.shape == (8,)
    assert rows.memory[6] == 3.0
