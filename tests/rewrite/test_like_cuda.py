"""CUDA's autocast on CPU tensors, against torch itself: the header in its wheel, and its real CUDA lists run on fake CUDA tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import graphalign
from graphalign.capture.training import record_forward
from graphalign.errors import PatchNotLiveError
from graphalign.rewrite import like_cuda
from graphalign.rewrite.like_cuda import APPEND_DTYPE, FP32, LOWER, PROMOTE, SET_DTYPE
from tests.rewrite import tiny
from tests.rewrite.matrix import autocast_spec

BF16, FLOAT = torch.bfloat16, torch.float32
CPU_ONLY = {"binary_cross_entropy", "cudnn_convolution", "cudnn_convolution_transpose"}
"""Not in the header: an op that CUDA's autocast refuses, and two that no CPU tensor reaches."""
Op = Callable[..., Any]
OPS: dict[str, Op] = {
    "softmax": lambda x, y: x.softmax(-1),
    "softmax, dtype given": lambda x, y: F.softmax(x, -1, dtype=BF16),
    "log_softmax": lambda x, y: x.log_softmax(-1),
    "sum": lambda x, y: x.sum(),
    "sum dim": lambda x, y: x.sum(-1),
    "sum, dtype given": lambda x, y: x.sum(-1, dtype=FLOAT),
    "mean": lambda x, y: x.mean(-1),
    "cumsum": lambda x, y: x.cumsum(-1),
    "cumprod": lambda x, y: x.cumprod(-1),
    "prod": lambda x, y: x.prod(-1),
    "layer_norm": lambda x, y: F.layer_norm(x, (4,)),
    "rms_norm": lambda x, y: F.rms_norm(x, (4,)),
    "group_norm": lambda x, y: F.group_norm(x, 2),
    "softplus": lambda x, y: F.softplus(x),
    "pow": lambda x, y: x.pow(2),
    "pow of tensors": lambda x, y: x.pow(y),
    "2 ** x": lambda x, y: 2**x,
    "rsqrt": lambda x, y: x.rsqrt(),
    "exp": lambda x, y: x.exp(),
    "log": lambda x, y: x.log(),
    "reciprocal": lambda x, y: x.reciprocal(),
    "sigmoid": lambda x, y: x.sigmoid(),
    "silu": lambda x, y: F.silu(x),
    "gelu": lambda x, y: F.gelu(x),
    "tanh": lambda x, y: x.tanh(),
    "mul": lambda x, y: x * y,
    "add": lambda x, y: x + y,
    "logsumexp": lambda x, y: x.logsumexp(-1),
    "norm": lambda x, y: x.norm(),
    "norm dim": lambda x, y: x.norm(2, -1),
    "vector_norm": lambda x, y: torch.linalg.vector_norm(x),
    "mm": lambda x, y: x @ y,
    "linear": lambda x, y: F.linear(x, y),
    "bmm": lambda x, y: torch.bmm(x.unsqueeze(0), y.unsqueeze(0)),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "addmm": lambda x, y: torch.addmm(x, x, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "atan2": lambda x, y: torch.atan2(x, y),
    "cross entropy": lambda x, y: F.cross_entropy(x, y),
    "dot": lambda x, y: torch.dot(x.flatten(), y.flatten()),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "topk": lambda x, y: x.topk(2)[0],
    "max": lambda x, y: x.max(),
    "clamp": lambda x, y: x.clamp(0),
    "sdpa": lambda x, y: F.scaled_dot_product_attention(*(z.view(1, 1, 4, 4) for z in (x, y, y))),
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "nll_loss": lambda x, y: F.nll_loss(x, torch.zeros(4, dtype=torch.long, device=x.device)),
    "one_hot sums": lambda x, y: (x > 0).sum(-1),
    "index_put": lambda x, y: x.index_put((torch.zeros(1, dtype=torch.long, device=x.device),), y.select(0, 0)),
}


def header() -> dict[str, set[str]]:
    """The lists of the header that torch's wheel ships."""
    text = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    found = {}
    for name, body in re.findall(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)+.*)", text):
        found[name] = {".".join(p.strip() for p in item.split(",")) for item in re.findall(r"_\(([\w, ]+)\)", body)}
        found[name] |= set(re.findall(r'"([\w.]+)"', body))
    return found


