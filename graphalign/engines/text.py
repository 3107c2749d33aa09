"""Sequences of real text for runs that need values and no answers: prompts, joined and cut."""

from __future__ import annotations

from pathlib import Path

from graphalign.engines.prompts import Prompts, read_prompts
from graphalign.engines.trainer import load_config
from graphalign.errors import BadInputError


def read_sequences(
    file: Path, model: Path, *, tokens: int, most: int, trust_remote_code: bool = False
) -> tuple[list[tuple[int, ...]], Prompts]:
    """Join a file's prompts and cut the text into sequences of equal length.

    Prompts of one chat template begin alike, and equal beginnings have equal values in every layer; joined they do not. The
    length is `tokens`, or the next smaller one that is no number in the model's config: the axis of the tokens must be known from others.

    Args:
        file: prompts, see `engines.prompts.read_prompts`.
        model: the model's folder.
        tokens: tokens per sequence.
        trust_remote_code: run code that lies in the folder.
        most: sequences, at most; what is left over at the end of the text is not used unless it is all there is.

    Raises:
        BadInputError: see `read_prompts`; or there is not enough text for two tokens.
    """
    prompts = read_prompts(file, model, trust_remote_code=trust_remote_code)
    text = [t for ids in prompts.ids for t in ids]
    length = _unmistakable(min(tokens, len(text)), model, trust_remote_code)
    if length < 2:
        raise BadInputError(f"{len(text)} tokens of text are too few", where=str(file), hint="give prompts with more text")
    return [tuple(text[i : i + length]) for i in range(0, len(text) - length + 1, length)][:most], prompts


def _unmistakable(tokens: int, model: Path, trust: bool) -> int:
    taken = {n for n in load_config(model, trust_remote_code=trust).get_text_config().to_dict().values() if isinstance(n, int)}
    while tokens in taken and tokens > 2:
        tokens -= 1
    return tokens
