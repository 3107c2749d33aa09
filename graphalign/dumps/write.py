"""Our own rows, for everybody whose trainer's dump is not read: one JSON object per response and line."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from graphalign.errors import GapInputError

LISTS: Final = ("prompt_token_ids", "response_token_ids", "inference_logprobs", "training_logprobs", "training_entropy", "mask")
NEEDED: Final = ("prompt_token_ids", "response_token_ids", "inference_logprobs")


def write_rows(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]], *, append: bool = True) -> int:
    """Write responses to a JSON-lines file that `graphalign gap --dump` reads; gzip if its name ends in .gz.

    Args:
        path: the file; its folder is made.
        rows: mappings with `prompt_token_ids` and `response_token_ids` (integers), `inference_logprobs` (one per response token, in nats,
            as the engine reported them), and optionally `training_logprobs` (the trainer's, of the same tokens, before the update),
            `training_entropy`, `mask` (1 for tokens that were sampled and count), `step`, and anything else that JSON can hold. Lists may
            be tensors or arrays.
        append: keep what the file has. A process of its own for each file: lines of two would mix.

    Returns:
        Rows written.

    Raises:
        GapInputError: a list is missing or has another length than `response_token_ids`.
        OSError: the file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = gzip.open if path.suffix == ".gz" else open
    count = 0
    with opened(path, "at" if append else "wt", encoding="utf-8") as f:
        for row in rows:
            f.write(json.dumps(_row(row, count), separators=(",", ":")) + "\n")
            count += 1
    return count


def _row(row: Mapping[str, Any], index: int) -> dict[str, Any]:
    out = {k: (_plain(v) if k in LISTS and v is not None else v) for k, v in row.items()}
    missing = [k for k in NEEDED if out.get(k) is None]
    if missing:
        raise GapInputError(f"a row has no {', '.join(missing)}", where=f"row {index}", hint=f"it has {', '.join(row)}")
    size = len(out["response_token_ids"])
    for name in LISTS[2:]:
        if out.get(name) is not None and len(out[name]) != size:
            raise GapInputError(
                f"{name} has {len(out[name])} entries for {size} response tokens",
                where=f"row {index}",
                hint="give one entry per response token",
            )
    return out


def _plain(values: Any) -> list[Any]:
    """A list of numbers, NaN and infinities as null: they are no JSON."""
    found: Sequence[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    return [None if isinstance(x, float) and not math.isfinite(x) else x for x in found]
