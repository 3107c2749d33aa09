"""Reads prompts and turns them into token ids of a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphalign.errors import BadInputError, GapInputError

MOST_PROMPTS = 4096
FORMS = '{"prompt": "text"}, {"messages": [{"role": "user", "content": "text"}]} or {"token_ids": [1, 2, 3]}'


@dataclass(frozen=True)
class Prompts:
    """Prompts as token ids."""

    ids: tuple[tuple[int, ...], ...]
    """One tuple per prompt, none empty."""
    source: str
    """Where they come from, in words."""
    note: str = ""
    """What a reader must know: that there was no tokenizer."""


def read_prompts(file: Path, model: Path, *, limit: int | None = None, trust_remote_code: bool = False) -> Prompts:
    """Read a JSON-lines file, one prompt per line in one of `FORMS`, and tokenise it with the model's own tokenizer.

    A chat message goes through the model's chat template; without one its text is taken as it is. A model without a tokenizer (the
    tiny examples) gets the text's UTF-8 bytes, modulo its vocabulary, and `note` says so.

    Args:
        file: the prompts.
        model: the model's folder.
        limit: take only the first so many.
        trust_remote_code: run code that lies in the folder, for its tokenizer.

    Raises:
        BadInputError: unreadable, no JSON, another form, or no prompts.
        GapInputError: token ids outside the model's vocabulary, or a tokenizer that is not this model's.
    """
    rows = _read(file)[:limit]
    if not rows:
        raise BadInputError(f"{file} holds no prompts", where=str(file), hint=f"give one prompt per line: {FORMS}")
    vocabulary = vocabulary_size(model)
    tokenizer = _tokenizer(model, trust_remote_code) if any("token_ids" not in r for r in rows) else None
    ids = []
    for number, row in enumerate(rows, 1):
        found = tuple(row["token_ids"]) if "token_ids" in row else _tokenise(row, tokenizer, vocabulary)
        if not found:
            raise GapInputError(f"the prompt on line {number} has no tokens", where=str(file), hint="remove it")
        beyond = [t for t in found if not 0 <= t < vocabulary]
        if beyond:
            raise GapInputError(
                f"token {beyond[0]} of the prompt on line {number} is outside the model's vocabulary of {vocabulary}",
                where=f"{file}; {model}",
                hint="the tokenizer in the model's folder belongs to another model" if "token_ids" not in row else "give ids of this model",
            )
        ids.append(found)
    bare = tokenizer is None and any("token_ids" not in r for r in rows)
    note = "the model has no tokenizer: the prompts' bytes stand in for tokens, and responses mean nothing" if bare else ""
    return Prompts(tuple(ids), f"{len(ids)} prompts of {file.name}", note)


def vocabulary_size(model: Path) -> int:
    """The number of token ids that a model's config names; 256 if it names none."""
    config = json.loads((model / "config.json").read_text())
    return int(config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or 256)


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise BadInputError(f"cannot read the prompts: {e}", where=str(file), hint="give a UTF-8 text file") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise BadInputError(f"line {number} of the prompts is not JSON: {e}", where=str(file), hint=f"one per line: {FORMS}") from None
        if not _well_formed(row):
            raise BadInputError(f"line {number} is not a prompt", where=f"{file}: {line[:120]}", hint=f"give {FORMS}")
        rows.append(row)
        if len(rows) > MOST_PROMPTS:
            raise BadInputError(
                f"more than {MOST_PROMPTS} prompts", where=str(file), hint="give fewer; --samples-per-prompt gives more responses"
            )
    return rows


def _well_formed(row: Any) -> bool:
    if not isinstance(row, dict):
        return False
    if "token_ids" in row:
        return isinstance(row["token_ids"], list) and all(type(t) is int for t in row["token_ids"])
    if "messages" in row:
        messages = row["messages"]
        return isinstance(messages, list) and bool(messages) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
        )  # fmt: skip
    return isinstance(row.get("prompt"), str)


def _tokenizer(model: Path, trust: bool) -> Any:
    """The model's tokenizer, or None if its folder has none."""
    if not any((model / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")):
        return None
    from graphalign.engines.trainer import quiet

    with quiet():
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=trust)
        except Exception as e:  # whatever the tokenizer's library raises
            first = (str(e).strip().splitlines() or [type(e).__name__])[0][:300]
            raise BadInputError(
                f"the model's tokenizer cannot be loaded: {first}", where=str(model), hint="give prompts as token_ids"
            ) from None


def _tokenise(row: dict[str, Any], tokenizer: Any, vocabulary: int) -> tuple[int, ...]:
    text = row["prompt"] if "prompt" in row else "\n".join(m["content"] for m in row["messages"])
    if tokenizer is None:
        return tuple(b % vocabulary for b in text.encode())
    if "messages" in row and getattr(tokenizer, "chat_template", None):
        found = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=True, return_dict=False)
        return tuple(int(t) for t in found)
    return tuple(int(t) for t in tokenizer(text)["input_ids"])
