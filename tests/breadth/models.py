"""The tiny models behind `captures/`, built anew: configurations of `models.yaml`, random weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

DEFAULTS = {"attention": "sdpa", "dtype": "bfloat16", "autocast": None, "logprobs": None}
"""The regime of a model whose recipe does not name it."""
NOISE = 0.2
"""Standard deviation of what is added to vectors (norm weights, biases), which are constant when a model is made."""


@functools.cache
def recipes() -> dict[str, dict[str, Any]]:
    """Name to recipe: `type`, the regime (`DEFAULTS`), and what else the configuration takes."""
    text = yaml.safe_load((Path(__file__).parent / "models.yaml").read_text())
    return {name: {**DEFAULTS, **text["common"], **recipe} for name, recipe in text["models"].items()}


def config(name: str) -> Any:
    """The Transformers configuration of a model."""
    import transformers

    recipe = {k: v for k, v in recipes()[name].items() if k not in DEFAULTS}
    kind = recipe.pop("type")
    if isinstance(getattr(transformers.CONFIG_MAPPING[kind], "head_dim", None), property):
        del recipe["head_dim"]
    return transformers.AutoConfig.for_model(kind, **recipe)


def build(name: str, seed: int = 0) -> Any:
    """A model in the regime of its recipe: matrices as Transformers makes them, vectors with noise, in eval mode.

    Returns:
        A `PreTrainedModel`; its dtype and attention implementation are the recipe's.
    """
    import torch
    import transformers

    recipe = recipes()[name]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        dtype = getattr(torch, recipe["dtype"])
        model = transformers.AutoModelForCausalLM.from_config(config(name), dtype=dtype, attn_implementation=recipe["attention"])
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(NOISE * torch.randn(p.shape).to(p.dtype))
    return model.eval()


def save(name: str, folder: Path) -> Path:
    """A model as a checkpoint in `folder`/`name`, which is returned."""
    where = folder / name
    build(name).save_pretrained(where)
    return where
