"""Names decide which GEMM is which, and a report says so where they do not fit."""

from __future__ import annotations

from graphalign.sites.find import diff
from tests.fixtures import recorded


def test_renamed_weights_are_named() -> None:
    inference, training = recorded.captures("qwen3")
    inputs = tuple(i.model_copy(update={"name": i.name.replace("self_attn.q_proj", "self_attn.wq")}) for i in training.inputs)
    found = diff(inference, training.model_copy(update={"inputs": inputs}))
    said = [n for n in found.notes if n.startswith("weights are matched by name")]
    assert said == [
        "weights are matched by name: the engine's checkpoint has no model.layers.0.self_attn.wq.weight (and 5 more), and the trainer no "
        "model.layers.0.self_attn.q_proj.weight (and 5 more); if the trainer renames them, let its parameters have the checkpoint's names"
    ]


def test_names_that_fit_need_no_words() -> None:
    assert not any("matched by name" in n for n in recorded.report("qwen3").notes)
