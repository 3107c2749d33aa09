"""From the last norm to log-probabilities: the engine's `compute_logits` and sampler against the trainer's function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from graphalign.capture.training import record_forward
from graphalign.engines.examples import resolve_model
from graphalign.engines.trainer import build_trainer
from graphalign.errors import BadInputError
from graphalign.ir.inference import TAIL
from graphalign.logprobs import fp32_log_softmax, selective_log_softmax
from graphalign.patch.make import make_spec
from graphalign.sites.find import diff
from graphalign.sites.report import Report
from tests.breadth import models
from tests.breadth.captured import captures, counts, report

LAYERS = {"norm_weight": 25, "residual_rmsnorm": 24, "residual_stream": 11, "rope": 48, "swiglu": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return build_trainer(resolve_model("example:qwen3", tmp_path_factory.mktemp("cache")))


def compared(model: nn.Module, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Report:
    return diff(captures("qwen3_tail")[0], record_forward(model, logprobs=function))


def clean(found: Report) -> bool:
    return not any(getattr(found, b) for b in ("leftovers", "undetermined", "conflicting", "unpatchable", "semantic", "tail"))


def test_the_engine_takes_log_softmax_in_fp32_of_bf16_logits(model: nn.Module) -> None:
    assert captures("qwen3_tail")[0].graphs[-1].name == TAIL
    found = compared(model, fp32_log_softmax)
    assert counts(found) == LAYERS
    assert clean(found)
    assert found.stats["check"]["operands"] == 62  # the log-probabilities among them
    assert found.stats["check"]["equal_with_sites"] == 1.0


def test_trls_function_rounds_to_bf16() -> None:
    found = report("qwen3_tail")
    assert found.regime["logprobs"] == "trl"
    assert counts(found) == {**LAYERS, "logprob_tail": 1}
    assert clean(found)
    (site,) = next(g for g in found.groups if g.name == "logprob_tail").sites
    assert (site.kind, site.training, site.inference) == ("keep", ("bfloat16",), ())
    assert site.producer.op == "aten._log_softmax.default"
    assert site.producer.text == "logits.log_softmax(-1)"
    assert site.effect == 1.0
    assert found.stats["check"]["equal_with_sites"] == 1.0


def test_trls_function_gets_fp32_logits_where_it_trains_under_autocast(tmp_path: Path) -> None:
    """accelerate converts what the model returns to FP32 there: the rounding that is seen with BF16 weights is none."""
    trainer = build_trainer(resolve_model("example:qwen3", tmp_path), dtype="float32")
    found = diff(captures("qwen3_tail")[0], record_forward(trainer, autocast="bfloat16", logprobs="trl"))
    assert set(counts(found)) == {"master_weight", "norm_weight", "rope", "swiglu"}
    assert clean(found)
    assert found.stats["check"]["equal_with_sites"] == 1.0


@pytest.mark.parametrize("name", ["gemma2_tail", "granite_tail"])
def test_what_the_engine_rounds_behind_its_logits_is_no_site(name: str) -> None:
    """A soft-cap (Gemma 2) and a scale (Granite) run eagerly, in BF16. A pass of Inductor moved their constant into the log_softmax."""
    found = report(name)
    assert captures(name)[0].graphs[-1].name == TAIL
    assert "logprob_tail" not in counts(found)
    assert clean(found)
    assert found.stats["check"]["equal_with_sites"] == 1.0


@pytest.mark.parametrize("name", ["gemma2_tail", "granite_tail"])
def test_trls_function_behind_a_soft_cap_or_a_scale_is_one(name: str) -> None:
    found = diff(captures(name)[0], record_forward(models.build(name), logprobs=selective_log_softmax))
    assert {k: n for k, n in counts(found).items() if k == "logprob_tail"} == {"logprob_tail": 1}
    assert clean(found)


def test_a_patch_leaves_the_tail_out_and_says_why() -> None:
    spec = make_spec(report("qwen3_tail"))
    assert "logprob_tail" not in {g.name for g in spec.groups}
    (skipped,) = spec.skipped
    assert skipped.site == "logprob_tail.1"
    assert "behind the last GEMM" in skipped.reason


def test_logsumexp_in_fp32_is_the_same_function_and_rounds_alike(model: nn.Module) -> None:
    found = compared(model, lambda logits, tokens: selective_log_softmax(logits.float(), tokens))
    assert counts(found) == LAYERS
    assert not found.semantic
    assert found.stats["check"]["equal_with_sites"] == 1.0


@pytest.mark.parametrize(
    ("change", "op"),
    [
        (lambda x: x / 0.7, "aten.div.Tensor"),
        (lambda x: 30 * torch.tanh(x / 30), "aten.div.Tensor"),
        (lambda x: x.clamp(min=-0.1), "aten.clamp.default"),
        (lambda x: -x, "aten._log_softmax.default"),
    ],
    ids=["temperature", "soft-cap", "clamp", "sign"],
)
def test_another_function_is_semantic(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], op: str) -> None:
    found = compared(model, lambda logits, tokens: fp32_log_softmax(change(logits), tokens))
    assert {e.what for e in found.semantic} == {op}
    assert "logprob_tail" not in counts(found)
    assert counts(found) == LAYERS  # nothing before it is touched


def test_functions_of_another_form_are_named(model: nn.Module) -> None:
    with pytest.raises(BadInputError, match=r"returns \(8, 1024\) for 8 tokens"):
        record_forward(model, logprobs=lambda logits, tokens: logits)
    with pytest.raises(BadInputError, match="failed: TypeError"):
        record_forward(model, logprobs=lambda logits: logits)  # type: ignore[arg-type, misc]
    with pytest.raises(BadInputError, match="returns NaN for token 0 of 8"):
        record_forward(model, logprobs=lambda logits, tokens: fp32_log_softmax(logits, tokens) * float("nan"))
