"""What the diff says on architectures it was not written for: exact groups and counts, and nothing else but the entries named here."""

from __future__ import annotations

from io import StringIO

import pytest
import yaml
from rich.console import Console

from graphalign.patch.make import make_spec
from graphalign.patch.spec import PatchSpec, dump
from graphalign.render.sites_table import render_table
from graphalign.sites.find import diff
from tests.breadth.captured import captures, counts, entries, report

COMPLETE = {
    "gemma2_eager": {"embedding_scale": 3, "geglu": 5, "post_norm": 10, "residual_rmsnorm": 20, "residual_stream": 9, "rope": 20},
    "gemma3": {"embedding_scale": 3, "geglu": 7, "post_norm": 14, "residual_rmsnorm": 28, "residual_stream": 13, "rope": 56},
    "olmo2": {"post_norm": 10, "residual_rmsnorm": 2, "residual_stream": 4, "rope": 10, "swiglu": 5},
    "phi3": {"norm_weight": 11, "residual_rmsnorm": 20, "residual_stream": 9, "rope": 20, "swiglu": 5},
    "phi3_full": {"norm_weight": 7, "residual_rmsnorm": 12, "residual_stream": 5, "rope": 12, "swiglu": 3},
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
    "apertus": {"norm_weight": 17, "residual_rmsnorm": 16, "residual_stream": 7, "rope": 32, "xielu": 32},
    "lfm2": {"norm_weight": 13, "residual_rmsnorm": 16, "residual_stream": 7, "rope": 16, "swiglu": 4},
    "ernie45_dense": {"norm_weight": 9, "residual_rmsnorm": 16, "residual_stream": 7, "rope": 16, "swiglu": 4},
    "exaone_moe": {"norm_weight": 17, "residual_rmsnorm": 16, "residual_stream": 10, "rope": 24, "router_logits": 3, "swiglu": 4},
    "falcon_h1": {
        "anchor_into_mul": 4,
        "embedding_scale": 3,
        "mul_into_mul": 8,
        "mul_into_silu": 4,
        "norm_weight": 9,
        "residual_rmsnorm": 13,
        "residual_scale": 12,
        "residual_stream": 9,
        "rope": 16,
        "swiglu": 8,
    },
    "zamba2": {
        "add_into_gelu": 2,
        "add_into_mul": 2,
        "anchor_into_mul": 4,
        "geglu": 2,
        "norm_weight": 9,
        "residual_rmsnorm": 8,
        "residual_stream": 1,
        "rope": 16,
    },
    "youtu": {"norm_weight": 17, "residual_rmsnorm": 13, "residual_stream": 5, "rope": 64, "swiglu": 4},
    "llama_odd": {"norm_weight": 9, "residual_rmsnorm": 16, "residual_stream": 7, "rope": 16, "swiglu": 4},
    "granite_moe_h100": {
        "embedding_scale": 2,
        "norm_weight": 9,
        "residual_rmsnorm": 16,
        "residual_scale": 8,
        "residual_stream": 4,
        "rope": 16,
    },
    "qwen3_moe_h100": {"norm_weight": 13, "residual_rmsnorm": 12, "residual_stream": 3, "rope": 24},
    "nemotron_h": {"anchor_into_mul": 2, "residual_rmsnorm": 8, "residual_stream": 3},
    "gpt2": {"embedding_sum": 2, "gelu": 30, "residual_layernorm": 8, "residual_stream": 6},
    "stablelm": {"residual_layernorm": 9, "residual_stream": 7, "rope": 20, "swiglu": 5},
    "nemotron": {"norm_weight": 11, "residual_layernorm": 9, "residual_stream": 7, "rope": 20},
    "olmo": {"residual_layernorm": 7, "residual_stream": 5, "rope": 8, "swiglu": 4},
    "falcon": {"residual_layernorm": 4, "residual_stream": 7, "rope": 20},
}
"""Every region aligned, every operand reproduced. `phi3_full`: its rotary
embedding leaves a half of width 0 unrotated; `llama_odd`: a vocabulary of 1003, heads of 40, one of keys and values, biases, tied;
`granite_moe_h100`: a simulated H100, whose op for the experts reads the router's logits; `qwen3_moe_h100`: it is the router too.
`falcon` calls no attention function that Transformers knows: a softmax between two products of activations is one."""
MEAN_APART = {
    "gpt_neox": ("gpt_neox.layers.*.input_layernorm", (2,)),
    "starcoder2": ("model.layers.*.post_attention_layernorm", (1,)),
    "stablelm": ("model.layers.*.post_attention_layernorm", (1,)),
    "nemotron": ("model.layers.*.post_attention_layernorm", (1,)),
    "gpt2": ("transformer.h.*.ln_2", (0,)),
    "olmo": ("model.layers.*.post_attention_layernorm", (1,)),
    "falcon": ("transformer.h.*.input_layernorm", (2,)),
    "jais2": ("model.layers.*.post_attention_layernorm", (1,)),
    "persimmon": ("model.layers.*.post_attention_layernorm", (1,)),
    "opt": ("model.decoder.layers.*.final_layer_norm", (0,)),
    "bloom": ("transformer.h.*.input_layernorm", (0,)),
}
"""The engine computes one LayerNorm's mean in the loop that makes its input, unrounded, and the rest from what was stored."""
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
    "granite_shared": (
        {
            "add_into_mul": 4,
            "embedding_scale": 3,
            "norm_weight": 9,
            "residual_rmsnorm": 13,
            "residual_scale": 8,
            "residual_stream": 5,
            "rope": 16,
            "swiglu": 4,
        },
        4,
    ),
    "granite_hybrid": (
        {
            "add_into_mul": 4,
            "anchor_into_mul": 2,
            "embedding_scale": 3,
            "norm_weight": 9,
            "residual_rmsnorm": 13,
            "residual_scale": 8,
            "residual_stream": 5,
            "swiglu": 4,
        },
        4,
    ),
}
"""The fused experts read unrounded routing weights: true, and nothing that a pointwise patch can remove. Groups and layers."""
OUTSIDE_TABLES = {
    "arcee": ({"norm_weight": 11, "residual_rmsnorm": 17, "residual_stream": 7, "rope": 40}, {}, 20),
    "smollm3": ({"norm_weight": 11, "residual_rmsnorm": 17, "residual_stream": 7, "rope": 32, "swiglu": 5}, {}, 16),
    "gpt_neox": ({"residual_layernorm": 6, "residual_stream": 7, "rope": 40}, {}, 20),
    "starcoder2": ({"residual_layernorm": 9, "residual_stream": 7, "rope": 40}, {}, 20),
    "gpt_oss": ({"residual_rmsnorm": 16, "residual_stream": 7, "rope": 64}, {"unpatchable": 4}, 32),
    "helium": ({"residual_rmsnorm": 13, "residual_stream": 5, "rope": 32, "swiglu": 4}, {}, 16),
    "hunyuan": ({"norm_weight": 17, "residual_rmsnorm": 13, "residual_stream": 5, "rope": 48, "swiglu": 4}, {}, 16),
    "seed_oss": ({"norm_weight": 9, "residual_rmsnorm": 13, "residual_stream": 5, "rope": 32, "swiglu": 4}, {}, 16),
    "jais2": ({"residual_layernorm": 7, "residual_stream": 5, "rope": 32}, {}, 16),
    "persimmon": ({"residual_layernorm": 7, "residual_stream": 5, "rope": 32}, {}, 16),
    "nanochat": ({"mul_into_pow": 1, "post_norm": 1, "residual_rmsnorm": 13, "residual_stream": 5, "rope": 48}, {"undetermined": 1}, 16),
}
"""The engine reads cos and sin unrounded, the trainer's rotary module rounds them before the layers: that many of the `rope` edges."""


