"""Dummy weights of large models: what memory they take, and that nothing shows it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import graphalign.engines.dummy as dummy
from graphalign.capture.training import capture_training, record_forward
from graphalign.engines.dummy import LAZY_FROM, SHIFTS, dummy_model, share_dummy
from graphalign.engines.noise import PERIOD, Region
from graphalign.engines.products import SharedNoise, call, runner
from graphalign.errors import CaptureFailedError
from graphalign.ir.training import TrainingGraph

PAGE = 4096
WIDE: dict[str, Any] = {
    "vocab_size": 12288, "hidden_size": 256, "intermediate_size": 4608, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
}  # fmt: skip
"""Matrices of up to three periods of noise."""
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
KINDS = {
    "qwen3": ("qwen3", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "experts": ("qwen3_moe", EXPERTS),
    "experts with biases": ("gpt_oss", EXPERTS),
    "experts in one product": ("llama4_text", {**EXPERTS, "intermediate_size": 512, "intermediate_size_mlp": 512}),
    "biases": ("starcoder2", {}),
    "transposed": ("gpt2", {"n_embd": 256, "n_layer": 2, "n_head": 4}),
}
AUTOCAST = {"dtype": "float32", "autocast": "bfloat16"}


def config_of(kind: str) -> Any:
    name, more = KINDS[kind]
    return transformers.AutoConfig.for_model(name, **{**WIDE, **more})


def build(kind: str = "qwen3", dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model whose matrices share memory."""
    model = dummy_model(config_of(kind), {"dtype": dtype})
    share_dummy(model, read_only=True)
    return model


def matrices(model: nn.Module) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.ndim > 1]


