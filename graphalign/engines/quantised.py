"""Refuses quantised models before an engine starts: both sides would hold other numbers, which no map of roundings describes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from graphalign.errors import BadInputError

KEYS = ("quantization_config", "compression_config")
"""Entries of a config under which checkpoints name their quantisation (`compression_config`: compressed-tensors before 0.7)."""
MODELOPT = "hf_quant_config.json"
"""ModelOpt writes it beside the config."""
WHOLE_CACHES = ("auto", "bfloat16", "float16", "float32", "half", "float")
"""Formats of vLLM's KV cache that hold what attention is given."""
HINT = "capture the unquantised checkpoint (BF16 weights): graphalign maps the rounding of BF16 activations, not quantised weights"


def refuse_quantised(model: Path, engine_args: Mapping[str, Any] | None = None) -> None:
    """Look for a quantisation in a model folder and in the engine's arguments; nothing is loaded.

    Args:
        model: folder with a `config.json`; one that cannot be read is left to the reader that needs it.
        engine_args: arguments of vLLM's engine, None for the trainer's side.

    Raises:
        BadInputError: the checkpoint, or the engine by its arguments, is quantised.
    """
    for where, method in (*_of_folder(model), *_of_arguments(engine_args or {})):
        raise BadInputError(f"the model is quantised ({method}), which is not covered", where=where, hint=HINT)
    cache = (engine_args or {}).get("kv_cache_dtype")
    if cache is not None and str(cache) not in WHOLE_CACHES:
        raise BadInputError(
            f"the engine's KV cache is quantised ({cache}), which is not covered",
            where=f"--engine-arg kv_cache_dtype={cache}",
            hint="leave kv_cache_dtype out",
        )


def _of_folder(model: Path) -> Iterator[tuple[str, str]]:
    config = _read(model / "config.json")
    for path, found in _entries(config):
        yield f"{model / 'config.json'}, {path}", _method(found)
    if (beside := _read(model / MODELOPT)) and (inner := beside.get("quantization", beside)):
        method = inner.get("quant_algo") if isinstance(inner, dict) else None
        cache = inner.get("kv_cache_quant_algo") if isinstance(inner, dict) else None
        if method or cache:
            yield str(model / MODELOPT), f"modelopt, {method or 'KV cache ' + str(cache)}"


def _of_arguments(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("quantization", "quantization_config"):
        if (value := arguments.get(key)) and value != "none":
            yield f"--engine-arg {key}={value}", _method(value)
    if (form := arguments.get("load_format")) == "bitsandbytes":
        yield f"--engine-arg load_format={form}", "bitsandbytes"
    overrides = arguments.get("hf_overrides")
    for path, found in _entries(overrides if isinstance(overrides, dict) else {}):
        yield f"--engine-arg hf_overrides, {path}", _method(found)


def _entries(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Quantisations in a config and in the configs inside it (`text_config`), with their paths."""
    for key, value in config.items():
        here = f"{path}.{key}" if path else key
        if key in KEYS:
            if value:
                yield here, value
        elif isinstance(value, dict):
            yield from _entries(value, here)


def _method(found: Any) -> str:
    """The method's name, as far as one is given."""
    if not isinstance(found, dict):
        return str(found)[:80]
    for key in ("quant_method", "quant_algo", "format"):
        if isinstance(found.get(key), str):
            return str(found[key])
    bits = next((k for k in ("load_in_4bit", "load_in_8bit") if found.get(k)), None)
    return f"bitsandbytes, {bits}" if bits else "no method named"


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}
