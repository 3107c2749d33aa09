"""Which ATen ops mean what: a closed vocabulary, by tag and by list. Nothing outside it is ever called."""

from __future__ import annotations

import functools
from typing import Any

import torch

from graphalign.errors import UnsupportedOpError

VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "t",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "as_strided",
        "unfold",
        "diagonal",
        "movedim",
        "swapaxes",
        "flatten",
        "unflatten",
        "view_as_complex",
        "view_as_real",
        "detach",
        "alias",
        "view_as",
        "narrow",
        "numpy_T",
        "mT",
        "real",
        "_reshape_alias",
    ]
)
"""Ops that show the same elements in another layout."""
COPIES = frozenset(
    [
        "_to_copy",
        "clone",
        "contiguous",
        "to",
        "copy",
        "lift_fresh",
        "lift_fresh_copy",
        "cat",
        "stack",
        "roll",
        "flip",
        "repeat",
        "repeat_interleave",
        "tile",
        "index_select",
        "index",
        "gather",
        "embedding",
        "constant_pad_nd",
        "pad",
        "neg",
        "dropout",
        "native_dropout",
        "alias_copy",
        "view_copy",
        "rot90",
        "_local_scalar_dense_copy",
        "positive",
    ]
)
"""Ops that copy elements, perhaps casting, moving or negating them."""
TRANSPARENT = VIEWS | COPIES
UNMOVED = VIEWS | frozenset(["_to_copy", "clone", "contiguous", "to", "lift_fresh", "lift_fresh_copy", "alias_copy", "view_copy"])
"""Of these, the ones that leave every element as it is and give none the place of another: a matrix is the same matrix behind them."""
REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "var",
        "var_mean",
        "std",
        "prod",
        "norm",
        "linalg_vector_norm",
        "cumsum",
        "cumprod",
        "logsumexp",
        "_softmax",
        "softmax",
        "_log_softmax",
        "log_softmax",
        "any",
        "all",
        "argmax",
        "argmin",
        "topk",
        "sort",
        "_safe_softmax",
    ]
)
COMPOSITES = frozenset(
    [
        "native_layer_norm",
        "layer_norm",
        "_fused_rms_norm",
        "rms_norm",
        "native_group_norm",
        "group_norm",
        "glu",
        "masked_fill",
        "where",
        "scatter",
        "scatter_add",
        "index_put",
        "index_add",
        "one_hot",
        "tril",
        "triu",
        "addcmul",
        "addcdiv",
        "lerp",
        "polar",
        "complex",
        "_softmax_backward_data",
        "std_mean",
        "aminmax",
        "searchsorted",
        "bucketize",
        "histc",
        "bincount",
        "masked_scatter",
        "conv1d",
        "convolution",
        "as_strided_scatter",
        "slice_scatter",
        "select_scatter",
        "floor_divide",
        "logcumsumexp",
        "linalg_solve_triangular",
        "unfold_copy",
        "nonzero",
        "renorm",
    ]
)
FACTORIES = frozenset(
    [
        "arange",
        "full",
        "ones",
        "zeros",
        "scalar_tensor",
        "full_like",
        "ones_like",
        "zeros_like",
        "empty_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "empty",
        "new_empty",
        "eye",
        "linspace",
        "tensor",
        "scalar_tensor",
    ]
)
MATMULS = frozenset(["mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "mv", "dot", "_grouped_mm", "einsum", "addmv"])
ATTENTIONS = frozenset(
    [
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "scaled_dot_product_attention",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_attention_math_for_mps",
    ]
)
MAX_ELEMENTS = 1 << 26
"""Largest tensor an evaluation builds."""


def base(op: str) -> str:
    """`aten.add_.Tensor` to `add`: the op's name without namespace, overload and in-place mark."""
    parts = op.split(".")
    name = parts[1] if len(parts) > 1 else op
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


@functools.lru_cache(maxsize=4096)
def resolve(op: str) -> Any:
    """The functional overload of an op name in a capture.

    Raises:
        UnsupportedOpError: not an ATen op, or not in the closed vocabulary.
    """
    parts = op.split(".")
    name = base(op)
    if len(parts) != 3 or parts[0] != "aten":
        raise UnsupportedOpError(f"{op} is not an op that graphalign can evaluate", hint="declare it in rules/ops")
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        packet = None
    overload = getattr(packet, parts[2], None) if packet is not None else None  # another one would be another function
    if not isinstance(overload, torch._ops.OpOverload):
        overload = None
    listed = name in TRANSPARENT | REDUCTIONS | COMPOSITES | FACTORIES | MATMULS
    if overload is None or not (listed or torch.Tag.pointwise in overload.tags):
        raise UnsupportedOpError(
            f"{op} is not an op that graphalign can evaluate", hint="say so on the issue tracker, with the model's name"
        )
    return overload


def is_pointwise(op: str) -> bool:
    """Whether each output element depends on the operands' elements at the same place only."""
    try:
        return torch.Tag.pointwise in resolve(op).tags
    except UnsupportedOpError:
        return False
