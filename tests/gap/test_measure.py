"""The trainer's side of the gap, on a tiny model: the engine is played by the patched trainer, so what must come out is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import graphalign
from graphalign.errors import BadInputError, GapInputError
from graphalign.gap.attribution import attribute, wanted_subsets
from graphalign.gap.measure import Tokens, measure_all, results, score_variant
from graphalign.gap.score import score
from graphalign.gap.store import LogProbs, Store
from graphalign.gap.variants import EVERYTHING, FP32, STOCK, Variant, main_variants, paper_groups, subset_name, subset_variant
from graphalign.logprobs import find_function, fp32_log_softmax, selective_log_softmax
from tests.rewrite.tiny import VOCAB, build, spec_for

pytestmark = pytest.mark.slow
LAYERS = 2
GROUPS = ("rope", "swiglu", "residual_stream")
"""Few, so that there are eight subsets to compile."""


@dataclass
class Response:
    seed: int
    prompt: int
    tokens: tuple[int, ...]
    sampled: tuple[float, ...]
    prefill: tuple[float, ...] = field(default=())


def responses(count: int = 8, length: int = 12) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (5 + i,), generator=generator).tolist() for i in range(count)]
    return prompts, [tuple(torch.randint(VOCAB, (length + i,), generator=generator).tolist()) for i in range(count)]


@pytest.fixture(scope="module")
def played() -> tuple[torch.nn.Module, Tokens]:
    """A stock model, and tokens whose "engine" log-probabilities are those of the model with the whole patch."""
    torch._dynamo.reset()
    model = build(LAYERS)
    prompts, tokens = responses()
    with graphalign.apply(model, spec_for(LAYERS, GROUPS)):
        engine = score(model, prompts, tokens)
    return model, Tokens(
        prompts, [Response(1 + i % 2, i, t, tuple(e), tuple(e)) for i, (t, e) in enumerate(zip(tokens, engine, strict=True))]
    )


def test_scores_are_those_of_a_plain_forward() -> None:
    model = build(LAYERS)
    prompts, tokens = responses(2)
    for prompt, response, found in zip(prompts, tokens, score(model, prompts, tokens), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0].float()
        want = [logits[len(prompt) - 1 + i].log_softmax(-1)[t].item() for i, t in enumerate(response)]
        assert found.tolist() == want


def test_the_whole_patch_closes_the_gap_exactly_and_shares_add_up(played: tuple[torch.nn.Module, Tokens], tmp_path: Path) -> None:
    model, tokens = played
    spec = spec_for(LAYERS, GROUPS)
    names = tuple(g.name for g in spec.groups)
    order = [*main_variants(spec, None), *(subset_variant(spec, s) for s in wanted_subsets(names))]
    order = list({v.name: v for v in order}.values())
    assert len(order) == 2 ** len(names) + 1  # every subset, and the one in FP32
    found: dict[str, LogProbs] = {}
    said: list[float] = []
    store = Store(tmp_path, "key")
    measure_all(order, found, store, tokens, lambda v, say: score_variant(model, v, tokens, progress=say), lambda _, f: said.append(f or 0))
    assert said == sorted(said)
    assert said[-1] == 1.0
    by_name = {r.name: r for r in results(order, found, tokens, subset_name(spec, paper_groups(spec)), resamples=200)}
    everything, stock = by_name[EVERYTHING].sampled, by_name[STOCK].sampled
    assert everything.pooled.k3.value == 0
    assert everything.pooled.equal_share.value == 1
    assert stock.pooled.k3.value > 0
    assert stock.against_stock is None
    assert everything.against_stock is not None
    assert everything.against_stock.k3.value == -stock.pooled.k3.value
    assert everything.against_stock.k3_relative is not None
    assert everything.against_stock.k3_relative.value == -1
    assert set(everything.by_seed) == {1, 2}
    assert by_name[FP32].sampled.pooled.equal_share.value < 1
    shares = attribute(spec, found, tokens, resamples=200)
    assert shares.exact
    assert shares.subsets == 2 ** len(names)
    assert sum(s.reduction.value for s in shares.sampled) == pytest.approx(stock.pooled.k3.value, rel=1e-9)
    assert sum(s.part for s in shares.sampled) == pytest.approx(1)
    # the model is stock again
    assert [a.tolist() for a in score_variant(model, Variant(STOCK, ""), tokens)] == [a.tolist() for a in found[STOCK]]


def test_an_interrupted_run_goes_on(played: tuple[torch.nn.Module, Tokens], tmp_path: Path) -> None:
    model, tokens = played
    order = [Variant(STOCK, ""), Variant(FP32, "", upcast=True)]
    measured: list[str] = []

    def measure(variant: Variant, say: object) -> LogProbs:
        measured.append(variant.name)
        if variant.name == FP32 and measured.count(FP32) == 1:
            raise KeyboardInterrupt
        return score_variant(model, variant, tokens)

    for attempt in range(2):
        found: dict[str, LogProbs] = {}
        store = Store(tmp_path, "key")
        if attempt == 0:
            with pytest.raises(KeyboardInterrupt):
                measure_all(order, found, store, tokens, measure, lambda *_: None)
        else:
            measure_all(order, found, store, tokens, measure, lambda *_: None)
    assert measured == [STOCK, FP32, FP32]
    assert store.reused == [STOCK]


def test_what_was_measured_otherwise_or_is_damaged_is_measured_again(tmp_path: Path) -> None:
    one, two = [np.array([-1.0, -2.0])], [np.array([-3.0, -4.0])]
    assert Store(tmp_path, "a").get("v", 1, [2], lambda: one) == one
    assert [x.tolist() for x in Store(tmp_path, "a").get("v", 1, [2], lambda: two)] == [[-1.0, -2.0]]
    for store, variant, lengths in ((Store(tmp_path, "b"), 1, [2]), (Store(tmp_path, "b"), 2, [2]), (Store(tmp_path, "b"), 2, [1, 1])):
        assert store.get("v", variant, lengths, lambda: two) is two
    next(tmp_path.glob("*.gz")).write_bytes(b"\x1f\x8b broken")
    assert Store(tmp_path, "b").get("v", 2, [2], lambda: one) is one


def test_a_token_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(GapInputError, match=f"token {VOCAB} of sequence 0 is outside the trainer's vocabulary of {VOCAB}"):
        score(Wide(), [[1, 2]], [[3, VOCAB]])


class Wide(torch.nn.Module):
    """Reads any token, predicts fewer: as with a padded embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(1, input_ids.shape[1], VOCAB))


