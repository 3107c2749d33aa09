"""What is no site has diagrams, too: conflicting, undetermined, unpatchable and semantic entries, with what is known on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import graphalign.cli.render  # noqa: F401  (registers the command)
from graphalign.cli.app import app
from graphalign.ir.drawing import Arrow, Panel
from graphalign.ir.files import write_json
from graphalign.render.page import render_page
from graphalign.render.sheets import sheets
from graphalign.render.textdiff import render_text
from graphalign.render.words import backend
from tests.breadth.captured import captures
from tests.render import needs
from tests.render.browser import Browser
from tests.render.reports import report, whole

KINDS = ("semantic", "unpatchable", "conflicting", "undetermined")
MODELS = ("gpt_neox", "starcoder2", "bloom", "falcon", "gpt_oss", "qwen3_moe", "gemma2", "smollm3")


def entries(name: str, kind: str) -> list[Panel]:
    d = (whole if kind == "conflicting" else report)(name).drawing
    assert d is not None
    return [p for p in d.panels if p.entry == kind]


def marked(panel: Panel) -> list[Arrow]:
    return [a for a in panel.arrows if a.verdict == panel.entry]


@pytest.mark.parametrize("name", MODELS)
def test_every_entry_about_an_edge_has_a_diagram(name: str) -> None:
    for kind in KINDS:
        r = whole(name) if kind == "conflicting" else report(name)
        drawn = {n for p in entries(name, kind) for n in p.names}
        for e in getattr(r, kind):
            if "→" in e.what or kind == "semantic":  # others are about an anchor's operand
                assert drawn & set(e.names), (kind, e.what)
        for p in entries(name, kind):
            assert p.reason
            assert {a.tail[0] for a in marked(p)} >= {"t"}, (kind, p.reason)


@pytest.mark.parametrize("name", ["qwen3", "llama", "h100"])
def test_a_clean_result_has_none(name: str) -> None:
    assert not [p for kind in KINDS for p in entries(name, kind)]


@pytest.mark.parametrize("name", ["gpt_neox", "bloom", "starcoder2"])
def test_a_conflict_shows_both_ways_of_reading(name: str) -> None:
    (panel,) = entries(name, "conflicting")
    assert {a.roundings for a in marked(panel) if a.tail[0] == "t"} == {("bfloat16",)}
    for p in (panel, *(s.panel for s in sheets(panel))):
        assert {a.roundings for a in marked(p) if a.tail[0] == "i"} == {(), ("bfloat16",)}


def test_what_cannot_be_patched_shows_the_rounded_and_the_unrounded_operand() -> None:
    (panel,) = entries("qwen3_moe", "unpatchable")
    kinds = {v.id: v.kind for v in panel.vertices}
    for side, roundings in (("t", ("bfloat16",)), ("i", ())):
        found = [a for a in marked(panel) if a.tail[0] == side]
        assert {(kinds[a.head], a.roundings) for a in found} == {("anchor", roundings)}
    assert "fused op reads this operand unrounded" in panel.reason
    assert panel.layers == (0, 1, 2, 3, 4)


def test_a_parameter_of_attention_shows_the_attention_of_both_sides() -> None:
    (panel,) = entries("gemma2", "semantic")
    assert "soft-cap is none, the engine's 50.0" in panel.reason
    kinds = {v.id: v.kind for v in panel.vertices}
    assert {(a.head[0], kinds[a.head]) for a in marked(panel)} == {("t", "attention"), ("i", "attention")}
    (sheet,) = sheets(panel)
    assert len(marked(sheet.panel)) == 6, "q, k and v of both sides on one sheet"


def test_another_function_shows_what_each_side_computes() -> None:
    (panel,) = entries("bloom", "semantic")
    ops = {side: " ".join(v.op for v in panel.vertices if v.id[0] == side) for side in "ti"}
    assert "tanh" in ops["t"]
    assert "erf" in ops["i"]


@needs.drawing
def test_the_command_draws_them_with_the_reason(tmp_path: Path) -> None:
    write_json(tmp_path / "sites.json", whole("gpt_neox"))

    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["render", str(tmp_path / "sites.json"), *arguments])
        assert result.exit_code == code, result.output
        return result.output

    run("-o", str(tmp_path / "x.svg"), "--group", "conflicting")
    text = (tmp_path / "x.svg").read_text()
    assert "copies on the inference side round differently" in text
    assert "rope.1" not in text
    assert "one of residual_layernorm, residual_stream, rope, conflicting" in run("--group", "semantic", code=2)
    write_json(tmp_path / "sites.json", report("qwen3_moe"))
    printed = run("--group", "unpatchable")
    assert [line for line in printed.splitlines() if line.startswith("@@")] == [
        "@@ unpatchable: a true difference that no pointwise patch removes @@"
    ]


@needs.drawing
def test_the_page_links_an_entry_to_its_diagram(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_page(whole("gpt_neox")))
    browser.problems.clear()
    browser.look()
    browser.open(path)
    links = "[...document.querySelectorAll('#others td a')]"
    assert browser.js(f"{links}.length") == len(whole("gpt_neox").unpatchable) + 1
    assert browser.js(f"{links}.every(a => document.querySelector(a.getAttribute('href')).tagName === 'FIGURE')")
    browser.js(f"{links}.at(-1).click()")
    assert "round differently" in browser.js("document.querySelector(location.hash + ' figcaption').textContent")
    figure = browser.js("location.hash")
    browser.move_to(f"{figure} .pill.odd")
    assert "conflicting: copies on the inference side" in browser.js(f"document.querySelector('{figure} .info').textContent")
    assert browser.problems == []


def test_the_summary_promises_no_more_than_a_patch_can_do() -> None:
    assert "engine rounds makes them agree" in render_page(report("qwen3"))
    for found in (report("gemma2"), whole("gpt_neox")):
        text = render_page(found)
        assert "engine rounds makes them agree" not in text
        assert "not the entries under What is no site" in text


def test_it_says_when_the_engine_ran_transformers_code() -> None:
    header = captures("smollm3")[0].header.model
    r = report("smollm3")
    r = r.model_copy(update={"model": {**r.model, "engine_class": header["engine_class"]}})
    assert "runs Transformers' code through its Transformers backend (TransformersForCausalLM)" in backend(r)
    assert backend(r) in render_text(r)
    own = report("qwen3_moe")
    assert backend(own.model_copy(update={"model": {**own.model, "engine_class": own.model["architecture"]}})) == ""
    other = own.model_copy(update={"model": {**own.model, "engine_class": "SomethingElse"}})
    assert backend(other) == "vLLM runs Qwen3MoeForCausalLM as SomethingElse."