def failures(name: str) -> dict[str, int]:
    return entries(report(name))


@pytest.mark.parametrize("name", COMPLETE)
def test_complete(name: str) -> None:
    found = report(name)
    assert counts(found) == COMPLETE[name]
    assert failures(name) == {}
    assert found.stats["check"]["equal_with_sites"] == 1.0
    assert found.stats["check"]["equal_stock"] < 1.0


@pytest.mark.parametrize("name", MEAN_APART)
def test_a_norm_whose_input_is_read_in_two_ways_is_taken_apart(name: str) -> None:
    """The whole op, one edge, was "conflicting"; its mean is a site, and the two differences from the mean agree."""
    found = report(name)
    assert found.conflicting == ()
    (step,) = [s for g in found.groups for s in g.sites if ":" in s.consumer.op and g.name != "norm_weight"]
    assert (step.consumer.op, step.kind, step.inference) == ("aten.native_layer_norm.default:mean", "keep", ())
    assert (step.consumer.module, step.layers) == MEAN_APART[name]


@pytest.mark.parametrize("name", OUTSIDE_TABLES)
def test_tables_rounded_outside_the_layers_are_sites_of_their_module(name: str) -> None:
    found = report(name)
    groups, entries, tables = OUTSIDE_TABLES[name]
    assert counts(found) == groups
    assert failures(name) == entries
    outside = [s for g in found.groups for s in g.sites if s.producer.module.endswith(("rotary_emb", "rotary_embed"))]
    assert sum(s.count for s in outside) == tables
    assert found.stats["check"]["assumed_tables"] == 0


