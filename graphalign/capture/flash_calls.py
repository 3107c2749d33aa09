"""What a FlashAttention kernel is given: Transformers' own function runs up to the call, and the call is written down instead of made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from graphalign.capture.probe import seen_by


def kernel_call(fn: Callable[..., Any], implementation: str, tokens: int, keys: int) -> tuple[Any, dict[str, Any]]:
    """Run an attention function of Transformers that ends in a FlashAttention kernel.

    Args:
        fn: without arguments: the call of the function.
        implementation: its name, by which Transformers loads the kernels.
        tokens: number of queries.
        keys: number of keys.

    Returns:
        What the function returned, zeros for numbers; what the kernel may read, see `visible.visible`, with `kernel`: `scale`, `softcap`,
        `dropout`, `sinks` as the kernel was given them.
    """
    from transformers import modeling_flash_attention_utils

    utils: Any = modeling_flash_attention_utils
    utils.lazy_import_flash_attention(implementation)  # or it would put its own kernels back
    seen: list[dict[str, Any]] = []
    saved = {name: getattr(utils, name) for name in ("_flash_fn", "_flash_varlen_fn")}
    try:
        for name, kernel in saved.items():
            setattr(utils, name, _watched(kernel, seen) if kernel is not None else None)
        result = fn()
    finally:
        for name, kernel in saved.items():
            setattr(utils, name, kernel)
    if len(seen) != 1:
        return result, {"unknown": f"the {implementation} function calls {len(seen)} FlashAttention kernels"}
    return result, read_call(seen[0], tokens, keys)


def _watched(kernel: Callable[..., Any], seen: list[dict[str, Any]]) -> Callable[..., Any]:
    signature = inspect.signature(kernel)

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        seen.append(dict(bound.arguments))
        q, v = bound.arguments["q"], bound.arguments["v"]
        return q.new_zeros(()).expand(*q.shape[:-1], v.shape[-1])  # type: ignore[no-any-return]

    return call


def read_call(call: dict[str, Any], tokens: int, keys: int, look: Callable[..., dict[str, Any]] = seen_by) -> dict[str, Any]:
    ends = [call[n].tolist() for n in ("cu_seqlens_q", "cu_seqlens_k") if call.get(n) is not None]
    if any(e not in ([0, tokens], [0, keys]) for e in ends):
        return {"unknown": f"packed sequences, which end at {ends[0][:8]}"}
    window = [w if isinstance(w, int) and w >= 0 else None for w in call.get("window_size") or (None, None)]
    found = look(tokens, keys, None, {"implementation": "flash", "is_causal": bool(call.get("causal")), "window": window})
    if call.get("alibi_slopes") is not None:
        return {"unknown": "ALiBi slopes, whose numbers are not compared"}
    scale = call.get("softmax_scale")
    return found | {
        "kernel": {
            "scale": float(scale) if scale is not None else call["q"].shape[-1] ** -0.5,
            "softcap": float(call.get("softcap") or 0.0),
            "dropout": float(call.get("dropout_p") or 0.0),
            "sinks": any(call.get(n) is not None for n in ("s_aux", "learnable_sink")),
        }
    }
