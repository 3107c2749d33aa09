"""The keys that attention reads: what the trainer's kernel is given, against what the engine's layer does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from graphalign.align.align import align, prepare
from graphalign.align.anchors import compare_anchors
from graphalign.align.masks import compare_masks
from graphalign.capture.flash_calls import read_call
from graphalign.capture.training import record_forward
from graphalign.capture.visible import visible
from graphalign.engines.flash import stand_in
from graphalign.ir.inference import Attention
from graphalign.ir.training import Node
from graphalign.rules import rules_dir
from graphalign.sites.find import diff
from graphalign.sites.why import explain
from tests.breadth import models
from tests.breadth.captured import captures, report

transformers = pytest.importorskip("transformers")
CAUSAL = {"tokens": 66, "below": None, "above": 0}


def seen(attention: str = "sdpa", bidirectional: bool = False, **config: Any) -> list[Any]:
    """What the attention calls of a tiny Mistral read."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 512, "sliding_window": 64}
    made = transformers.AutoConfig.for_model("mistral", **{**sizes, **config})
    flash = attention == "flash_attention_2"
    model = (
        transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa" if flash else attention).to(torch.bfloat16).eval()
    )
    if flash:
        stand_in(model)
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
    assert found == {"tokens": 4, "below": None, "above": 0}
    found = visible(4, 4, mask / 1e4, {"implementation": "eager", "is_causal": True})
    assert found == {"tokens": 4, "adds": [-1.0, 0.0], "below": None, "above": None}


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
        ({"adds": [-1.0, 0.0]}, {"causal": True}, "attention mask"),
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


def changed(name: str, **update: Any) -> Any:
    """The diff of recorded captures with a field of every attention call's arguments changed."""
    inference, training = captures(name)
    nodes = tuple(n.model_copy(update={"kwargs": {**n.kwargs, **update}}) if n.op == "graphalign.attention" else n for n in training.nodes)
    return diff(inference, training.model_copy(update={"nodes": nodes}))


def test_a_mask_that_cannot_be_read_is_not_compared() -> None:
    found = changed("llama_odd", visible={"unknown": "a query whose keys are not in a row"})
    assert not found.semantic
    (said,) = found.uncompared
    assert "of 4 attentions" in said
    assert "causality, window): a query whose keys are not in a row" in said
    node = next(n for n in found.nodes if n.side == "training" and n.target == "attention")
    assert "not compared: which keys it reads" in explain(found, node.name)


def test_a_window_beyond_the_probe_is_not_compared() -> None:
    inference, training = captures("llama_odd")
    wide = tuple(a.model_copy(update={"window": 512}) for a in inference.attention)
    nodes = tuple(
        n.model_copy(update={"kwargs": {**n.kwargs, "visible": CAUSAL, "sliding_window": 512}}) if n.op == "graphalign.attention" else n
        for n in training.nodes
    )
    found = diff(inference.model_copy(update={"attention": wide}), training.model_copy(update={"nodes": nodes}))
    assert not found.semantic
    assert "do not exceed the engine's window of 512" in found.uncompared[0]


def test_an_older_capture_is_compared_as_configured_and_says_so() -> None:
    found = report("llama_odd")
    assert not found.uncompared
    assert sum("records no masks" in n for n in found.notes) == 1


WRITTEN_OUT = {"falcon": {"below": None, "above": 0}, "bloom": {"adds": [0.0, 15.75], "below": None, "above": 0}}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_attention_that_is_written_out(name: str) -> None:
    training = record_forward(models.build(name))
    assert [m.visible for m in training.masks] == [{"tokens": 64, **WRITTEN_OUT[name]}] * 5
    engine = captures(name)[0]

    def differences(causal: bool) -> set[str]:
        layers = tuple(a.model_copy(update={"causal": causal, "alibi": name == "bloom"}) for a in engine.attention)
        pair = prepare(engine.model_copy(update={"attention": layers}), training, rules_dir(None))
        found = compare_anchors(pair, align(pair))
        assert not found.unknown
        return {d.parameter for d in found.differences}

    assert differences(causal=True) == set()
    assert differences(causal=False) == {"causality"}