def test_the_lists_are_those_of_torchs_header() -> None:
    found = header()
    assert found["LOWER_PRECISION_FP"] == LOWER
    assert found["FP32"] == FP32
    assert found["FP32_SET_OPT_DTYPE"] == SET_DTYPE
    assert found["PROMOTE"] == PROMOTE
    assert found["DIFFERENT_REDISPATCH_SIGNATURE"] >= set(APPEND_DTYPE)


def test_the_lists_are_what_torch_registers_for_cuda() -> None:
    assert like_cuda.registered("AutocastCUDA") - CPU_ONLY == LOWER | FP32 | SET_DTYPE | PROMOTE | set(APPEND_DTYPE)


def dtypes(op: Op, device: str, a: torch.dtype, b: torch.dtype) -> Any:
    x, y = (torch.rand(4, 4, device=device).to(d) + 0.5 for d in (a, b))
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)  # torch.autocast("cuda") would turn itself off without a GPU
    torch.set_autocast_dtype(device, BF16)
    try:
        return op(x, y).dtype
    except RuntimeError as e:
        return str(type(e))
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.clear_autocast_cache()


@pytest.mark.parametrize("name", OPS)
def test_an_op_computes_in_the_format_that_it_has_on_cuda(name: str) -> None:
    for a in (BF16, FLOAT):
        for b in (BF16, FLOAT):
            with FakeTensorMode():
                real = dtypes(OPS[name], "cuda", a, b)
            with like_cuda.like_cuda():
                assert dtypes(OPS[name], "cpu", a, b) == real, (a, b)


def test_what_was_replaced_is_put_back() -> None:
    before = {name: [dtypes(op, "cpu", a, BF16) for a in (BF16, FLOAT)] for name, op in OPS.items()}
    assert before["softmax"][0] is BF16
    with like_cuda.like_cuda():
        with like_cuda.like_cuda():
            assert dtypes(OPS["softmax"], "cpu", BF16, BF16) is FLOAT
        assert like_cuda.active()
        assert dtypes(OPS["softmax"], "cpu", BF16, BF16) is FLOAT
    assert not like_cuda.active()
    assert {name: [dtypes(op, "cpu", a, BF16) for a in (BF16, FLOAT)] for name, op in OPS.items()} == before
    with like_cuda.like_cuda(False):
        assert dtypes(OPS["softmax"], "cpu", BF16, BF16) is BF16


def test_values_and_gradients() -> None:
    x = torch.randn(3, 8, dtype=BF16, requires_grad=True)
    with like_cuda.like_cuda(), torch.autocast("cpu", dtype=BF16):
        got = x.softmax(-1)
        (grad,) = torch.autograd.grad(got.square().sum(), x)
    want = x.softmax(-1, dtype=FLOAT)
    assert torch.equal(got, want)
    assert torch.equal(grad, torch.autograd.grad(want.square().sum(), x)[0])


class Routed(torch.nn.Module):
    """Weights of experts by a softmax in the activations' own format."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 4, bias=False)
        self.head = torch.nn.Linear(8, 16, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        return self.head(x * self.router(x).softmax(-1).sum(-1, keepdim=True))


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "float32"), (None, "bfloat16")])
def test_a_capture_for_a_gpu_follows_it_and_says_so(device: str | None, dtype: str) -> None:
    model = Routed().to(BF16)
    graph = record_forward(model, autocast="bfloat16", autocast_device=device)
    found = {n.op: n.outputs[0].dtype for n in graph.nodes if n.outputs and n.outputs[0] is not None}
    assert found["aten._softmax.default"] == found["aten.sum.dim_IntList"] == found["aten.mul.Tensor"] == dtype
    assert graph.header.regime.get("autocast_device") == device
    assert (like_cuda.SAID in graph.header.notes) == (device is not None)
    assert "autocast_device" not in record_forward(model, autocast_device=device).header.regime  # without autocast there is none


def test_its_patch_is_refused_on_a_cpu() -> None:
    model = tiny.build(2, dtype=FLOAT)
    spec = autocast_spec()
    spec = spec.model_copy(update={"regime": {**spec.regime, "autocast_device": "cuda"}})
    graphalign.apply(model, spec, allow_stale=True)  # the trial emulates CUDA's lists
    x = tiny.tokens(1, 7)
    with torch.autocast("cpu", dtype=BF16):
        with pytest.raises(PatchNotLiveError, match="runs on a CPU, the patch is for CUDA's autocast"):
            model(x, use_cache=False)
        with like_cuda.like_cuda():
            assert model(x, use_cache=False).logits.isfinite().all()
