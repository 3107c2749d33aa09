"""Builds the trainer's model: a Transformers causal language model in eager mode."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphalign.engines.dummy import dummy_model
from graphalign.engines.flash import needs_stand_in, stand_in
from graphalign.engines.model_folder import read_config, require_trust, use_weights
from graphalign.engines.quantised import refuse_quantised
from graphalign.errors import BadInputError, CaptureFailedError
from graphalign.ir.config import config_digest

if TYPE_CHECKING:
    from graphalign.patch.spec import PatchSpec


def build_trainer(
    model_dir: str | os.PathLike[str],
    layers: int | None = None,
    dtype: str = "bfloat16",
    attention: str = "sdpa",
    weights: str | None = None,
    *,
    trust_remote_code: bool = False,
    read_only: bool = False,
) -> nn.Module:
    """Build the model in `model_dir` in eval mode, without progress bars or warnings on standard error.

    Args:
        model_dir: folder with a `config.json`, with or without weights.
        layers: keep only the first so many decoder layers.
        dtype: of the parameters, a torch name.
        attention: Transformers' attention implementation; FlashAttention 2 has a stand-in where it is not installed, and a model without
            `sdpa` gets `eager`.
        weights: `checkpoint` (must exist), `dummy` (random), or None: the checkpoint if there is one, else dummy.
        trust_remote_code: run modeling code that lies in `model_dir`.
        read_only: nothing will write to the parameters, so that dummy ones may share memory, see `dummy.share_dummy`.

    Raises:
        BadInputError: no folder, no usable config, an architecture that Transformers does not know, a wrong option.
        CaptureFailedError: the model could not be built or its weights not be loaded.
    """
    path, torch_dtype = Path(model_dir), parse_dtype(dtype)
    if weights not in (None, "checkpoint", "dummy"):
        raise BadInputError(f"unknown weights option {weights!r}", hint="give checkpoint or dummy")
    raw = read_config(path)
    refuse_quantised(path)
    require_trust(path, raw, trust_remote_code)
    found = use_weights(path, weights)
    with quiet():
        config = load_config(path, trust_remote_code=trust_remote_code)
        truncate(config, layers)
        from transformers import AutoModelForCausalLM

        stands_in = needs_stand_in(attention)
        built_with = "sdpa" if stands_in else attention
        options: dict[str, Any] = {"dtype": torch_dtype, "attn_implementation": built_with, "trust_remote_code": trust_remote_code}

        def build() -> Any:
            if found:
                return AutoModelForCausalLM.from_pretrained(path, config=config, local_files_only=True, **options)
            return dummy_model(config, options, read_only=read_only)

        try:
            try:
                model = build()
            except ValueError as e:
                if attention != "sdpa" or "scaled_dot_product_attention" not in str(e):
                    raise
                options["attn_implementation"] = "eager"  # what Transformers takes for these models
                model = build()
        except Exception as e:  # whatever Transformers raises, the user gets one message
            raise _build_error(e, path, config, attention) from e
        if stands_in:
            stand_in(model)
    return model.eval()  # type: ignore[no-any-return]


def load_config(path: Path, *, trust_remote_code: bool = False) -> Any:
    """The folder's config object. Errors as in `build_trainer`."""
    from transformers import AutoConfig

    raw = read_config(path)
    require_trust(path, raw, trust_remote_code)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as e:
        from transformers import __version__

        kind = raw.get("model_type", "none given")
        raise BadInputError(
            f"Transformers {__version__} cannot use this config (model_type: {kind}): {_first_line(e)}",
            where=str(path / "config.json"),
            hint="use a Transformers version that knows the architecture, or give the model with factory=package.module:function",
        ) from None


def truncate(config: Any, layers: int | None) -> None:
    """Cut a config to its first `layers` decoder layers, in place, with every per-layer list in it."""
    if layers is None:
        return
    text = config.get_text_config()
    have = getattr(text, "num_hidden_layers", None)
    if have is None:
        raise BadInputError("layers cannot be cut: the config has no num_hidden_layers", where=type(text).__name__)
    if not 1 <= layers <= have:
        raise BadInputError(f"layers must be 1 to {have}, not {layers}", where=f"{type(text).__name__}.num_hidden_layers")
    for name, x in list(vars(text).items()):  # layer_types, no_rope_layers, layers_block_type, …
        if isinstance(x, list) and len(x) == have and not name.startswith("_"):
            setattr(text, name, x[:layers])
    text.num_hidden_layers = layers


def parse_dtype(name: str) -> torch.dtype:
    """A floating-point dtype by its torch name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise BadInputError(f"unknown dtype {name!r}", hint="give bfloat16, float16 or float32")
    return dtype


def _build_error(e: Exception, path: Path, config: Any, attention: str) -> Exception:
    kind = getattr(config, "model_type", type(config).__name__)
    if isinstance(e, BadInputError | CaptureFailedError):
        return e
    if "Unrecognized configuration class" in str(e):
        return BadInputError(
            f"Transformers has no causal language model for model_type {kind}", where=str(path), hint="use factory=package.module:function"
        )
    return CaptureFailedError(
        f"the {kind} model could not be built: {type(e).__name__}: {_first_line(e)}",
        where=f"{path}, attention={attention}",
        hint="check that the weights belong to this config; try dummy weights, or attention=eager",
    )


def _first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:300]


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings, log lines or progress bars of Transformers within the block; restored after it."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def refuse_other_model(spec: PatchSpec, folder: Path, layers: int | None, trust: bool = False) -> None:
    """Refuse a patch of another model before an engine is started.

    Raises:
        BadInputError: the model's config, with the first so many layers, is not the one that the patch was made for.
    """
    with quiet():
        config = load_config(folder, trust_remote_code=trust)
        truncate(config, layers)
    if (made := spec.model.get("config_digest")) and made != config_digest(config):
        text = config.get_text_config()
        theirs = f"{spec.model.get('architecture')}, {spec.model.get('layers')} layers"
        where = f"the patch: {theirs}; the model: {getattr(text, 'num_hidden_layers', '?')} layers"
        hint = "make a patch for this model with `graphalign find`"
        raise BadInputError("the patch is for a model with another config", where=where, hint=hint)
