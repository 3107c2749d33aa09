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
    from transformers.integrations.flash_attention import flash_attention_forward
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
    AttentionInterface.register(NAME, flash_attention_forward)
    config: Any = model.config
    for part in (config, config.get_text_config()):
        part._attn_implementation = NAME


def stands_in(implementation: str | None) -> bool:
    """Whether this module's kernels are what an implementation calls."""
    if implementation != NAME:
        return False
    from transformers import modeling_flash_attention_utils as utils

    return getattr(utils, "_flash_fn", None) is flash_attn_func


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
