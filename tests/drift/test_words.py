"""What drift prints, as goldens."""

from __future__ import annotations

from typing import Any

import pytest

from graphalign.drift import words
from graphalign.drift.compare import drift
from tests.drift.data import sites, structure


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_emulated_casts(form: str, snapshot: Any) -> None:
    assert getattr(words, form)(drift(sites("qwen3"), sites("qwen3.casts"))) == snapshot


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_a_version_bump_in_which_nothing_moved(form: str, snapshot: Any) -> None:
    assert getattr(words, form)(drift(structure("qwen3.v0.31.0"), structure("qwen3"))) == snapshot


def test_the_custom_rotary_kernel(snapshot: Any) -> None:
    assert words.text(drift(structure("qwen3"), structure("qwen3.rotary"), {"_C.rotary_embedding.default": "rounds once"})) == snapshot


def test_names_from_captures_are_no_markup() -> None:
    d = drift(structure("qwen3"), structure("qwen3"))
    hostile = d.model_copy(update={"reasons": ("<img src=x> @everyone [a](http://b) `<code>` *x*",)})
    line = next(x for x in words.markdown(hostile).splitlines() if x.startswith("- "))
    assert line == "- &lt;img src=x&gt; &#64;everyone \\[a\\](http://b) `<code>` \\*x\\*"
