"""Equal work is done once, and gives what doing it again and again gives."""

from __future__ import annotations

from typing import Any

import pytest

from graphalign.align.pair import SHALLOW, prepare
from graphalign.rules import rules_dir
from graphalign.sites.find import diff_pair
from tests.breadth.captured import CAPTURES
from tests.breadth.captured import captures as other_captures
from tests.fixtures.recorded import captures

NAMES = ("qwen3", "qwen2", "llama", "smollm2")
OTHERS = sorted(p.name.removesuffix(".train.json.gz") for p in CAPTURES.glob("*.train.json.gz"))


def result(both: Any, *, share: bool, shallow: int = SHALLOW) -> dict[str, Any]:
    """A report without timings and without the number of arrays that were joined, which sharing is there to reduce."""
    found = diff_pair(prepare(*both, rules_dir(None), share=share, shallow=shallow), rules_dir(None)).model_dump()
    del found["stats"]["seconds"], found["stats"]["arrays_joined"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_sharing_changes_nothing(name: str) -> None:
    assert result(captures(name), share=True) == result(captures(name), share=False)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_nor_does_it_where_layers_take_turns(name: str) -> None:
    assert result(captures(name), share=True, shallow=0) == result(captures(name), share=False, shallow=0)


@pytest.mark.slow
@pytest.mark.parametrize("shallow", [SHALLOW, 0])
@pytest.mark.parametrize("name", OTHERS)
def test_sharing_changes_nothing_for_other_architectures(name: str, shallow: int) -> None:
    assert result(other_captures(name), share=True, shallow=shallow) == result(other_captures(name), share=False, shallow=shallow)


def judged(found: dict[str, Any]) -> Any:
    """What a result says about rounding, without how large each effect is."""
    sites = [{k: v for k, v in s.items() if k != "effect"} for g in found["groups"] for s in g["sites"]]
    return [found[k] for k in ("semantic", "unpatchable", "conflicting", "undetermined", "leftovers", "interior")], sites


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
def test_layers_in_turns_give_the_same_sites_as_layers_with_values_of_their_own(name: str) -> None:
    assert judged(result(captures(name), share=True, shallow=0)) == judged(result(captures(name), share=True))


@pytest.mark.slow
def test_thirty_layers_in_turns_give_the_same_sites_as_with_values_of_their_own() -> None:
    assert judged(result(captures("smollm2"), share=True)) == judged(result(captures("smollm2"), share=True, shallow=30))
