"""What the diff says on architectures it was not written for: exact groups and counts, and nothing else but the entries named here."""

from __future__ import annotations

import pytest

from tests.breadth.captured import counts, report

COMPLETE = {
    "gemma2_eager": {"embedding_scale": 3, "geglu": 5, "post_norm": 10, "residual_rmsnorm": 20, "residual_stream": 9, "rope": 20},
    "gemma3": {"embedding_scale": 3, "geglu": 7, "post_norm": 14, "residual_rmsnorm": 28, "residual_stream": 13, "rope": 56},
    "olmo2": {"post_norm": 10, "residual_rmsnorm": 2, "residual_stream": 4, "rope": 10, "swiglu": 5},
    "phi3": {"norm_weight": 11, "residual_rmsnorm": 20, "residual_stream": 9, "rope": 20, "swiglu": 5},
    "granite": {
        "embedding_scale": 3,
        "norm_weight": 11,
        "residual_rmsnorm": 17,
        "residual_scale": 10,
        "residual_stream": 7,
        "rope": 20,
        "swiglu": 5,
    },
    "cohere": {"residual_layernorm": 10, "residual_stream": 7, "swiglu": 5},
    "gemma": {"embedding_scale": 3, "geglu": 5, "residual_rmsnorm": 20, "residual_stream": 9, "rope": 20},
    "mixtral": {"norm_weight": 11, "residual_rmsnorm": 20, "residual_stream": 9, "rope": 20},
    "glm4": {"norm_weight": 21, "post_norm": 10, "residual_rmsnorm": 20, "residual_stream": 9, "rope": 20, "swiglu": 5},
    "exaone4": {"norm_weight": 21, "post_norm": 10, "residual_rmsnorm": 2, "rope": 32, "swiglu": 5},
}
"""Every region aligned, every operand reproduced."""
CONFLICTING = {
    "gpt2": {"embedding_sum": 2, "gelu": 30, "residual_layernorm": 7, "residual_stream": 6},
    "stablelm": {"residual_layernorm": 8, "residual_stream": 7, "rope": 20, "swiglu": 5},
    "nemotron": {"norm_weight": 11, "residual_layernorm": 8, "residual_stream": 7, "rope": 20},
}
"""One layer's LayerNorm reads its input unrounded for the statistics and rounded for the rest, on the engine's side."""
ROUTED = {
    "qwen3_moe": ({"norm_weight": 21, "residual_rmsnorm": 20, "residual_stream": 9, "rope": 40}, 5),
    "qwen3_next": (
        {
            "gate": 1,
            "gated_norm": 3,
            "norm_weight": 3,
            "residual_rmsnorm": 16,
            "residual_scale": 4,
            "residual_stream": 11,
            "rope": 8,
            "swiglu": 4,
        },
        4,
    ),
}
"""The fused experts read unrounded routing weights: true, and nothing that a pointwise patch can remove. Groups and layers."""
OUTSIDE_TABLES = {
    "arcee": ({"norm_weight": 11, "residual_rmsnorm": 17, "residual_stream": 7, "rope": 20}, {"unpatchable": 20}),
    "smollm3": ({"norm_weight": 11, "residual_rmsnorm": 17, "residual_stream": 7, "rope": 16, "swiglu": 5}, {"unpatchable": 16}),
    "gpt_neox": ({"residual_layernorm": 5, "residual_stream": 7, "rope": 20}, {"conflicting": 1, "unpatchable": 20}),
    "starcoder2": ({"residual_layernorm": 8, "residual_stream": 7, "rope": 20}, {"conflicting": 1, "unpatchable": 20}),
    "gpt_oss": ({"residual_rmsnorm": 16, "residual_stream": 7, "rope": 32}, {"unpatchable": 36}),
}
"""The engine reads cos and sin unrounded, the trainer's rotary module rounds them before the layers: no patch of a layer removes that."""
LISTS = ("leftovers", "undetermined", "conflicting", "unpatchable", "semantic")


def failures(name: str) -> dict[str, int]:
    """Lists that are not empty, with their number of nodes or edges."""
    found = report(name)
    return {k: sum(e.count for e in entries) for k in LISTS if (entries := getattr(found, k))}


@pytest.mark.parametrize("name", COMPLETE)
def test_complete(name: str) -> None:
    found = report(name)
    assert counts(found) == COMPLETE[name]
    assert failures(name) == {}
    assert found.stats["check"]["equal_with_sites"] == 1.0
    assert found.stats["check"]["equal_stock"] < 1.0


@pytest.mark.parametrize("name", CONFLICTING)
def test_conflicting_layer_norm(name: str) -> None:
    found = report(name)
    assert counts(found) == CONFLICTING[name]
    assert failures(name) == {"conflicting": 1}
    assert "native_layer_norm" in found.conflicting[0].what
    assert "unrounded / bfloat16" in found.conflicting[0].reason


@pytest.mark.parametrize("name", OUTSIDE_TABLES)
def test_tables_rounded_outside_the_layers_are_no_sites(name: str) -> None:
    found = report(name)
    groups, entries = OUTSIDE_TABLES[name]
    assert counts(found) == groups
    assert failures(name) == entries
    assert "rounds this table before the layer" in found.unpatchable[0].reason
    assert found.stats["check"]["assumed_tables"] == sum(e.count for e in found.unpatchable if e.what.startswith("table"))


@pytest.mark.parametrize("name", ROUTED)
def test_fused_experts(name: str) -> None:
    found = report(name)
    groups, layers = ROUTED[name]
    assert counts(found) == groups
    assert failures(name) == {"unpatchable": layers}
    assert "→ composite[1]" in found.unpatchable[0].what


def test_a_query_scaled_before_attention_is_not_another_scale() -> None:
    found = report("opt")
    assert failures("opt") == {"conflicting": 1, "unpatchable": 5}
    assert "scales the query before its attention" in found.unpatchable[0].reason


def test_a_soft_cap_that_the_trainer_drops_is_named() -> None:
    found = report("gemma2")
    assert failures("gemma2") == {"semantic": 5}
    assert found.semantic[0].what == "attention soft-cap"
    assert (
        found.semantic[0].reason
        == "the trainer's attention soft-cap is none, the engine's 50.0, which the trainer's sdpa attention ignores"
    )


def test_a_window_that_counts_otherwise_is_named() -> None:
    """Cohere 2: vLLM 0.32 passes its attention one token more than the configured window, Transformers 5.19 does not."""
    found = report("cohere2")
    assert failures("cohere2") == {"semantic": 4}
    assert found.semantic[0].reason == "the trainer's attention window is 64, the engine's 65"


def test_another_gelu_is_semantic() -> None:
    """Bloom: vLLM computes GELU with erf, Transformers with tanh."""
    found = report("bloom")
    assert [e.what for e in found.semantic] == ["aten.mul.Tensor"]
    assert "gelu_impl" in found.semantic[0].where
    assert set(counts(found)) == {"residual_layernorm", "residual_stream"}


def test_attention_computed_op_by_op_is_not_semantic() -> None:
    found = report("falcon")
    assert found.semantic == ()
    assert any("op by op" in e.reason for e in found.leftovers)
