"""The trainer's log-probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from graphalign.errors import GapInputError
from graphalign.logprobs import LogProbabilities, as_trained, fp32_log_softmax


@torch.no_grad()
def score(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    logprobs: LogProbabilities = fp32_log_softmax,
    autocast: str | None = None,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    progress: Callable[[float], None] | None = None,
) -> list[NDArray[np.float64]]:
    """The trainer's log-probability of every response token, one sequence at a time, without padding and without a KV cache.

    Args:
        model: the trainer's model; its mode is not changed.
        prompts: token ids per sequence, none empty.
        responses: token ids per sequence.
        logprobs: the trainer's log-probability function.
        autocast: dtype of `torch.autocast` around the forward.
        within: entered around every forward.
        progress: called with the fraction done.

    Returns:
        One array per sequence, `[len(response)]`, in nats.

    Raises:
        GapInputError: the model has no logits, or a vocabulary that does not hold the tokens.
    """
    device = next(model.parameters()).device
    cast = torch.autocast(device.type, dtype=getattr(torch, autocast) if autocast else None, enabled=autocast is not None)
    out = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not response:
            out.append(np.zeros(0))
            continue
        ids = torch.tensor([[*prompt, *response]], device=device)
        with cast, within():
            result = model(input_ids=ids, use_cache=False)
        logits = getattr(result, "logits", None)
        if logits is None:
            raise GapInputError(f"{type(model).__name__} returns no logits", hint="give a causal language model")
        size = logits.shape[-1]
        if max(response) >= size:
            raise GapInputError(
                f"token {max(response)} of sequence {i} is outside the trainer's vocabulary of {size}",
                hint="the engine and the trainer must have the same model and tokenizer",
            )
        found = as_trained(logprobs, autocast)(logits[0, len(prompt) - 1 : -1], ids[0, len(prompt) :])
        if found.shape != (len(response),):
            raise GapInputError(
                f"the log-probability function gives shape {tuple(found.shape)} for {len(response)} tokens",
                hint="it takes logits [tokens, vocabulary] and token ids [tokens], and returns [tokens]",
            )
        out.append(found.double().cpu().numpy())
        if progress is not None:
            progress((i + 1) / len(responses))
    return out
