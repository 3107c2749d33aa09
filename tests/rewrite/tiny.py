"""A tiny Qwen3, the spec that was recorded for it, and the same patch written by hand."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3 as q

import graphalign
from graphalign import Patched
from graphalign.ir.config import config_digest
from graphalign.patch.spec import Edit, Group, PatchSpec, load

DATA = Path(__file__).parent / "data"
RECORDED_LAYERS = 6
"""Layers of the recorded model; all but the first are alike."""
VOCAB = 512


@functools.cache
def recorded() -> PatchSpec:
    """The spec recorded on vLLM 0.32.0 (CPU) for a Qwen3 of six layers."""
    return load(DATA / "qwen3.patch.yaml")


def spec_for(layers: int, groups: Iterable[str] | None = None) -> PatchSpec:
    """The recorded spec cut to a model of `layers` layers, perhaps to some groups."""
    spec, last = recorded(), RECORDED_LAYERS - 1
    end = {f"0-{last}": f"0-{layers - 1}", f"1-{last}": f"1-{layers - 1}", f"0-{last - 1}": f"0-{layers - 2}", str(last): str(layers - 1)}
    if layers == 2:
        end |= {f"1-{last}": "1", f"0-{last - 1}": "0"}

    def cut(e: Edit) -> Edit:
        return e.model_copy(
            update={"layers": end.get(e.layers, e.layers), "producer_layers": end.get(e.producer_layers, e.producer_layers)}
        )

    wanted = None if groups is None else set(groups)
    chosen = tuple(
        Group(name=g.name, edits=tuple(cut(e) for e in g.edits)) for g in spec.groups if wanted is None or g.name in wanted
    )  # fmt: skip
    return spec.model_copy(
        update={"groups": chosen, "model": {**spec.model, "layers": layers, "config_digest": config_digest(config(layers))}}
    )


def config(layers: int = 3) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=512, attention_dropout=0.0, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def build(layers: int = 3, attention: str = "sdpa", dtype: torch.dtype = torch.bfloat16, cfg: AutoConfig | None = None) -> nn.Module:
    """A model in eval mode with random weights, norm weights not all ones; the same on every call."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(cfg or config(layers), attn_implementation=attention, dtype=dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(torch.randn_like(p) * 0.2)
            else:
                p.mul_(3)
    return model.eval()


def tokens(batch: int = 1, length: int = 17, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def patch(model: nn.Module, groups: Iterable[str] | None = None) -> Patched:
    """The recorded spec on a model, without the trial run (it costs a compilation)."""
    layers = len(next(m for m in model.modules() if isinstance(m, nn.ModuleList)))
    return graphalign.apply(model, spec_for(layers, groups), allow_stale=True, trial=False)


# -- the patch by hand: every group of the recorded spec ---------------------------------------------------------------


class Norm(q.Qwen3RMSNorm):
    """Reads what it is given, returns FP32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class FinalNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).to(self.weight.dtype)


class MLP(q.Qwen3MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj((self.act_fn(self.gate_proj(x).float()) * self.up_proj(x)).to(x.dtype))


class Attention(q.Qwen3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):  # type: ignore[no-untyped-def]
        dtype, shape = hidden_states.dtype, hidden_states.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        cos, sin = (t.unsqueeze(1) for t in position_embeddings)
        query = (query * cos + q.rotate_half(query) * sin).to(dtype)
        key = (key * cos + q.rotate_half(key) * sin).to(dtype)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, q.eager_attention_forward)
        out, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, sliding_window=self.sliding_window, **kwargs
        )
        return self.o_proj(out.reshape(*shape, -1).contiguous()), weights


class Layer(q.Qwen3DecoderLayer):
    """The residual stream is FP32 from the first sum on."""

    def forward(self, hidden_states, **kwargs):  # type: ignore[no-untyped-def]
        dtype = self.mlp.down_proj.weight.dtype
        residual, _ = hidden_states, None
        out, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states).to(dtype), **kwargs)
        residual = residual.float() + out
        return residual + self.mlp(self.post_attention_layernorm(residual).to(dtype))


BY_HAND = {q.Qwen3RMSNorm: Norm, q.Qwen3MLP: MLP, q.Qwen3Attention: Attention, q.Qwen3DecoderLayer: Layer}


def by_hand(model: nn.Module) -> nn.Module:
    """Patch a model by hand, in place, under whatever wrapper."""
    for name, m in model.named_modules():
        if type(m) in BY_HAND:
            m.__class__ = FinalNorm if name.endswith("model.norm") else BY_HAND[type(m)]
    return model
