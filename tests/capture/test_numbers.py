"""NaN and Inf are named, on both sides, before anything is said of a model that computes no numbers."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from graphalign.capture import engine_numbers as numbers
from graphalign.capture.engine_script import Refused
from graphalign.capture.training import capture_training, record_forward
from graphalign.errors import BadInputError, CaptureFailedError

NAN, INF = math.nan, math.inf
DOWN = "model.layers.1.mlp.down_proj"


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


@pytest.mark.parametrize(
    ("values", "dtype", "words"),
    [
        ([1.0, -2.0, 3e38], torch.bfloat16, ""),
        ([1.0, NAN, INF, -INF], torch.bfloat16, "1 NaN, 2 Inf of 4 elements"),
        ([65504.0, INF], torch.float16, "1 Inf of 2 elements"),
        ([NAN], torch.float32, "1 NaN of 1 elements"),
        ([], torch.float32, ""),
        ([1, 2], torch.int64, ""),
        ([1.0, NAN], torch.float8_e4m3fn, ""),
    ],
)
def test_what_is_no_number_is_counted(values: list[float], dtype: torch.dtype, words: str) -> None:
    assert numbers.broken(torch.tensor(values).to(dtype)) == words


def test_a_broken_checkpoint_is_named_by_its_tensor_while_it_is_loaded() -> None:
    weights = [("a", torch.ones(2)), ("b.weight", torch.tensor([1.0, NAN])), ("c", torch.ones(2))]
    loaded = []
    with pytest.raises(Refused, match=r"checkpoint is broken: b\.weight holds 1 NaN of 2 elements") as refusal:
        loaded.extend(name for name, _ in numbers.checked(weights, Refused))
    assert refusal.value.usage
    assert [name for name, _ in numbers.checked(weights[:1], Refused)] == ["a"]


class FakeEngine:
    """Scores a prompt: one GEMM of two layers, and logits."""

    def __init__(self, weight: torch.Tensor, logits: torch.Tensor) -> None:
        self.weight, self.logits, self.prompts = weight, logits, []  # type: ignore[var-annotated]
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 100))
        self.model = nn.Module()

    def generate(self, prompts: Any, parameters: Any, use_tqdm: bool) -> None:
        self.prompts.append(prompts[0]["prompt_token_ids"])
        x = torch.ones(2, 4)
        for w in (torch.eye(4), self.weight):
            x = torch._ops.OpOverload.__call__(torch.ops.aten.mm.default, x, w)
        self.model.compute_logits(x)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(numbers, "_score", lambda llm, tokens: llm.generate([{"prompt_token_ids": tokens}], None, False))
    node = {"kind": "extern", "op": "aten.mm.default"}
    graphs = [{"kernels": [{"nodes": [{**node, "module": f"layers.{i}.proj"} for i in range(2)]}]}]

    def look(weight: torch.Tensor, logits: torch.Tensor, tokens: list[int] | None = None, limit: int = 512) -> Any:
        class Model(nn.Module):
            def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
                return logits

        engine = FakeEngine(weight, logits)
        engine.model = Model()
        found = numbers.look(engine, engine.model, graphs, tokens, limit)
        assert "compute_logits" not in vars(engine.model)
        return found, engine.prompts

    return look


def test_numbers_are_all_right_and_so_are_masked_tokens(fake: Any) -> None:
    found, prompts = fake(torch.eye(4), torch.tensor([[1.0, -INF], [0.0, 2.0]]))
    assert found is None
    assert [len(p) for p in prompts] == [numbers.TOKENS]
    assert max(prompts[0]) < 100
    assert fake(torch.eye(4), torch.ones(2, 2), [5, 6, 7], 3)[1] == [[5, 6]]


def test_the_first_op_that_writes_none_is_named(fake: Any) -> None:
    found, prompts = fake(torch.full((4, 4), 3e38), torch.tensor([[NAN, 1.0], [0.0, 2.0]]))
    assert found[0] == "the engine's logits are no numbers: NaN for 1 of 2 tokens of a prompt"
    assert found[1] == "first seen at layers.1.proj (aten.mm.default): it reads numbers (up to 3e+38) and writes 8 Inf of 8 elements"
    assert len(prompts) == 2


def test_what_comes_from_behind_the_layers_is_said_so(fake: Any) -> None:
    found, _ = fake(torch.eye(4), torch.tensor([[INF, 1.0], [-INF, -INF]]))
    assert found[0] == "the engine's logits are no numbers: Inf for 2 of 2 tokens of a prompt"
    assert "final norm, lm_head" in found[1]


def test_a_trainer_that_overflows_is_named_by_its_module() -> None:
    model = llama()
    with torch.no_grad():
        model.get_submodule(DOWN).weight.mul_(1e38)
        model.get_submodule("model.layers.1.mlp.up_proj").weight.mul_(1e6)
    with pytest.raises(CaptureFailedError, match=r"the trainer's logits are no numbers: \d+ NaN of 512 elements") as failure:
        record_forward(model)
    assert failure.value.where.startswith(f"first seen in {DOWN} (Linear): it reads numbers, and returns")
    assert failure.value.hint


def test_a_trainer_with_a_broken_weight_is_named_by_the_weight(tmp_path: Any) -> None:
    model = llama()
    with torch.no_grad():
        model.get_submodule(DOWN).weight[0, :3] = NAN
    with pytest.raises(BadInputError, match=f"{DOWN}.weight holds 3 NaN of 512 elements"):
        record_forward(model)
    with torch.no_grad():
        model.get_submodule(DOWN).weight.fill_(1.0)
        model.get_submodule("model.embed_tokens").weight[1] = INF  # a token that the recorded prompt does not have
    model.save_pretrained(tmp_path)
    record_forward(model)
    with pytest.raises(BadInputError, match=r"model.embed_tokens.weight holds 16 Inf of 1024 elements"):
        capture_training(tmp_path)


def test_a_trainer_with_masked_tokens_is_recorded() -> None:
    model = llama()

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.config = model, model.config

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            logits = self.inner(input_ids=input_ids, position_ids=position_ids).logits
            return torch.cat([logits[..., :-1], torch.full_like(logits[..., :1], -INF)], -1)

    assert record_forward(Masked(), logprobs=None).nodes


def test_a_log_probability_that_is_none_is_refused_while_the_engine_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(numbers.__file__).parent))  # as in the engine's process
    script = importlib.import_module("rollout_script")
    table = [{5: SimpleNamespace(logprob=-1.0)}, {6: SimpleNamespace(logprob=NAN)}]
    done = SimpleNamespace(token_ids=[5, 6], logprobs=table, finish_reason="stop")
    with pytest.raises(script.engine.Refused, match="log-probability of a token is nan") as refusal:
        script.sampled(SimpleNamespace(outputs=[done], prompt_token_ids=[1, 2, 3]))
    assert refusal.value.where == "token 1 of the response to a prompt of 3 tokens"
    scored = SimpleNamespace(prompt_logprobs=[None, {5: SimpleNamespace(logprob=-INF)}])
    with pytest.raises(script.engine.Refused, match="log-probability of a token is -inf"):
        script.scored(scored, 1, [5])
    for name in ("rollout_script", "engine_script", "engine_numbers"):
        sys.modules.pop(name, None)
