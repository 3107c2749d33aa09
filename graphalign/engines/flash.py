"""FlashAttention where it is not installed: a stand-in, so that the trainer's graph around it can be captured on any machine.

Attention is an anchor: its inside is not compared, only its operands and parameters. The stand-in casts its operands as Transformers'
`flash_attention_forward` does (5.19.0), attends in FP32 and rounds once; a patched model that trains uses the real kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

NAME = "flash_attention_2"


def needs_stand_in(attention: str) -> bool:
    """Whether FlashAttention 2 is asked for and cannot run here."""
    if attention != NAME:
        return False
    from transformers.utils import is_flash_attn_2_available

    return not is_flash_attn_2_available()


def stand_in(model: nn.Module) -> None:
    """Make a model that was built with another implementation call the stand-in, and say `flash_attention_2` in its config."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attend)
    config: Any = model.config
    for part in (config, config.get_text_config()):
        part._attn_implementation = NAME


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the interface of Transformers.

    Args:
        module: the attention module.
        query: [batch, heads, tokens, width]; key and value [batch, key heads, keys, width].
        attention_mask: [batch, keys], True where a key may be read; or None.
        dropout: must be 0: random numbers of the real kernel cannot be had.
        scaling, sliding_window, softcap, is_causal, s_aux: as in Transformers' `flash_attention_forward`.

    Returns:
        [batch, tokens, heads, width] in the dtype that the kernel computes in, and None.
    """
    from transformers.integrations.flash_attention import get_target_dtype

    dtype = get_target_dtype(query, module) or query.dtype
    query, key, value = (x.to(dtype) for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    q, k, v = query.float(), key.float().repeat_interleave(groups, 1), value.float().repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    tokens, keys = scores.shape[-2:]
    distance = torch.arange(keys - tokens, keys)[:, None] - torch.arange(keys)
    allowed = torch.ones(tokens, keys, dtype=torch.bool)
    if is_causal if is_causal is not None else getattr(module, "is_causal", True):
        allowed &= distance >= 0
    if sliding_window is not None:
        allowed &= distance < sliding_window
    allowed = allowed.to(scores.device)
    if attention_mask is not None:
        allowed = allowed & attention_mask.bool()[:, None, None, :]
    scores = scores.masked_fill(~allowed, -torch.inf)
    if s_aux is not None:
        sinks = s_aux.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, tokens, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights.nan_to_num() @ v).to(dtype).transpose(1, 2).contiguous(), None


attend._graphalign_stand_in = True  # type: ignore[attr-defined]