class Plain(torch.nn.Module):
    """One attention, by `scaled_dot_product_attention` or written out, between an embedding and a head."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 48), torch.nn.Linear(16, 32)
        self.attend = attend

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in self.qkv(self.embed(input_ids)).chunk(3, -1))
        return self.head(self.attend(q, k, v, position_ids[0]).transpose(1, 2).flatten(2))


def by_hand(window: int | None = None, hidden: float = float("-inf"), noise: bool = False) -> Any:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        far = at[:, None] - at
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill((far < 0) | (far >= (window or 1 << 20)), hidden)
        return (scores + q.mean() if noise else scores).softmax(-1) @ v

    return attend


def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("attend", "reads"),
    [
        (kernel, {"below": None, "above": 0}),
        (by_hand(), {"below": None, "above": 0}),
        (by_hand(7), {"below": 6, "above": 0}),
        (by_hand(hidden=-1e4), {"below": None, "above": 0}),
        (by_hand(hidden=-3.0), {"adds": [-3.0, 0.0], "below": None, "above": None}),
    ],
)
def test_attention_outside_the_interface(attend: Any, reads: dict[str, Any]) -> None:
    (mask,) = record_forward(Plain(attend).to(torch.bfloat16)).masks
    assert mask.visible == {"tokens": 64, **reads}


def test_what_is_done_to_scores_is_named() -> None:
    """A soft-cap that is written out is no parameter: it is said that it was not compared."""
    engine, training = captures("falcon")
    softmax = next(n for n, node in enumerate(training.nodes) if node.op == "aten._safe_softmax.default")
    scores, made = training.nodes[softmax].args[0], 10**6
    shape = training.nodes[softmax].outputs[0]
    assert shape is not None
    capped = Node(op="aten.tanh.default", args=(scores,), outputs=(shape.model_copy(update={"id": made}),))
    reader = training.nodes[softmax].model_copy(update={"args": ({"v": made}, *training.nodes[softmax].args[1:])})
    nodes = (*training.nodes[:softmax], capped, reader, *training.nodes[softmax + 1 :])
    pair = prepare(engine, training.model_copy(update={"nodes": nodes}), rules_dir(None))
    assert list(compare_anchors(pair, align(pair)).unknown.values()) == [
        "what is done to its scores and weights besides masks and factors (tanh)"
    ]


def test_scores_of_which_a_part_is_not_known() -> None:
    (mask,) = record_forward(Plain(by_hand(noise=True))).masks
    assert "not made of products, masks and constants" in mask.visible["unknown"]


@pytest.mark.parametrize("window", [64, None])
def test_flex_attention(window: int | None) -> None:
    """It is recorded uncompiled, with gradients, whatever the head size; its mask is the `BlockMask`'s function."""
    found = {"tokens": 66 if window else 64, "below": 63 if window else None, "above": 0}
    assert seen("flex_attention", sliding_window=window, hidden_size=80, head_dim=40) == [found] * 2


def test_what_a_flash_attention_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' function runs; its caller's arguments are not what counts."""
    kernel = {"scale": 8**-0.5, "softcap": 0.0, "dropout": 0.0, "sinks": False}
    assert seen("flash_attention_2") == [{"tokens": 66, "below": 63, "above": 0, "kernel": kernel}] * 2
    assert seen("flash_attention_2", sliding_window=None) == [{"tokens": 64, "below": None, "above": 0, "kernel": kernel}] * 2
    both = {"tokens": 66, "below": 63, "above": 63, "kernel": kernel}
    assert seen("flash_attention_2", bidirectional=True) == [both] * 2
    from transformers.integrations import flash_attention as integration

    forward = integration._flash_attention_forward

    def other(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{**kwargs, "sliding_window": None, "softmax_scale": 0.5, "softcap": 30.0, "dropout": 0.1})

    monkeypatch.setattr(integration, "_flash_attention_forward", other)
    given = {"scale": 0.5, "softcap": 30.0, "dropout": 0.1, "sinks": False}
    assert seen("flash_attention_2") == [{"tokens": 66, "below": None, "above": 0, "kernel": given}] * 2


def test_what_a_flash_attention_kernel_is_given_is_compared() -> None:
    kernel = {"scale": 0.5, "softcap": 30.0, "dropout": 0.1, "sinks": True}
    found = changed("llama_odd", visible={**CAUSAL, "above": None, "kernel": kernel})
    assert {e.what for e in found.semantic} == {f"attention {x}" for x in ("scale", "soft-cap", "dropout", "sinks", "causality")}


def test_packed_sequences_are_not_compared() -> None:
    call = {"cu_seqlens_q": torch.tensor([0, 5, 8]), "cu_seqlens_k": torch.tensor([0, 5, 8]), "causal": True, "q": torch.zeros(8, 2, 4)}
    assert read_call(call, 8, 8)["unknown"].startswith("packed sequences, which end at [0, 5, 8]")


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_of_many_tokens_some_are_looked_at(attention: str) -> None:
    """The first, the last, those around every edge that the config names, and some in between."""
    (mask, same) = seen(attention, sliding_window=600, max_position_embeddings=1024)
    assert mask == same
    assert (mask["tokens"], mask["below"], mask["above"]) == (602, 599, 0)
    assert 100 < len(mask["at"]) < 200
    assert {0, 47, 598, 599, 600, 601} <= set(mask["at"])
    for window, what in ((600, set()), (599, {"window"}), (601, {"window"}), (100, {"window"}), (None, {"window"})):
        found = compare_masks(mask, Attention(layer="x", window=window, causal=True))
        assert {name for name, _ in found.differences} == what
        assert not found.unknown
    assert compare_masks(mask, Attention(layer="x", chunk=256)).differences
