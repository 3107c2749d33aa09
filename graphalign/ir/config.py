"""Identity of a model's configuration."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_NOT_THE_MODEL = frozenset(
    {"transformers_version", "name_or_path"}
    | {"dtype", "torch_dtype", "attn_implementation", "experts_implementation"}  # the regime's; verl sets the latter as plain keys
    # set by tokenizers, trainers and save_pretrained, and no part of what a forward computes
    | {"architectures", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "id2label", "label2id", "problem_type"}
    | {"output_attentions", "output_hidden_states", "return_dict"}
)


def config_digest(config: Any) -> str | None:
    """SHA-256 of the config's canonical JSON, without private keys, paths and what says nothing about the model's function."""
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        return None
    plain = _public(to_dict(), _NOT_THE_MODEL)
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


def _public(x: Any, skip: frozenset[str]) -> Any:
    if isinstance(x, dict):
        return {str(k): _public(v, skip) for k, v in x.items() if not str(k).startswith("_") and k not in skip}
    return [_public(y, skip) for y in x] if isinstance(x, list | tuple) else x
