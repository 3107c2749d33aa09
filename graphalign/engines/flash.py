"""FlashAttention where it is not installed: kernels that stand in, so that the trainer's graph around them can be captured on any machine.

Transformers' own attention function runs, and gives these kernels what it gives FlashAttention's: they have flash-attn 2.8's signatures.
Attention is an anchor: its inside is not compared, only its operands and parameters. They attend in FP32 and round once; a patched model
that trains uses the real kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphalign.errors import CaptureFailedError

NAME = "flash_attention_2"


def needs_stand_in(attention: str) -> bool:
    """Whether FlashAttention 2 is asked for and cannot run here."""
    if attention != NAME:
        return False
    from transformers.utils import is_flash_attn_2_available

    return not is_flash_attn_2_available()


def stand_in(model: nn.Module) -> None:
    """Make a model that was built with another implementation use `flash_attention_2` with kernels of this module.

    Raises:
        CaptureFailedError: Transformers loads its kernels in another way than 5.19 does.
    """
    from transformers import __version__
    from transformers import modeling_flash_attention_utils as utils
    from transformers.modeling_utils import AttentionInterface

    if not all(hasattr(utils, n) for n in ("_lazy_define_process_function", "_pad_input", "_unpad_input")):
        raise CaptureFailedError(
            f"FlashAttention is not installed, and how Transformers {__version__} loads it is not known",
            hint="install flash-attn, use Transformers 5.19, or capture with sdpa",
        )
    loaded: Any = utils
    loaded._flash_fn, loaded._flash_varlen_fn, loaded._flash_with_kvcache_fn = flash_attn_func, flash_attn_varlen_func, None
    loaded._pad_fn, loaded._unpad_fn = loaded._pad_input, loaded._unpad_input
    loaded._process_flash_kwargs_fn = loaded._lazy_define_process_function(flash_attn_varlen_func)
    loaded._process_with_kvcache_kwargs_fn = None
    loaded._loaded_implementation = NAME
    AttentionInterface.register(NAME, attend)
    config: Any = model.config
    for part in (config, config.get_text_config()):
        part._attn_implementation = NAME


def stands_in(implementation: str | None) -> bool:
    """Whether this module's kernels are what an implementation calls."""
    if implementation != NAME:
        return False
    from transformers import modeling_flash_attention_utils as utils

    return getattr(utils, "_flash_fn", None) is flash_attn_func


def attend(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
    """Transformers' `flash_attention_forward`; where Dynamo traces it (a patched model's layers), what that does with one sequence.

    It decides by numbers whether sequences are packed, at which Dynamo breaks the graph. Arguments as there: query [batch, heads, tokens,
    width], mask [batch, keys] or None. Returns [batch, tokens, heads, width], and None.
    """
    from transformers.integrations.flash_attention import flash_attention_forward, get_target_dtype

    if not torch.compiler.is_compiling():
        return flash_attention_forward(module, query, key, value, mask, **kwargs)
    causal = kwargs.get("is_causal")
    window = kwargs.get("sliding_window")
    left = window - 1 if window is not None and window < key.shape[2] else -1
    q, k, v = (x.to(get_target_dtype(query, module) or query.dtype).transpose(1, 2) for x in (query, key, value))
    causal = getattr(module, "is_causal", True) if causal is None else causal
    width = v.shape[-1]
    v = nn.functional.pad(v, [0, q.shape[-1] - width])
    scale, softcap = kwargs.get("scaling"), kwargs.get("softcap") or 0.0
    return _attend(q, k, v, scale, causal, (left, left), softcap, mask)[..., :width], None


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """Attention as flash-attn's function of this name.

    Args:
        q: [batch, tokens, heads, width]; k and v [batch, keys, key heads, width].
        dropout_p: ignored: the random numbers of the real kernel cannot be had.
        softmax_scale: 1/sqrt(width) if None.
        causal, softcap, alibi_slopes, deterministic, return_attn_probs: as there.
        window_size: keys to the left and to the right of a token that it reads besides itself, -1 for all. Queries are the last tokens.

    Returns:
        [batch, tokens, heads, width] in the dtype of `q`.
    """
    return _attend(q, k, v, softmax_scale, causal, window_size, softcap, None)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """See `flash_attn_func`; `mask` is True for the keys that may be read, [batch, keys]."""
    groups = q.shape[2] // k.shape[2]
    query, key, value = (x.float().transpose(1, 2) for x in (q, k, v))
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    tokens, keys = scores.shape[-2:]
    distance = torch.arange(keys - tokens, keys)[:, None] - torch.arange(keys)
    left, right = window_size
    allowed = torch.ones(tokens, keys, dtype=torch.bool)
    if causal:
        allowed &= distance >= 0
    if left >= 0:
        allowed &= distance <= left
    if right >= 0:
        allowed &= -distance <= right
    allowed = allowed.to(scores.device)
    if mask is not None:
        allowed = allowed & mask.bool()[:, None, None, :]
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return (weights.nan_to_num() @ value).to(q.dtype).transpose(1, 2).contiguous()


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same for sequences one behind the other, [tokens, heads, width], that start and end at `cu_seqlens_q` and `cu_seqlens_k`."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    parts = [
        flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], dropout_p, softmax_scale, causal, window_size, softcap)[0]
        for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)
    ]
    return torch.cat(parts)
