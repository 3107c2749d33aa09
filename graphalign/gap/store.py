"""What was measured so far, in a folder: an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphalign.errors import CaptureFileError
from graphalign.ir.files import load_raw, write_bytes

LogProbs = list[NDArray[np.float64]]


def digest(*parts: Any) -> str:
    """SHA-256 of the parts' canonical JSON, 16 hex digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str, separators=(",", ":")).encode()).hexdigest()[:16]


def model_identity(folder: Path) -> dict[str, Any]:
    """What tells two checkpoints apart without reading them: the config's content, and names, sizes and times of the weight files."""
    weights = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".gguf"))
    return {
        "config": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        "weights": [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in weights],
    }


class Store:
    """Log-probabilities per variant, one file each, named after it.

    Args:
        folder: made if it isn't there.
        key: digest of everything that they depend on, but for the variant: files of another key are measured again.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.reused: list[str] = []
        """Variants that were not measured in this run."""

    def get(self, name: str, variant: Any, lengths: Sequence[int], measure: Callable[[], LogProbs]) -> LogProbs:
        """The log-probabilities of a variant: from its file if it is of this key, else measured and saved.

        Args:
            name: of the variant.
            variant: what tells variants of one name apart (the patch).
            lengths: tokens per sequence.
            measure: measures it.
        """
        path = self.folder / (re.sub(r"[^A-Za-z0-9_+.-]+", "_", name)[:120] + ".json.gz")
        key = digest(self.key, name, variant)
        found = self._read(path, key, lengths)
        if found is not None:
            self.reused.append(name)
            return found
        values = measure()
        import gzip

        data = {"format": "graphalign.logprobs", "version": 1, "key": key, "variant": name, "logprobs": [v.tolist() for v in values]}
        write_bytes(path, gzip.compress(json.dumps(data).encode(), 6, mtime=0))
        return values

    def _read(self, path: Path, key: str, lengths: Sequence[int]) -> LogProbs | None:
        if not path.is_file():
            return None
        try:
            raw = load_raw(path, kind="log-probabilities file")
            if not isinstance(raw, dict) or raw.get("key") != key:
                return None
            values = [np.asarray(v, np.float64) for v in raw["logprobs"]]
        except (CaptureFileError, KeyError, ValueError, TypeError):
            return None  # damaged: measured again
        return values if [v.shape for v in values] == [(n,) for n in lengths] else None
