"""Tiny models with random weights, and one forward of them under the watch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from graphalign.capture.training import record_forward
from graphalign.clusters.unrounded import Unrounded
from graphalign.ir.training import TrainingGraph

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
TEXT = [tuple((7 * i + 13 * j) % 251 for i in range(50)) for j in range(4)]


@functools.cache
def model(kind: type[LlamaConfig] | type[Qwen3Config] = LlamaConfig, attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = AutoModelForCausalLM.from_config(kind(**SIZES), dtype=torch.bfloat16, attn_implementation=attention)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "norm" in name:
                p.copy_(1 + 0.2 * torch.randn_like(p))
    return made.eval()


def forward(module: nn.Module, ids: Sequence[int], watch: Unrounded, autocast: str | None = None) -> TrainingGraph:
    return record_forward(module, ids=ids, watch=watch, autocast=autocast)
