"""Names of log-probability functions, which results are kept under."""

from __future__ import annotations

import functools

import torch

from graphalign.logprobs import find_function, fp32_log_softmax, name_of, selective_log_softmax


class Mine:
    def __call__(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return fp32_log_softmax(logits, tokens)


def test_names_are_the_same_in_every_process() -> None:
    assert name_of(fp32_log_softmax) == "fp32"
    assert name_of(selective_log_softmax) == "trl"
    assert name_of(Mine()) == f"{__name__}:Mine"
    assert name_of(functools.partial(fp32_log_softmax)) == "functools:partial"
    assert name_of(lambda logits, tokens: fp32_log_softmax(logits, tokens)).startswith(f"{__name__}:")


def test_a_name_finds_its_function() -> None:
    assert find_function("graphalign.logprobs:selective_log_softmax") is selective_log_softmax
