"""The last GEMM: its weight behind a cast kernel, in FP32 on one side, another parameter's, or made of the parameter.

The engine's captures are of a tiny Llama with random weights (vLLM 0.32.0 on CPU), once as it is and once with
`hf_overrides={"head_dtype": "float32"}`; the trainers are recorded here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graphalign.capture.training import record_forward
from graphalign.ir.files import read_json
from graphalign.ir.inference import InferenceGraph
from graphalign.patch.make import make_spec
from graphalign.sites.find import diff
from graphalign.sites.report import Report

Head = Callable[[nn.Linear, torch.Tensor], torch.Tensor]


@functools.cache
def engine(name: str) -> InferenceGraph:
    return read_json(Path(__file__).parent / "captures" / f"{name}.inf.json.gz", InferenceGraph, kind="inference capture")


def trainer() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def with_head(forward: Head) -> Any:
    model = trainer()
    model.lm_head.__class__ = type("Head", (nn.Linear,), {"forward": forward})
    return model


def found(name: str, model: Any) -> Report:
    return diff(engine(name), record_forward(model))


def tails(report: Report) -> list[tuple[str, str, str, int]]:
    return [(s.kind, s.producer.op, s.consumer.op, s.count) for g in report.groups if g.name == "logprob_tail" for s in g.sites]


def others(report: Report) -> dict[str, int]:
    return {g.name: sum(s.count for s in g.sites) for g in report.groups if g.name != "logprob_tail"}


def wide(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x.float(), self.weight.float())


@pytest.mark.parametrize(
    ("name", "head", "expected"),
    [("llama_3_layers", None, []), ("llama_3_layers", wide, ["round"]), ("llama_fp32_head", None, ["keep"]), ("llama_fp32_head", wide, [])],
    ids=["neither", "trainer", "engine", "both"],
)
def test_a_head_in_fp32(name: str, head: Head | None, expected: list[str]) -> None:
    report = found(name, trainer() if head is None else with_head(head))
    assert [kind for kind, *_ in tails(report)] == expected
    assert others(report) == others(found("llama_3_layers", trainer()))
    assert [*report.semantic, *report.leftovers, *report.undetermined, *report.unpatchable, *report.conflicting, *report.uncompared] == []
    assert report.stats["check"]["lowest_with_sites"] == 1.0


def test_logits_that_the_engine_does_not_round() -> None:
    report = found("llama_fp32_head", trainer())
    assert [s[1:] for s in tails(report)] == [("gemm", "aten._log_softmax.default", 1)]
    spec = make_spec(report)
    said = [s.reason for s in spec.skipped if "head in FP32" in s.reason]
    assert len(said) == 1  # nothing that a patch of the model does
    assert all(g.name != "logprob_tail" for g in spec.groups)


def test_a_tied_head() -> None:
    model = trainer()
    model.lm_head.weight = model.model.embed_tokens.weight
    report = found("llama_3_layers", model)
    assert [e.reason for e in report.semantic] == ["the trainer multiplies by model.embed_tokens.weight, the engine by lm_head.weight"]
    assert not report.uncompared


def test_a_layer_that_shares_another_layers_weight() -> None:
    model = trainer()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    report = found("llama_3_layers", model)
    words = "the trainer multiplies by model.layers.0.mlp.up_proj.weight, the engine by model.layers.1.mlp.up_proj.weight"
    assert words in [e.reason for e in report.semantic]


MADE = "the trainer multiplies by a matrix that it makes of lm_head.weight, the engine by lm_head.weight"


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w.flip(0),
        lambda w: w[torch.arange(1023, -1, -1)],
        lambda w: w.roll(1, 0),
        lambda w: -w,
        lambda w: w * 2,
        lambda w: w.half().bfloat16(),
    ],
    ids=["flip", "index", "roll", "neg", "twice", "float16"],
)
def test_a_matrix_made_of_the_weight(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    report = found("llama_3_layers", with_head(lambda self, x: F.linear(x, make(self.weight))))
    assert MADE in [e.reason for e in report.semantic]


@pytest.mark.parametrize(
    "same", [lambda w: w.t().contiguous().t(), lambda w: w.float().bfloat16(), lambda w: w * 1.0], ids=["layout", "cast", "one"]
)
def test_the_same_matrix_by_a_detour(same: Callable[[torch.Tensor], torch.Tensor]) -> None:
    report = found("llama_3_layers", with_head(lambda self, x: F.linear(x, same(self.weight))))
    assert [*report.semantic, *report.uncompared, *report.undetermined] == []
    assert others(report) == others(found("llama_3_layers", trainer()))


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (lambda self, x: F.linear(x, self.weight) * 0.5, "its operands are aligned and its value is not on the inference side"),
        (lambda self, x: F.linear(x * 0.5, self.weight), "its operands are aligned and its value is not on the inference side"),
        (
            lambda self, x: torch.tanh(F.linear(x, self.weight) / 30) * 30,
            "its operands are aligned and its value is not on the inference side",
        ),
        (lambda self, x: F.linear(x, self.weight, torch.ones(1024).bfloat16()), "the trainer's gemm adds a bias, the engine's adds none"),
    ],
    ids=["scaled logits", "scaled input", "soft-cap", "bias"],
)
def test_a_head_that_does_more(head: Head, words: str) -> None:
    assert any(words in e.reason for e in found("llama_3_layers", with_head(head)).semantic)
