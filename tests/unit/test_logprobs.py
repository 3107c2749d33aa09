"""Names of log-probability functions, which results are kept under."""

from __future__ import annotations

import functools

import torch

from graphalign.logprobs import as_trained, find_function, fp32_log_softmax, name_of, selective_log_softmax


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


def test_trls_function_under_autocast_gets_fp32_logits() -> None:
    logits, tokens = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.arange(3)
    assert as_trained(selective_log_softmax, None) is selective_log_softmax
    assert as_trained(fp32_log_softmax, "bfloat16") is fp32_log_softmax
    found = as_trained(selective_log_softmax, "bfloat16")(logits, tokens)
    assert found.dtype == torch.float32
    assert torch.equal(found, selective_log_softmax(logits.float(), tokens))
