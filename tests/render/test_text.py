"""The text diff, and the lines of source that all outputs show."""

from __future__ import annotations

from typing import Any

import pytest

from graphalign.render.excerpt import Sources
from graphalign.render.textdiff import render_text
from graphalign.render.words import clean, kernel_name, shorten, wrap
from graphalign.sites.report import Entry
from tests.fixtures.recorded import report


@pytest.mark.parametrize("group", ["rope", "swiglu"])
def test_golden(group: str, snapshot: Any) -> None:
    assert render_text(report("qwen3"), group=group) == snapshot


def test_signs_can_be_filtered() -> None:
    lines = render_text(report("smollm2")).splitlines()
    sites = [s for g in report("smollm2").groups for s in g.sites]
    assert sum(line.startswith("-   ") for line in lines) == len(sites)
    assert sum(line.startswith("+    ") and not line.startswith("+     ") for line in lines) == len(sites)
    assert [line.split(":")[0] for line in lines if line.startswith("@@")][:5] == [f"@@ {g.name}" for g in report("smollm2").groups]


def test_only_one_layer() -> None:
    text = render_text(report("qwen3"), layer=0)
    assert "residual_rmsnorm.1 " in text
    assert "residual_rmsnorm.3 " not in text


def test_what_is_no_site_comes_with_its_reason() -> None:
    entry = Entry(side="both", what="a → b[0]", where="model.layers.*.mlp (f.py:3 x)", reason="copies disagree", layers=(1, 2), count=2)
    text = render_text(report("qwen3").model_copy(update={"conflicting": (entry,)}))
    assert (
        "@@ conflicting: copies on the inference side disagree @@\n! a → b[0] (layers 1-2) ×2: copies disagree\n!   model.layers.*.mlp"
        in text
    )


def test_source_lines_come_from_the_captured_version_only() -> None:
    site = next(s for g in report("qwen3").groups for s in g.sites if s.id == "rope.1")
    digests = report("qwen3").model["sources"]
    lines = Sources(digests).around(site.consumer)
    assert Sources(digests).installed(site.consumer), "Transformers 5.19.0 is installed for the tests"
    assert len(lines) == 5
    marked = [(line.number, line.text[slice(*line.marked)]) for line in lines if line.marked]
    assert marked == [(160, "q * cos")]
    other = Sources({**digests, site.consumer.file: "0" * 64})
    assert not other.installed(site.consumer)
    assert [(line.number, line.text) for line in other.around(site.consumer)] == [(160, "q * cos")]


def test_names_are_cut_not_lost() -> None:
    assert shorten("a  b\nc", 5) == "a b c"
    assert shorten("abcdef", 4) == "abc…"
    assert wrap("one two three four", 8) == ["one two", "three f…"]
    assert kernel_name("cpp_fused_a_b_c_d_e_f_g_h_i_j_k_l_m_n_7").endswith("_n_7")
    assert clean("a\u202eb\x00") == "a\ufffdb\ufffd"
