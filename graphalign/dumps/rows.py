"""A record of any format as one row: tokens, which of them count, and the log-probabilities of both sides on the same positions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from graphalign.dumps.adapters import Adapter, Column, Layout, Mask, look_up
from graphalign.dumps.files import Record

Array = NDArray[np.float64]
Ids = NDArray[np.int64]
Kept = NDArray[np.bool_]


@dataclass(frozen=True)
class Row:
    """One response. All arrays are `[positions]`, float64 in nats; positions are the whole sequence, or the response alone."""

    where: str
    """File and place in it."""
    step: str
    """The training step; empty if it isn't known."""
    keep: Kept
    """Tokens that were sampled and count."""
    inference: Array
    """As the engine reported them; NaN where there is none."""
    training: Array | None
    entropy: Array | None = None
    tokens: Ids | None = None
    """Ids of the whole sequence, `[sequence]`; positions are its end."""
    prefill: Array | None = None
    """The engine's log-probabilities of the same tokens in one prefill."""
    masked: bool = True
    """The record says which tokens count."""

    @property
    def first(self) -> int:
        """Index in the sequence of the first position."""
        return 0 if self.tokens is None else len(self.tokens) - len(self.keep)


class Fault(StrEnum):
    """Why a row is left out."""

    LENGTHS = "lists of different lengths"
    MASK = "a mask that is none"
    TOKENS = "token ids that are none"
    NONE = "no log-probabilities"
    NUMBERS = "something else than numbers"
    UNDEFINED = "NaN or null"
    FILTERED = "−inf"
    POSITIVE = "positive log-probabilities"
    ZEROS = "zeros where log-probabilities should be"
    SHIFTED = "sides shifted by one token"
    MASK_SHIFTED = "a mask shifted by one token"
    UNUSABLE = "marked as unusable"


HINTS: Final[dict[Fault, str]] = {
    Fault.LENGTHS: "give one entry per token on both sides, without prompt and padding; one fewer is often logits[:, :-1] of tokens[:, 1:]",
    Fault.MASK: "a mask holds 0 and 1, one per token",
    Fault.TOKENS: "token ids are integers from 0 on",
    Fault.NONE: "switch them on in the trainer",
    Fault.NUMBERS: "lists of numbers are wanted, one per token; of top tokens take the entry of the sampled one",
    Fault.UNDEFINED: "look for NaN in the logits; prime-rl and TRL write a NaN as null",
    Fault.FILTERED: "a top-k, top-p or min-p filter was applied to a token that was sampled without it (vLLM's server writes −9999)",
    Fault.POSITIVE: "logits, probabilities or a loss instead of log-probabilities",
    Fault.ZEROS: "padding, tool output or a column that was never computed is inside the mask",
    Fault.SHIFTED: "logits at position t predict token t + 1: score tokens[:, 1:] with logits[:, :-1]",
    Fault.MASK_SHIFTED: "the mask is of the predicted tokens, tokens[:, 1:], and the lists are of tokens, or the other way round",
    Fault.UNUSABLE: "nothing to do: the trainer does not use it either, or the record does not say which tokens were sampled",
}


@dataclass(frozen=True)
class Refused:
    """A record that gave no row."""

    where: str
    fault: Fault
    detail: str


class _RowError(Exception):
    def __init__(self, fault: Fault, detail: str) -> None:
        self.fault, self.detail = fault, detail
        super().__init__(detail)


def rows_of(record: Record, adapter: Adapter, path: str) -> Iterator[Row | Refused]:
    """The rows of one record: one, or one per element of the list that the format explodes.

    Args:
        record: as it was read.
        adapter: its format.
        path: of the file, for the step.
    """
    values = look_up(record.value, adapter.explode, []) if adapter.explode else [record.value]
    for i, value in enumerate(values if isinstance(values, list) else [values]):
        where = f"{record.where}, {adapter.explode}[{i}]" if adapter.explode else record.where
        try:
            yield _row(value, adapter, where, path)
        except _RowError as e:
            yield Refused(where, e.fault, e.detail)


