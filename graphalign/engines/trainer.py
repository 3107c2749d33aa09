"""Builds the trainer's model: a Transformers causal language model in eager mode."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphalign.engines.flash import needs_stand_in, stand_in
from graphalign.engines.model_folder import read_config, require_trust, use_weights
from graphalign.engines.quantised import refuse_quantised
from graphalign.errors import BadInputError, CaptureFailedError

DUMMY_SEED = 0
SHARE_FROM = 4 << 30
"""Bytes of parameters above which dummy matrices share memory."""
SHIFTS = 64
DUMMY_BLOCK = 1 << 20
"""Elements of the random block that dummy weights repeat: filling 8B-wide layers takes a copy, not a random draw."""


def build_trainer(
    model_dir: str | os.PathLike[str],
    layers: int | None = None,
    dtype: str = "bfloat16",
    attention: str = "sdpa",
    weights: str | None = None,
    *,
    trust_remote_code: bool = False,
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
            return _dummy_model(config, options)

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


def _dummy_model(config: Any, options: dict[str, Any]) -> nn.Module:
    """From the config with dummy weights: buffers are computed as always, parameters are filled with repeated noise."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model: nn.Module = AutoModelForCausalLM.from_config(config, **options)
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()  # tying is part of the initialisation that was skipped
    if sum(p.numel() * p.element_size() for p in model.parameters()) > SHARE_FROM:
        share_dummy(model)
    else:
        fill_dummy(model)
    return model


@torch.no_grad()
def share_dummy(model: nn.Module) -> None:
    """Let the parameters of a large model map one file of noise, each privately: a full-depth model needs the memory of its largest.

    Vectors are filled as by `fill_dummy`. The file has no name and goes with the last mapping; a page that is written to becomes
    the writer's own.
    """
    import mmap

    import numpy as np

    block = torch.randn(DUMMY_BLOCK, generator=torch.Generator().manual_seed(DUMMY_SEED)) * 0.02
    files: dict[torch.dtype, Any] = {}
    matrices = [p for p in model.parameters() if p.ndim > 1]
    for dtype in {p.dtype for p in matrices}:
        raw = block.to(dtype).view(torch.uint8).numpy().tobytes()
        largest = max(p.numel() * p.element_size() for p in matrices if p.dtype == dtype)
        files[dtype] = file = tempfile.TemporaryFile()  # noqa: SIM115  (mapped below, closed there)
        for _ in range(0, largest + SHIFTS * mmap.PAGESIZE, len(raw)):
            file.write(raw)
        file.flush()
    for index, p in enumerate(matrices):
        offset = index % SHIFTS * mmap.PAGESIZE  # no two neighbours alike
        view = np.memmap(files[p.dtype], dtype=np.uint8, mode="c", offset=offset, shape=(p.numel() * p.element_size(),))
        p.data = torch.from_numpy(view).view(p.dtype).view(p.shape)
    for file in files.values():
        file.close()
    fill_dummy(model, vectors_only=True)


@torch.no_grad()
def fill_dummy(model: nn.Module, *, vectors_only: bool = False) -> None:
    """Fill parameters with noise: standard deviation 0.02, vectors other than biases around 1 (norm weights are not all ones)."""
    block = torch.randn(DUMMY_BLOCK, generator=torch.Generator().manual_seed(DUMMY_SEED))
    blocks: dict[torch.dtype, torch.Tensor] = {}
    for index, (name, p) in enumerate(model.named_parameters()):
        if vectors_only and p.ndim > 1:
            continue
        noise = blocks.setdefault(p.dtype, (block * 0.02).to(p.dtype))
        flat = p.data.view(-1)
        shift = index * 7919 % (DUMMY_BLOCK // 2)  # no two parameters alike
        for start in range(0, flat.numel(), DUMMY_BLOCK // 2):
            piece = flat[start : start + DUMMY_BLOCK // 2]
            piece.copy_(noise[shift : shift + piece.numel()])
        if p.ndim <= 1 and not name.endswith("bias"):
            flat.mul_(5).add_(1)


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
