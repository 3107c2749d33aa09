"""Numbers in module paths."""

from __future__ import annotations

import pytest

from graphalign.ir.paths import in_turn, layer_of, pattern_of, role_of, unit_of


@pytest.mark.parametrize(
    ("path", "layer", "pattern", "unit"),
    [
        ("model.layers.12.mlp.experts.3.up", 12, "model.layers.*.mlp.experts.3.up", "model.layers.12"),
        ("h.0", 0, "h.*", "h.0"),
        ("0.weight", 0, "*.weight", "0"),
        ("model.norm", None, "model.norm", "model.norm"),
        ("layer1.conv2", None, "layer1.conv2", "layer1.conv2"),
        ("", None, "", ""),
    ],
)
def test_the_first_segment_that_is_a_number_is_the_layer(path: str, layer: int | None, pattern: str, unit: str) -> None:
    assert (layer_of(path), pattern_of(path), unit_of(path)) == (layer, pattern, unit)


def test_a_role_has_no_numbers() -> None:
    assert role_of("gemm|model.layers.3.mlp.w1.weight|0") == "gemm|model.layers.*.mlp.w1.weight|*"


def test_turns_count_layers_and_nothing_else() -> None:
    assert (
        in_turn("attention|model.layers.9.q.weight|model.layers.9.k.weight|7", 4)
        == "attention|model.layers.1.q.weight|model.layers.1.k.weight|7"
    )
    assert in_turn("model.layers.6.mlp.experts.17.w", 4) == "model.layers.2.mlp.experts.17.w"
    assert in_turn("('opaque', 'vllm.core.default', 'model.layers.5')", 4) == "('opaque', 'vllm.core.default', 'model.layers.1')"
    assert in_turn("model.norm.weight", 4) == "model.norm.weight"
