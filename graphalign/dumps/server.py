"""JSON lines of vLLM's server: what `/v1/completions`, `/v1/chat/completions` and `/inference/v1/generate` answer, one object per line.

Written from vLLM 0.32's `entrypoints/openai/completion/protocol.py`, `entrypoints/openai/chat_completion/protocol.py` and
`entrypoints/scale_out/token_in_token_out/protocol.py`. Lines of its batch runner (`response.body`) are read too, and lines that hold
`request` and `response`. Token ids are needed: `return_token_ids`, or `return_tokens_as_token_ids` ("token_id:17").

A response whose prompt is another's prompt and answer, and which has `prompt_logprobs`, is the same engine scoring these tokens in one
prefill.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from graphalign.dumps.adapters import look_up
from graphalign.dumps.files import Record
from graphalign.dumps.rows import Array, Fault, Ids, Refused, Row

NAME: Final = "vllm-server"
TITLE: Final = "JSON lines of vLLM's server"
SWITCH: Final = 'ask with "logprobs": 0 (chat: "logprobs": true) and "return_token_ids": true'
LOWEST: Final = -9999.0
"""What the server writes for −inf, which is no JSON."""
_PLACEHOLDER = re.compile(r"token_id:(\d+)")
SETTINGS: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": (0, -1), "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
                   "frequency_penalty": 0.0}  # fmt: skip
"""Sampling parameters that leave the model's distribution as it is."""


def body_of(value: Any) -> Mapping[str, Any] | None:
    """The server's answer in a record, or None."""
    for path in ("", "response.body", "response", "body"):
        found = look_up(value, path) if path else value
        if isinstance(found, Mapping) and isinstance(found.get("choices"), list):
            return found
    return None


@dataclass
class Server:
    """Reads answers, and pairs those that were sampled with those that scored the same tokens."""

    scored: dict[bytes, Array] = field(default_factory=dict)
    """Tokens of a whole prompt to their log-probabilities, the first NaN."""
    unusual: dict[str, int] = field(default_factory=dict)
    """Sampling parameters in requests that change the distribution, with how many rows have them."""
    full_rows: int = 0
    """Rows of top tokens behind an uncertain token which hold all of the probability."""
    uncertain_rows: int = 0

    def rows(self, record: Record) -> Iterator[Row | Refused]:
        """The sampled responses of one line; what only scores a prompt is kept for `pair`."""
        body = body_of(record.value)
        if body is None:
            yield Refused(record.where, Fault.NUMBERS, "no answer of the server: no `choices`" + _error(record.value))
            return
        request = next((r for k in ("request", "request.body") if isinstance(r := look_up(record.value, k), Mapping)), {})
        for i, choice in enumerate(body["choices"]):
            where = f"{record.where}, choice {i}" if len(body["choices"]) > 1 else record.where
            try:
                found = self._row(choice, body, request, where)
            except (TypeError, ValueError, KeyError, AttributeError) as e:
                yield Refused(where, Fault.NUMBERS, f"not as the server writes it: {type(e).__name__} {e}"[:160])
                continue
            if found is not None:
                yield found

    def pair(self, row: Row) -> Row:
        """The row with the engine's prefill, if another line scored its tokens."""
        if row.tokens is None or (found := self.scored.get(_key(row.tokens))) is None:
            return row
        return replace(row, prefill=found[row.first :])

    def _row(self, choice: Mapping[str, Any], body: Mapping[str, Any], request: Mapping[str, Any], where: str) -> Row | Refused | None:
        prompt = _ids(choice.get("prompt_token_ids") or body.get("prompt_token_ids") or request.get("prompt") or request.get("token_ids"))
        scores = choice.get("prompt_logprobs") or body.get("prompt_logprobs")
        if scores and prompt is not None:
            if len(scores) != len(prompt):
                return Refused(where, Fault.LENGTHS, f"prompt_logprobs has {len(scores)} entries for {len(prompt)} prompt tokens")
            self.scored[_key(prompt)] = _scored(scores, prompt)
        logprobs = choice.get("logprobs")
        if not logprobs:
            return None if scores else Refused(where, Fault.NONE, "logprobs is null")
        values, names, tops = _columns(logprobs)
        ids = _ids(choice.get("token_ids"))
        if ids is None:
            ids = _placeholders(names)
        if ids is not None and prompt is not None and len(values) == len(prompt) + len(ids):  # echo
            values, tops = values[len(prompt) :], tops[len(prompt) :]
        if ids is not None and len(values) != len(ids):
            return Refused(where, Fault.LENGTHS, f"logprobs has {len(values)} entries for {len(ids)} tokens")
        if scores and prompt is not None and len(values) <= 1:
            return None  # a request that scores its prompt has to generate a token
        for key, plain in SETTINGS.items():
            if key in request and request[key] is not None and request[key] not in (plain if isinstance(plain, tuple) else (plain,)):
                name = f"{key}={request[key]:g}"
                self.unusual[name] = self.unusual.get(name, 0) + 1
        self._count(values, tops)
        tokens = None if prompt is None or ids is None else np.concatenate([prompt, ids])
        return Row(where, "", np.ones(len(values), np.bool_), values, None, tokens=tokens, masked=True)

    def _count(self, values: Array, tops: list[Array]) -> None:
        for value, top in zip(values, tops, strict=True):
            if len(top) > 1 and value < np.log(0.5):
                self.uncertain_rows += 1
                self.full_rows += bool(abs(np.exp(top).sum() - 1) < 1e-6)


def _columns(logprobs: Mapping[str, Any]) -> tuple[Array, list[str], list[Array]]:
    """Log-probabilities, names and top tokens' log-probabilities, of completions or of chat."""
    if "token_logprobs" in logprobs:
        values = logprobs["token_logprobs"]
        names = [str(t) for t in logprobs.get("tokens") or []]
        tops = [_floor(list((t or {}).values())) for t in logprobs.get("top_logprobs") or [None] * len(values)]
    else:
        content = logprobs.get("content") or []
        values = [c["logprob"] for c in content]
        names = [f"token_id:{c['token_id']}" if "token_id" in c else str(c.get("token", "")) for c in content]
        tops = [_floor([t["logprob"] for t in c.get("top_logprobs") or []]) for c in content]
    if len(tops) != len(values):
        tops = [np.zeros(0)] * len(values)
    return _floor(values), names, tops


def _floor(values: Any) -> Array:
    found = np.asarray(values, np.float64)
    return np.where(found == LOWEST, -np.inf, found)


def _scored(scores: list[Any], prompt: Ids) -> Array:
    """Log-probabilities of a prompt's tokens; NaN where the server gives none (the first)."""
    out = np.full(len(prompt), np.nan)
    for i, (entry, token) in enumerate(zip(scores, prompt, strict=True)):
        if entry is not None and (found := entry.get(str(int(token)))) is not None:
            out[i] = found["logprob"] if isinstance(found, Mapping) else found
    return _floor(out)


def _ids(value: Any) -> Ids | None:
    if not isinstance(value, list) or not value or not all(isinstance(x, int) and x >= 0 for x in value):
        return None
    return np.asarray(value, np.int64)


def _placeholders(names: list[str]) -> Ids | None:
    found = [_PLACEHOLDER.fullmatch(n) for n in names]
    return np.asarray([int(m[1]) for m in found if m], np.int64) if found and all(found) else None


def _key(tokens: Ids) -> bytes:
    return np.ascontiguousarray(tokens, np.int64).tobytes()


def _error(value: Any) -> str:
    message = look_up(value, "error.message") or look_up(value, "response.body.error.message") or look_up(value, "message")
    return f" (it says: {str(message)[:100]})" if message else ""