@pytest.mark.parametrize("name", ROUTED)
def test_fused_experts(name: str) -> None:
    found = report(name)
    groups, layers = ROUTED[name]
    assert counts(found) == groups
    assert failures(name) == {"unpatchable": layers}
    assert "→ composite[1]" in found.unpatchable[0].what


def test_a_query_scaled_before_attention_is_not_another_scale() -> None:
    found = report("opt")
    assert failures("opt") == {"unpatchable": 5}
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
    assert not any("self_attention" in e.where for e in (*found.leftovers, *found.undetermined))  # the engine regroups the heads' rows
    assert set(counts(found)) == {"residual_layernorm", "residual_stream"}


def test_experts_scaled_behind_or_before_are_the_same_function() -> None:
    """GLM 4 MoE: the trainer multiplies the routing weights by 2.5, the engine the experts' result."""
    found = report("glm4_moe")
    assert counts(found) == {
        "gemm_input": 3,
        "norm_weight": 17,
        "residual_rmsnorm": 16,
        "residual_stream": 10,
        "rope": 32,
        "swiglu": 4,
    }
    assert failures("glm4_moe") == {"unpatchable": 3}
    assert "the trainer scales the routing weights, the engine the experts' result" in found.unpatchable[0].reason
    assert found.stats["check"]["equal_with_sites"] == 1.0


@pytest.mark.parametrize("name", ["qwen2_moe", "olmoe_unclipped"])
def test_routing_that_rounds_a_step_of_its_own_is_unpatchable(name: str) -> None:
    """The engine's softmax over the chosen experts goes through a log-sum-exp in BF16, which the trainer does not compute."""
    found, layers = report(name), captures(name)[1].header.model["layers"]
    assert failures(name) == {"unpatchable": 2 * layers}
    steps = "takes other steps here and rounds one of them to bfloat16, a value that the trainer does not compute"
    assert sum(e.count for e in found.unpatchable if steps in e.reason) == layers


def test_qwen2_moe_scales_its_shared_expert() -> None:
    found = report("qwen2_moe")
    assert counts(found)["residual_scale"] == 4


def test_a_clamp_that_the_engine_drops_is_named() -> None:
    """OLMoE: vLLM 0.32 does not read `clip_qkv`."""
    found = report("olmoe")
    assert {e.what for e in found.semantic} == {"aten.clamp_.default"}
    assert sum(e.count for e in found.semantic) == 12
    assert set(counts(found)) == {"norm_weight", "residual_rmsnorm", "residual_stream"}


def test_tables_that_only_the_engine_rounds_are_sites() -> None:
    """ERNIE 4.5: the trainer's cosines and sines stay FP32, the engine's table is BF16."""
    rope = [s for g in report("ernie45_dense").groups if g.name == "rope" for s in g.sites]
    assert {(s.kind, s.producer.op, s.training, s.inference) for s in rope} == {("round", "table", (), ("bfloat16",))}
    assert sorted(s.consumer.text for s in rope) == [
        "k.float() * cos",
        "q.float() * cos",
        "rotate_half(k).float() * sin",
        "rotate_half(q).float() * sin",
    ]
    assert all(s.layers == (0, 1, 2, 3) for s in rope)


def test_a_parameter_that_the_engine_does_not_read_is_named() -> None:
    """ERNIE 4.5 MoE: vLLM 0.32's router on CPU chooses experts without the correction bias."""
    found = report("ernie45_moe")
    assert [(e.what, e.count) for e in found.semantic] == [("aten.add.Tensor", 3)]
    assert "e_score_correction_bias, which the engine's graph does not read" in found.semantic[0].reason


def test_another_epsilon_in_one_norm_is_named_and_filled_up_values_are_not() -> None:
    """MiniCPM 3: the latents' norms have Transformers' default epsilon; the engine fills the values up to the keys' size."""
    found = report("minicpm3")
    assert {e.where.split()[0] for e in found.semantic} == {
        "model.layers.*.self_attn.q_a_layernorm",
        "model.layers.*.self_attn.kv_a_layernorm",
    }
    assert all("variance + self.variance_epsilon" in e.where for e in found.semantic)
    assert counts(found)["rope"] == 16
    assert not any("attention" in e.what or "o_proj" in e.where for e in (*found.leftovers, *found.undetermined))
    assert any("whether the engine scales it too is not in this capture" in e.reason for e in found.leftovers)


