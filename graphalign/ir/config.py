"""Identity of a model's configuration."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def config_digest(config: Any) -> str | None:
    """SHA-256 of the config's canonical JSON, without private keys, paths and the Transformers version."""
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        return None
    skip = {"transformers_version", "name_or_path", "dtype", "torch_dtype"}  # dtype: it is the regime's, not the model's
    plain = _public(to_dict(), skip)
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


def _public(x: Any, skip: set[str]) -> Any:
    if isinstance(x, dict):
        return {str(k): _public(v, skip) for k, v in x.items() if not str(k).startswith("_") and k not in skip}
    return [_public(y, skip) for y in x] if isinstance(x, list | tuple) else x
