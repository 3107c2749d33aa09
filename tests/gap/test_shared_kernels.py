"""vLLM's own CPU kernels inside the trainer: they must compute the same function, and really run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphalign.capture.rollouts import RAW, generate
from graphalign.engines.shared_kernels import SharedKernels, merged_parameters
from graphalign.errors import GapInputError
from graphalign.ir.inference import Parameter, Segment

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow


class Block(nn.Module):
    """One causal attention with merged-in-the-engine projections, all BF16."""

    def __init__(self, heads: int, kv_heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        size = heads * width
        self.q, self.k = nn.Linear(size, size, bias=False), nn.Linear(size, kv_heads * width, bias=False)
        self.v, self.o = nn.Linear(size, kv_heads * width, bias=False), nn.Linear(size, size, bias=True)
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = x.shape[0]
        q = self.q(x).view(1, t, self.heads, self.width).transpose(1, 2)
        k, v = (f(x).view(1, t, self.kv_heads, self.width).transpose(1, 2) for f in (self.k, self.v))
        n = self.heads // self.kv_heads
        k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(t, -1))


@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [(4, 2, 37), (4, 4, 37), (4, 1, 130)])
@torch.no_grad()
def test_the_engines_kernels_compute_the_same_function(heads: int, kv_heads: int, tokens: int) -> None:
    torch.manual_seed(0)
    block, x = Block(heads, kv_heads, 32), torch.randn(tokens, heads * 32).bfloat16()
    own = block(x)
    exact = block.double()(x.double())
    block.bfloat16()
    merged = {n: ["q.weight", "k.weight", "v.weight"] for n in ("q.weight", "k.weight", "v.weight")}
    for kernels in ({"gemm": True}, {"attention": True}, {"gemm": True, "attention": True}):
        mode = SharedKernels(block, merged, block_size=128, **kernels)
        with mode:
            found = block(x)
        assert mode.replaced["attention"] == int(kernels.get("attention", False))
        assert mode.replaced["gemm"] == (3 if kernels.get("gemm") else 0)
        assert mode.skipped["gemm"] == (1 if kernels.get("gemm") else 0)  # the one with a bias
        error = float((found.double() - exact).norm() / exact.norm())
        assert error < 2 * float((own.double() - exact).norm() / exact.norm()) + 1e-3


@torch.no_grad()
def test_a_mask_or_a_cache_is_left_to_the_trainer() -> None:
    q, k = torch.randn(1, 2, 5, 32).bfloat16(), torch.randn(1, 2, 9, 32).bfloat16()
    mode = SharedKernels(nn.Linear(2, 2), attention=True)
    with mode:
        nn.functional.scaled_dot_product_attention(q, k, k)
        nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril())
    assert mode.replaced["attention"] == 0
    assert mode.skipped["attention"] == 2


def test_merged_parameters_come_from_the_capture() -> None:
    def parameter(name: str, *parts: str, dim: int = 0) -> Parameter:
        segments = tuple(Segment(checkpoint=p, dim=dim, start=4 * i, length=4) for i, p in enumerate(parts))
        return Parameter(name=name, dtype="bfloat16", shape=(8, 8), segments=segments)

    found = merged_parameters([parameter("qkv.weight", "q.weight", "k.weight"), parameter("o.weight", "o.weight"),
                               parameter("x.weight", "a", "b", dim=1)])  # fmt: skip
    assert found == {"q.weight": ["q.weight", "k.weight"], "k.weight": ["q.weight", "k.weight"]}


def test_processed_log_probabilities_are_refused_before_the_engine_starts(tmp_path: object) -> None:
    with pytest.raises(GapInputError, match=f"asked for processed_logprobs.*{RAW}"):
        generate(None, None, None, [[1]], engine_args={"logprobs_mode": "processed_logprobs"})  # type: ignore[arg-type]
