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
    return _recipes("models.yaml")


@functools.cache
def more() -> dict[str, dict[str, Any]]:
    """The same for models of README's table that are not recorded."""
    return _recipes("more.yaml")


def _recipes(file: str) -> dict[str, dict[str, Any]]:
    folder = Path(__file__).parent
    common = yaml.safe_load((folder / "models.yaml").read_text())["common"]
    return {name: {**DEFAULTS, **common, **recipe} for name, recipe in yaml.safe_load((folder / file).read_text())["models"].items()}


def recipe(name: str) -> dict[str, Any]:
    """The recipe of a model, recorded or not."""
    return recipes()[name] if name in recipes() else more()[name]


def config(name: str) -> Any:
    """The Transformers configuration of a model."""
    import transformers

    given = {k: v for k, v in recipe(name).items() if k not in DEFAULTS}
    kind = given.pop("type")
    if isinstance(getattr(transformers.CONFIG_MAPPING[kind], "head_dim", None), property):
        del given["head_dim"]
    return transformers.AutoConfig.for_model(kind, **given)


def build(name: str, seed: int = 0) -> Any:
    """A model in the regime of its recipe: matrices as Transformers makes them, vectors with noise, in eval mode.

    Returns:
        A `PreTrainedModel`; its dtype and attention implementation are the recipe's.
    """
    import torch
    import transformers

    made = recipe(name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        dtype = getattr(torch, made["dtype"])
        model = transformers.AutoModelForCausalLM.from_config(config(name), dtype=dtype, attn_implementation=made["attention"])
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(NOISE * torch.randn(p.shape).to(p.dtype))
    return model.eval()


def save(name: str, folder: Path) -> Path:
    """A model as a checkpoint in `folder`/`name`, which is returned."""
    where = folder / name
    build(name).save_pretrained(where)
    return where
