"""CUDA's autocast on CPU tensors, for a GPU target whose trainer is captured on a CPU.

`torch.autocast("cpu")` is another thing than `torch.autocast("cuda")`: softmax, sum, rms_norm, layer_norm, pow, rsqrt, … of BF16 stay BF16
on a CPU and become FP32 on CUDA. Within `like_cuda()` the dispatcher's kernels for CPU autocast are replaced by CUDA's policies, so that it
holds for what C++ calls too. The lists are those of torch 2.13's `ATen/autocast_mode.h`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

KEY: Final = "AutocastCPU"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER = _names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
    convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
""")
"""Computed in autocast's dtype (`AT_FORALL_LOWER_PRECISION_FP`)."""
FP32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
    softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
""")
"""Operands cast to FP32 (`AT_FORALL_FP32`)."""
SET_DTYPE = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
    sum.dim_IntList
""")
"""Told to return FP32 where the caller names no dtype (`AT_FORALL_FP32_SET_OPT_DTYPE`)."""
PROMOTE = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")
"""Operands cast to the widest of theirs (`AT_FORALL_PROMOTE`)."""
APPEND_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Told so by an overload (`AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE`)."""
AUTOCAST_DEVICE: Final = "autocast_device"
"""Entry of a regime: the device whose autocast was emulated; absent where it is that of the device itself."""
SAID: Final = "autocast follows CUDA's lists (torch 2.13's autocast_mode.h), emulated on the CPU: the target is a GPU"
_LOCK = threading.RLock()
_ON = 0


def active() -> bool:
    """Whether CPU autocast follows CUDA's lists now."""
    return _ON > 0


def emulated(regime: Mapping[str, Any], device: str) -> bool:
    """Whether a regime's autocast is CUDA's, and the device's own is not."""
    return regime.get("autocast") is not None and regime.get(AUTOCAST_DEVICE) == "cuda" and device == "cpu"


@contextmanager
def like_cuda(on: bool = True) -> Iterator[None]:
    """Within the block, `torch.autocast("cpu")` does to every op what `torch.autocast("cuda")` does; for all threads of the process."""
    global _ON
    with _LOCK:
        if not on or _ON:
            _ON += on
            try:
                yield
            finally:
                _ON -= on
            return
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a kernel is overridden is the point
                _register(library)
            _ON += 1
            yield
        finally:
            _ON = 0
            library._destroy()  # type: ignore[no-untyped-call]


def _register(library: torch.library.Library) -> None:
    for name in registered(KEY) - (LOWER | FP32 | SET_DTYPE | PROMOTE | set(APPEND_DTYPE)):
        _implement(library, name, torch.library.fallthrough_kernel)
    for name in LOWER - registered(KEY):
        _implement(library, name, _casting(name, lambda _: torch.get_autocast_dtype("cpu")))
    for name in FP32:
        _implement(library, name, _casting(name, lambda _: torch.float32))
    for name in PROMOTE:
        _implement(library, name, _casting(name, _widest))
    for name in SET_DTYPE:
        _implement(library, name, _with_dtype(name))
    for name, other in APPEND_DTYPE.items():
        _implement(library, name, _by_overload(name, other))


def _implement(library: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    library.impl(name, kernel, KEY, allow_override=True)  # type: ignore[no-untyped-call]


def registered(key: str) -> frozenset[str]:
    """ATen ops (`softmax.int`) that have a kernel of their own for a dispatch key."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::") and has(n, key))


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _eligible(x: Any) -> bool:
    """As `is_eligible` of autocast_mode.h."""
    return isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.is_floating_point() and x.dtype != torch.float64


def _below() -> Any:
    """As `ExcludeDispatchKeyGuard no_autocast`: what the op calls is not cast again."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _widest(tensors: list[torch.Tensor]) -> torch.dtype:
    """As `promote_type`: autocast's dtype, unless an operand is wider. Another eligible dtype than the two is an error there."""
    lower = torch.get_autocast_dtype("cpu")
    return torch.float32 if any(x.dtype == torch.float32 for x in tensors) else lower


def _casting(name: str, pick: Callable[[list[torch.Tensor]], torch.dtype]) -> Callable[..., Any]:
    op = _op(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below():
            leaves, spec = pytree.tree_flatten((args, kwargs))
            dtype = pick([x for x in leaves if _eligible(x)])
            cast = [x.to(dtype) if _eligible(x) else x for x in leaves]
            args, kwargs = pytree.tree_unflatten(cast, spec)
            return op(*args, **kwargs)

    return kernel


def _with_dtype(name: str) -> Callable[..., Any]:
    op = _op(name)
    names = [a.name for a in op._schema.arguments]
    place = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below():
            if _eligible(args[0]) and (args[place] if place < len(args) else kwargs.get("dtype")) is None:
                if place < len(args):
                    args = (*args[:place], torch.float32, *args[place + 1 :])
                else:
                    kwargs = {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return kernel


def _by_overload(name: str, other: str) -> Callable[..., Any]:
    op, typed = _op(name), _op(other)
    defaults = [a.default_value if a.has_default_value() else None for a in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below():
            if not _eligible(args[0]):
                return op(*args, **kwargs)
            given = (*args, *(kwargs.get(a.name, d) for a, d in list(zip(op._schema.arguments, defaults, strict=True))[len(args) :]))
            return typed(*given, dtype=torch.float32)

    return kernel