MLA = {"norm_weight": 17, "residual_rmsnorm": 16, "residual_stream": 10, "router_logits": 3, "swiglu": 4}


def test_latent_attention_is_one_anchor() -> None:
    """DeepSeek V3: the engine absorbs the projection of keys and values; the trainer's rotary is interleaved in another order."""
    found = report("deepseek_v3")
    assert counts(found) == {**MLA, "rope": 32}
    assert failures("deepseek_v3") == {"unpatchable": 3}
    assert "the trainer scales the routing weights, the engine the experts' result" in found.unpatchable[0].reason
    assert found.stats["check"]["equal_with_sites"] == 1.0


def test_rotary_embeddings_as_complex_numbers_are_the_same_function() -> None:
    """DeepSeek V2: the trainer rotates complex numbers, in FP32; the engine's table is BF16."""
    found = report("deepseek_v2")
    assert counts(found) == MLA
    assert failures("deepseek_v2") == {"unpatchable": 8}
    assert "complex numbers" in found.unpatchable[0].reason
    assert found.stats["check"]["equal_with_sites"] == 1.0


def test_the_scale_of_latent_attention_is_compared() -> None:
    inference, training = captures("deepseek_v3")
    wrong = tuple(a.model_copy(update={"scale": 0.5}) for a in inference.attention)
    found = diff(inference.model_copy(update={"attention": wrong}), training)
    assert {e.what for e in found.semantic} == {"attention scale"}
    assert "rope" in counts(found)


def test_what_the_engine_holds_wider_is_unpatchable() -> None:
    """AFMoE: gated attention, sandwich norms; router and its bias are FP32 in the engine only."""
    found = report("afmoe")
    assert counts(found) == {
        "add_into_mul": 3,
        "add_into_pow": 3,
        "embedding_scale": 3,
        "gate": 4,
        "post_norm": 8,
        "residual_rmsnorm": 16,
        "residual_stream": 7,
        "rope": 16,
        "swiglu": 4,
    }
    assert failures("afmoe") == {"unpatchable": 9}
    assert any("the engine holds this parameter in a wider format" in e.reason for e in found.unpatchable)


def test_a_soft_cap_on_the_transformers_backend_is_named_too() -> None:
    found = report("vaultgemma")
    assert failures("vaultgemma") == {"semantic": 4}
    assert found.semantic[0].what == "attention soft-cap"


def test_heads_in_another_order_on_both_sides_are_the_same_function() -> None:
    """Llama 4: the engine reorders the rows of query and key for another layout of its rotary embedding."""
    found = report("llama4")
    assert found.semantic == ()
    assert any("cannot be taken as one" in e.reason or "as one op" in e.reason for e in found.leftovers)
    assert not any(e.what == "attention" for e in found.leftovers)


def test_anchors_without_a_partner_are_said_first() -> None:
    """Llama 4: its experts are products of the trainer that the engine's one op hides."""
    found = report("llama4")
    assert "have no partner in the engine" in found.uncompared[0]
    assert "model.layers.*.feed_forward.experts" in found.uncompared[0]
    out = StringIO()
    render_table(found, Console(file=out, width=100))
    assert out.getvalue().lstrip().startswith("not compared: ")
    spec = make_spec(found)
    assert spec.partial == found.uncompared
    text = dump(spec)
    assert text.startswith("# PARTIAL: ")
    assert PatchSpec.model_validate(yaml.safe_load(text)) == spec


def test_a_weight_read_by_one_side_only_is_not_compared() -> None:
    """As an engine with another head: the GEMM and what is behind it have no partner."""
    inference, training = captures("qwen3_tail")
    other = tuple(
        i.model_copy(update={"name": "another.weight"}) if i.name == "model.layers.1.mlp.up_proj.weight" else i for i in training.inputs
    )
    found = diff(inference, training.model_copy(update={"inputs": other}))
    assert any("have no partner" in said for said in found.uncompared)


@pytest.mark.parametrize("name", COMPLETE)
def test_a_complete_result_is_of_the_whole_model(name: str) -> None:
    assert report(name).uncompared == ()
    assert "partial" not in dump(make_spec(report(name)))