def test_built_in_functions() -> None:
    logits, tokens = torch.randn(7, 50), torch.arange(7)
    assert find_function("fp32") is fp32_log_softmax
    torch.testing.assert_close(selective_log_softmax(logits, tokens), fp32_log_softmax(logits, tokens))
    rounded = selective_log_softmax(logits.bfloat16(), tokens)
    assert rounded.dtype == torch.bfloat16
    assert find_function("graphalign.logprobs:selective_log_softmax") is selective_log_softmax


@pytest.mark.parametrize("name", ["nope", "nowhere.at.all:f", "math:nope", "math:pi", "a:b:c", "torch:add", "torch.nn.functional:mish"])
def test_a_function_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(BadInputError, match=r"--logprobs|log-probability function|factory"):
        find_function(name)


def test_log_probabilities_of_other_tokens_are_refused(played: tuple[torch.nn.Module, Tokens]) -> None:
    _, tokens = played
    with pytest.raises(GapInputError):
        tokens.check([x[::-1].copy() - 4 for x in tokens.engine["sampled"]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trls_function_is_trls(dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("trl.trainer.utils").selective_log_softmax
    logits, tokens = torch.randn(9, 50).to(dtype), torch.arange(9)
    assert torch.equal(selective_log_softmax(logits, tokens), theirs(logits[None], tokens[None])[0])
