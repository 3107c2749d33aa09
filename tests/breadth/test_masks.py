"""The keys that attention reads: what the trainer's kernel is given, against what the engine's layer does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from graphalign.capture.training import record_forward
from graphalign.capture.visible import visible
from graphalign.ir.inference import Attention
from graphalign.sites.find import diff
from tests.breadth.captured import captures

transformers = pytest.importorskip("transformers")
CAUSAL = {"tokens": 66, "below": None, "above": 0}


def seen(attention: str = "sdpa", bidirectional: bool = False, **config: Any) -> list[Any]:
    """What the attention calls of a tiny Mistral read."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = transformers.AutoConfig.for_model(
        "mistral", **sizes, num_key_value_heads=1, head_dim=8, max_position_embeddings=512, **{"sliding_window": 64, **config}
    )
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention).to(torch.bfloat16).eval()
    for layer in model.model.layers:
        layer.self_attn.is_causal = not bidirectional
    return [n.kwargs["visible"] for n in record_forward(model).nodes if n.op == "graphalign.attention"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_mask_that_is_built(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(attention) == [{"tokens": 66, "below": 63, "above": 0}] * 2
    from transformers.models.mistral import modeling_mistral as modeling

    make = modeling.create_sliding_window_causal_mask

    def wider(config: Any, *args: Any, **kwargs: Any) -> Any:
        config = copy.deepcopy(config)
        config.sliding_window += 1
        return make(config, *args, **kwargs)

    monkeypatch.setattr(modeling, "create_sliding_window_causal_mask", wider)
    assert seen(attention) == [{"tokens": 66, "below": 64, "above": 0}] * 2


def test_is_causal_counts_where_there_is_no_mask() -> None:
    assert seen(sliding_window=None) == [{"tokens": 64, "below": None, "above": 0}] * 2
    assert seen(sliding_window=None, bidirectional=True) == [{"tokens": 64, "below": None, "above": None}] * 2


def test_a_mask_that_only_adds() -> None:
    mask = torch.zeros(1, 1, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -1e4)
    found = visible(4, 4, mask, {"implementation": "eager", "is_causal": True})
    assert found == {"tokens": 4, "adds": [-1e4, 0.0], "below": None, "above": None}


@pytest.mark.parametrize(
    ("mine", "engine", "what"),
    [
        ({}, {}, None),
        ({"below": 64}, {"window": 64}, "attention window"),
        ({"below": 62}, {"window": 64}, "attention window"),
        ({"below": 63}, {"window": 64}, None),
        ({}, {"window": 64}, "attention window"),
        ({"below": 63}, {}, "attention window"),
        ({"above": None}, {}, "attention causality"),
        ({}, {"causal": False}, "attention causality"),
        ({}, {"chunk": 32}, "attention window"),
        ({"adds": [-1.0, 0.0]}, {}, "attention mask"),
    ],
)
def test_a_difference_is_semantic(mine: dict[str, Any], engine: dict[str, Any], what: str | None) -> None:
    inference, training = captures("llama_odd")

    def change(a: Attention) -> Attention:
        return a.model_copy(update=engine)

    nodes = tuple(
        n.model_copy(update={"kwargs": {**n.kwargs, "visible": CAUSAL | mine}}) if n.op == "graphalign.attention" else n
        for n in training.nodes
    )
    changed = inference.model_copy(update={"attention": tuple(change(a) for a in inference.attention)})
    found = diff(changed, training.model_copy(update={"nodes": nodes}))
    assert {e.what for e in found.semantic} == ({what} if what else set())


def test_dropped_weights_are_semantic() -> None:
    inference, training = captures("llama_odd")
    nodes = tuple(
        n.model_copy(update={"kwargs": {**n.kwargs, "dropout": 0.1}}) if n.op == "graphalign.attention" else n for n in training.nodes
    )
    found = diff(inference, training.model_copy(update={"nodes": nodes}))
    assert {e.what for e in found.semantic} == {"attention dropout"}