def resident(begin: int, end: int) -> int:
    """Bytes of an address range that are in memory, counted at each address."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("needs Linux")
    total, inside = 0, False
    for line in smaps.read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first:
            a, b = (int(x, 16) for x in first.split("-"))
            inside = begin <= a and b <= end
        elif inside and first == "Rss:":
            total += int(line.split()[1]) << 10
    return total


def span(model: nn.Module) -> tuple[int, int]:
    found = matrices(model)
    return min(p.data_ptr() for p in found) & -PAGE, max(p.data_ptr() + p.nbytes for p in found) + PAGE - 1 & -PAGE


def test_matrices_lie_at_the_same_addresses_in_storages_of_their_own() -> None:
    model = build()
    found = matrices(model)
    begin, end = span(model)
    assert end - begin <= SHIFTS * PAGE + max(p.nbytes for p in found) + PAGE < sum(p.nbytes for p in found) / 2
    assert len({p.untyped_storage()._cdata for p in found}) == len(found)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in found)


def test_the_numbers_are_those_of_matrices_with_memory_of_their_own() -> None:
    shared, own = build(), build()
    share_dummy(own)
    assert len({p.data_ptr() for p in matrices(own)}) == len(matrices(own))
    for (name, a), b in zip(shared.named_parameters(), own.parameters(), strict=True):
        assert torch.equal(a, b), name
    first = matrices(own)[0]
    flat = first.detach().view(-1)
    assert torch.equal(flat[:PERIOD], flat[PERIOD : 2 * PERIOD])
    assert 0.015 < float(flat.float().std()) < 0.025


def test_a_write_is_the_writer_s_own_where_it_may_happen() -> None:
    model = build()
    share_dummy(model)
    one, *others = matrices(model)
    before = [x.clone() for x in others]
    with torch.no_grad():
        one.zero_()
    assert all(torch.equal(a, b) for a, b in zip(others, before, strict=True))


def test_memory_goes_with_the_last_tensor() -> None:
    model = build()
    begin, end = span(model)
    kept = next(model.parameters()).detach()
    kept.float().sum()
    del model
    gc.collect()
    assert resident(begin, end) > 0
    del kept
    gc.collect()
    assert resident(begin, end) == 0


@pytest.fixture
def region() -> tuple[SharedNoise, Region]:
    noise = SharedNoise(8 * PERIOD)
    return noise, noise.region((torch.bfloat16,))


ATEN = torch.ops.aten
OPERANDS: dict[str, tuple[Any, tuple[int, ...], bool]] = {
    "mm": (ATEN.mm.default, (20000, 256), True),
    "mm, all columns differ": (ATEN.mm.default, (300, 255), True),
    "mm, row by row": (ATEN.mm.default, (256, 20000), False),
    "addmm": (ATEN.addmm.default, (20000, 256), True),
    "bmm": (ATEN.bmm.default, (6, 9000, 128), True),
    "bmm, row by row": (ATEN.bmm.default, (6, 128, 9000), False),
    "grouped": (ATEN._grouped_mm.default, (6, 9000, 128), True),
    "grouped, row by row": (ATEN._grouped_mm.default, (6, 128, 9000), False),
}


@pytest.mark.parametrize("case", OPERANDS)
def test_products_are_those_that_the_kernel_gives(region: tuple[SharedNoise, Region], case: str) -> None:
    noise, memory = region
    op, shape, transposed = OPERANDS[case]
    weight = memory.tensor(2048, shape, torch.empty(shape, device="meta").stride())
    weight = weight.mT if transposed else weight
    x = torch.randn(*weight.shape[:-2] if op is ATEN.bmm.default else (), 8, weight.shape[-2]).bfloat16()
    args: tuple[Any, ...] = (x, weight)
    if op is ATEN.addmm.default:
        args = (torch.randn(weight.shape[1]).bfloat16(), *args)
    if op is ATEN._grouped_mm.default:
        args = (*args, torch.tensor([2, 2, 3, 5, 5, 8], dtype=torch.int32))
    found, expected = noise.run(op, args, {}), op(*args)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
    assert found.stride() == expected.stride()
    assert float(expected.float().std()) > 0.01


def test_little_of_a_matrix_is_read(region: tuple[SharedNoise, Region]) -> None:
    noise, memory = region
    weight = memory.tensor(2048, (32000, 256), (256, 1)).T
    noise.run(ATEN.mm.default, (torch.randn(8, 256).bfloat16(), weight), {})
    assert 0 < resident(memory.base, memory.base + memory.size) <= 2 * PERIOD * 2 < weight.nbytes / 3


@pytest.mark.parametrize("chain", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=["down", "up"])
def test_a_cast_is_noise_too(chain: tuple[torch.dtype, torch.dtype]) -> None:
    noise = SharedNoise(4 * PERIOD)
    weight = noise.region(chain[:1]).tensor(1024, (8192, 300), (300, 1))
    for w in (weight, weight.T):
        found = noise.run(ATEN._to_copy.default, (w,), {"dtype": chain[1]})
        assert torch.equal(found, w.to(chain[1]))
        assert found.stride() == w.stride()
        assert noise.place(found) is not None
        assert found.untyped_storage()._cdata != noise.run(ATEN._to_copy.default, (w,), {"dtype": chain[1]}).untyped_storage()._cdata
    part = weight[:, :200]  # not dense: a cast packs it
    assert noise.run(ATEN._to_copy.default, (part,), {"dtype": chain[1]}).is_contiguous()


@pytest.mark.parametrize(
    ("kind", "regime"),
    [*((kind, {}) for kind in KINDS), *((kind, AUTOCAST) for kind in ("qwen3", "experts", "biases"))],
    ids=[*KINDS, *(f"{kind} under autocast" for kind in ("qwen3", "experts", "biases"))],
)
def test_the_capture_does_not_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, regime: dict[str, str]) -> None:
    config_of(kind).save_pretrained(tmp_path)

    def capture(limit: int) -> TrainingGraph:
        monkeypatch.setattr(dummy, "READ_ONLY_FROM", limit)
        kept: list[nn.Module] = []
        graph = capture_training(tmp_path, then=kept.append, **regime)  # type: ignore[arg-type]
        assert (runner(kept[0]) != call) == (limit == 0)
        return graph.model_copy(update={"header": graph.header.model_copy(update={"timings": {}})})

    assert capture(0) == capture(1 << 40)


def test_a_forward_reads_little_of_the_memory() -> None:
    model = build()
    record_forward(model)
    begin, end = span(model)
    assert resident(begin, end) < 0.8 * max(p.nbytes for p in matrices(model)) < 0.3 * sum(p.nbytes for p in matrices(model))


def test_a_forward_that_writes_to_a_weight_is_refused() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8192, 256, dtype=torch.bfloat16)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.embedding.weight[0].mul_(2)
            return self.embedding(input_ids)  # type: ignore[no-any-return]

    model = Writes()
    share_dummy(model, read_only=True)
    with pytest.raises(CaptureFailedError, match=r"writes to a weight of shape \[256\].*share memory"):
        record_forward(model, logprobs=None)


def test_zeros_that_a_model_begins_with_take_no_memory() -> None:
    rows = LAZY_FROM // 1024 * 2
    with dummy._LazyZeros():
        zeros = torch.zeros(rows, 256)
        small = torch.zeros(3, dtype=torch.int64)
    assert resident(zeros.data_ptr() & -PAGE, zeros.data_ptr() + zeros.nbytes) == 0
    assert zeros.dtype == torch.float32
    assert not zeros.any()
    zeros[-1] = 1
    assert zeros.sum() == 256
    assert small.tolist() == [0, 0, 0]


def test_no_address_space_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CaptureFailedError, match="no address space for dummy weights") as e:
        Region((torch.bfloat16,), 1 << 60)
    assert "fewer --layers" in str(e.value.hint)
