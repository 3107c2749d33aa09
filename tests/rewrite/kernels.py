"""Kernels that stand in for those of a GPU. What calls them is Transformers' own code."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_mask
from transformers import masking_utils
from transformers.integrations import flex_attention as integration

from graphalign.engines import flash


def attend_flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, training: bool = False, **kwargs: Any) -> torch.Tensor:
    """Flex attention that has gradients on the CPU (torch 2.13's kernel refuses them there), for masks without a score function."""
    mask, scale = kwargs["block_mask"], kwargs["scale"]
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    allowed = create_mask(mask.mask_mod, query.shape[0], query.shape[1], query.shape[2], key.shape[2], device="cpu")
    scores = (query.float() @ key.float().transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ value.float()).to(query.dtype)


def use(model: nn.Module, attention: str, monkeypatch: Any) -> nn.Module:
    """Let a model attend by another implementation, with kernels of this machine."""
    if attention == "flash_attention_2":
        flash.stand_in(model)
    elif attention == "flex_attention":
        make = masking_utils.create_block_mask
        monkeypatch.setattr(masking_utils, "create_block_mask", lambda *a, **k: make(*a, **{**k, "_compile": False}))
        monkeypatch.setattr(integration, "compile_friendly_flex_attention", attend_flex)
    model.config._attn_implementation = attention
    return model
