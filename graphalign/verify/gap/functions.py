"""Log-probability functions of trainers: `(logits [tokens, vocabulary], token ids [tokens]) → [tokens]`."""

from __future__ import annotations

import importlib
import os
import sys

import torch

from graphalign.console import check_factory
from graphalign.errors import BadInputError
from graphalign.verify.gap.score import LogProbabilities, fp32_log_softmax

BUILT_IN = {"fp32": fp32_log_softmax}


def selective_log_softmax(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """TRL's `selective_log_softmax` (trl/trainer/utils.py): for FP32 logits x[token] − logsumexp(x); in BF16 log_softmax of every row in
    BF16, because logsumexp is unstable there."""
    if logits.dtype in (torch.float32, torch.float64):
        chosen = logits.gather(-1, tokens[:, None])[:, 0]
        return chosen - torch.stack([row.logsumexp(-1) for row in logits])
    rows = [row.log_softmax(-1).gather(-1, t[None])[0] for row, t in zip(logits, tokens, strict=True)]
    return torch.stack(rows) if rows else logits.new_zeros(0)


BUILT_IN["trl"] = selective_log_softmax


def find_function(name: str) -> LogProbabilities:
    """A built-in function (`fp32`, `trl`), or `package.module:function` imported with the working directory on the path.

    Raises:
        BadInputError: no such function.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise BadInputError(f"unknown log-probability function {name!r}", where="--logprobs", hint="give fp32, trl, or pkg.module:function")
    check_factory(name)
    module, _, path = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as e:
        raise BadInputError(f"--logprobs {name} cannot be imported: {e}", where="--logprobs", hint="give pkg.module:function") from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise BadInputError(f"--logprobs {name} is not a function", where="--logprobs")
    return found