def _row(value: Any, a: Adapter, where: str, path: str) -> Row:
    def get(name: str) -> Any:
        found = look_up(value, name) if name else None
        if a.batch_of_one and isinstance(found, list) and len(found) == 1:
            return found[0]
        return found

    for skip in a.skip:
        if get(skip.field):
            raise _RowError(Fault.UNUSABLE, skip.why)
    tokens, response = _tokens(a, get)
    length = _integer(get(a.length), a.length)
    if length is not None and tokens is not None:
        tokens = tokens[:length]
    columns = {name: c for name in ("inference", "training", "entropy") if (c := getattr(a, name)) is not None}
    raw = {name: _numbers(get(c.field), c.field) for name, c in columns.items()}
    if raw["inference"] is None:
        raise _RowError(Fault.NONE, f"{a.inference.field} is null or missing")
    masks = [(m, _mask(get(m.field), m)) for m in a.masks]
    whole = any(c.layout is not Layout.RESPONSE for c in (*columns.values(), *(m for m, _ in masks if m.per == "token")))
    size = len(tokens) if whole and tokens is not None else response if response is not None else len(raw["inference"])
    keep = np.ones(size, np.bool_)
    if whole and response is not None and tokens is not None:
        keep[: len(tokens) - response] = False
    for mask, found in masks:
        if found is None:
            continue
        if mask.per == "row":
            keep &= bool(found.all()) and found.size > 0
        else:
            keep &= _place(found.astype(np.float64), mask, size, length, response) == 1
    placed = {name: _place(x, columns[name], size, length, response) for name, x in raw.items() if x is not None}
    if tokens is not None and len(tokens) < size:
        raise _RowError(Fault.LENGTHS, f"{size} log-probabilities for {len(tokens)} tokens")
    step = get(a.step)
    if step is None and a.step_from_name and (found_step := re.search(a.step_from_name, path)):
        step = found_step[1]
    masked = any(found is not None for _, found in masks)
    return Row(
        where,
        "" if step is None else str(step),
        keep,
        placed["inference"],
        placed.get("training"),
        placed.get("entropy"),
        tokens,
        masked=masked,
    )


def _tokens(a: Adapter, get: Any) -> tuple[Ids | None, int | None]:
    """Ids of the sequence, and the number of response tokens if it is known."""
    if a.prompt:
        prompt, response = _ids(get(a.prompt), a.prompt), _ids(get(a.response), a.response)
        if prompt is None or response is None:
            raise _RowError(Fault.TOKENS, f"{a.prompt if prompt is None else a.response} is null or missing")
        return np.concatenate([prompt, response]), len(response)
    tokens = _ids(get(a.tokens), a.tokens) if a.tokens else None
    count = _integer(get(a.response_length), a.response_length)
    if count is None and tokens is not None and (prompt_count := _integer(get(a.prompt_length), a.prompt_length)) is not None:
        count = len(tokens) - prompt_count
    if count is not None and (count < 0 or (tokens is not None and count > len(tokens))):
        raise _RowError(Fault.LENGTHS, f"{count} response tokens in a sequence of {0 if tokens is None else len(tokens)}")
    return tokens, count


def _place(x: Array, column: Column, size: int, length: int | None, response: int | None) -> Array:
    """A list on the row's positions, NaN where it has none."""
    if column.layout is Layout.RESPONSE:
        if response is not None and len(x) != response:
            raise _RowError(Fault.LENGTHS, f"{column.field} has {len(x)} entries for {response} response tokens")
        if len(x) > size or (response is None and len(x) != size):
            raise _RowError(Fault.LENGTHS, f"{column.field} has {len(x)} entries for {size} tokens")
        return np.concatenate([np.full(size - len(x), np.nan), x])
    if column.layout is Layout.NEXT:
        x = np.concatenate([[np.nan], x[: size - 1] if len(x) >= size else x])
    if length is not None:
        x = x[:length]
    if len(x) != size:
        raise _RowError(Fault.LENGTHS, f"{column.field} has {len(x)} entries for {size} tokens")
    return x


def as_array(value: Any) -> Array:
    """Numbers as float64, null as NaN.

    Raises:
        TypeError, ValueError: something else, or nested.
    """
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().double().numpy()
    found = np.asarray(value, np.float64)
    if found.ndim != 1:
        raise ValueError(f"shape {found.shape}")
    return found


def _numbers(value: Any, name: str) -> Array | None:
    if value is None:
        return None
    try:
        found = as_array(value)
    except (TypeError, ValueError) as e:
        raise _RowError(Fault.NUMBERS, f"{name} is no list of numbers: {str(e)[:80]}") from None
    return found


def _ids(value: Any, name: str) -> Ids | None:
    found = _numbers(value, name)
    if found is None:
        return None
    if not (np.isfinite(found).all() and (found >= 0).all() and (found == np.floor(found)).all()):
        raise _RowError(Fault.TOKENS, f"{name} holds something else than token ids")
    return found.astype(np.int64)


def _mask(value: Any, mask: Mask) -> Kept | None:
    name = mask.field
    if value is None:
        if mask.optional:
            return None
        raise _RowError(Fault.MASK, f"{name} is null or missing")
    found = _numbers(value if isinstance(value, list) or np.ndim(value) else [value], name)
    if found is None or not (np.isfinite(found).all() if mask.per == "row" else np.isin(found, (0, 1)).all()):
        raise _RowError(Fault.MASK, f"{name} holds other values than 0 and 1")
    return np.asarray(found != 0, np.bool_)


def _integer(value: Any, name: str) -> int | None:
    if value is None or not name:
        return None
    number = float(np.asarray(value, np.float64).reshape(-1)[0]) if np.size(value) else np.nan
    if not np.isfinite(number) or number != int(number):
        raise _RowError(Fault.LENGTHS, f"{name} is no number of tokens: {value!r}"[:120])
    return int(number)
