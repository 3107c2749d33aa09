"""Log-probability functions of trainers: the tail of the training graph, from logits to the log-probabilities of given tokens."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

import torch

from graphalign.console import check_factory
from graphalign.errors import BadInputError

LogProbabilities = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [tokens, vocabulary], token ids [tokens]) to log-probabilities [tokens]."""


def fp32_log_softmax(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities as vLLM's sampler reports them (`raw_logprobs`): log_softmax of the logits in FP32."""
    return logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def selective_log_softmax(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """TRL's `selective_log_softmax` (trl/trainer/utils.py, 1.16.0) of one sequence: x[token] − logsumexp(x) for FP32 logits; for BF16
    logits log_softmax in BF16, because logsumexp is unstable there."""
    if logits.dtype in (torch.float32, torch.float64):
        return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


BUILT_IN: dict[str, LogProbabilities] = {"fp32": fp32_log_softmax, "trl": selective_log_softmax}
DEFAULT = "fp32"


def as_trained(function: LogProbabilities, autocast: str | None) -> LogProbabilities:
    """A log-probability function as the trainer calls it: where TRL trains under autocast, its function gets FP32 logits, because
    accelerate puts `convert_outputs_to_fp32` around the model's forward (1.15, `Accelerator.prepare_model`)."""
    return selective_log_softmax_of_outputs if function is selective_log_softmax and autocast is not None else function


def selective_log_softmax_of_outputs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`selective_log_softmax` of logits that are converted to FP32 first."""
    return selective_log_softmax(logits.float(), tokens)


FORM = "it takes logits [tokens, vocabulary] and token ids [tokens], and returns log-probabilities [tokens]"


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
        raise BadInputError(f"--logprobs {name} is not a function", where="--logprobs", hint=FORM)
    trial = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    refuse_nan(take(found, trial, torch.arange(4), name), name)  # before hours of work
    return found


def name_of(function: LogProbabilities) -> str:
    """What `find_function` would call it; for an object without a name, its class."""
    built_in = [name for name, f in BUILT_IN.items() if f is function]
    named: object = function if hasattr(function, "__qualname__") else type(function)
    return built_in[0] if built_in else f"{named.__module__}:{named.__qualname__}"  # type: ignore[attr-defined]


def take(function: LogProbabilities, logits: torch.Tensor, tokens: torch.Tensor, name: str = "") -> torch.Tensor:
    """Call a log-probability function.

    Raises:
        BadInputError: it raises, or does not return one number per token.
    """
    name = name or getattr(function, "__name__", "the log-probability function")
    try:
        found = function(logits, tokens)
    except Exception as e:
        raise BadInputError(f"{name} failed: {type(e).__name__}: {e}", where="--logprobs", hint=FORM) from e
    if not isinstance(found, torch.Tensor) or found.shape != tokens.shape:
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise BadInputError(f"{name} returns {shape} for {len(tokens)} tokens", where="--logprobs", hint=FORM)
    return found


def refuse_nan(found: torch.Tensor, name: str) -> None:
    """Refuse log-probabilities that are no numbers.

    Raises:
        BadInputError: the first that is NaN.
    """
    if found.isnan().any():
        at = int(found.isnan().nonzero()[0])
        raise BadInputError(
            f"{name} returns NaN for token {at} of {len(found)}", where="--logprobs", hint="look for NaN in what it computes"
        )
