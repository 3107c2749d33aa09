"""Expected counts: every architecture whose recorded capture is clean has some, and the capture has as many sites."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphalign.rules import rules_dir
from graphalign.sites.expected import find_expected, load_expected, verdict
from graphalign.sites.report import Report
from tests.breadth import captured
from tests.drift import data
from tests.fixtures import recorded

BREADTH = sorted(p.name.removesuffix(".train.json.gz") for p in captured.CAPTURES.glob("*.train.json.gz"))
FIXTURES = ("qwen2", "qwen3", "llama", "smollm2")


def clean(found: Report) -> bool:
    return not any((found.leftovers, found.undetermined, found.conflicting, found.unpatchable, found.semantic))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BREADTH, *FIXTURES])
def test_a_clean_capture_is_expected(name: str) -> None:
    found = recorded.report(name) if name in FIXTURES else captured.report(name)
    if clean(found):
        assert verdict(found, rules_dir()).startswith("as many sites as expected for ")
    else:
        assert not verdict(found, rules_dir()).startswith("not the sites")


def test_most_recorded_architectures_are_expected() -> None:
    known = {e.architecture for e in load_expected(rules_dir())}
    assert len(known) >= 13


def test_counts_for_a_number_of_layers_come_before_those_for_any(tmp_path: Path) -> None:
    (tmp_path / "expected").mkdir()
    head = "- {architecture: Qwen3ForCausalLM, device: cpu, layer: {rope: 1}"
    (tmp_path / "expected" / "a.yaml").write_text(f"{head}}}\n{head}, layers: 6}}\n{head}, layers: 7}}\n")
    found = find_expected(load_expected(tmp_path), data.report("qwen3"))
    assert found is not None
    assert found.layers == 6


UNROTATED = {"exaone4": (3,), "exaone_moe": (3,), "smollm3": (3,), "gemma3": (), "gpt2": (0, 1, 2, 3, 4)}


@pytest.mark.parametrize("name", UNROTATED)
def test_layers_without_rotary_embedding_are_seen_in_the_capture(name: str) -> None:
    assert captured.report(name).unrotated == UNROTATED[name]


def test_whichever_layers_have_no_rotary_embedding_none_is_expected_there() -> None:
    """Exaone 4 with another pattern of windows: the layers without rotary embedding are others."""
    expected = find_expected(load_expected(rules_dir()), captured.report("exaone4"))
    assert expected is not None
    assert ["rope" in expected.of(n, 4, unrotated=(2,)) for n in range(4)] == [True, True, False, True]
