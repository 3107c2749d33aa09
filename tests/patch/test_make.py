"""From a report to a spec: choosing groups and layers, and the command that does it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import graphalign.cli.patch  # noqa: F401
from graphalign.cli.app import app
from graphalign.errors import BadInputError
from graphalign.ir.files import write_json
from graphalign.patch.make import make_spec
from graphalign.patch.spec import LeftOut, PatchSpec, Skipped, dump, load, parse, parse_layers
from tests.fixtures.recorded import EXAMPLES, report

GROUPS = ["norm_weight", "residual_rmsnorm", "residual_stream", "rope", "swiglu"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_spec_round_trips_and_covers_every_site(name: str) -> None:
    spec = make_spec(report(name))
    assert parse(dump(spec)) == spec
    assert [g.name for g in spec.groups] == GROUPS
    assert spec.edges == report(name).sites
    assert not spec.skipped


def test_equal_layers_are_one_edit() -> None:
    spec = make_spec(report("qwen3"))
    rope = next(g for g in spec.groups if g.name == "rope")
    assert len(rope.edits) == 8
    assert {e.layers for e in rope.edits} == {"0-5"}


def test_a_residual_sum_of_the_layer_before_is_keyed_by_both_layers() -> None:
    spec = make_spec(report("qwen3"), only=["residual_stream"])
    pairs = {pair for e in spec.groups[0].edits for pair in e.pairs()}
    assert (1, 0) in pairs  # layer 1 adds to what layer 0 left
    assert (0, 0) in pairs


def test_only_except_and_layers() -> None:
    assert [g.name for g in make_spec(report("qwen3"), only=["rope"]).groups] == ["rope"]
    assert "rope" not in [g.name for g in make_spec(report("qwen3"), without=["rope"]).groups]
    some = make_spec(report("qwen3"), layers="0-1")
    assert {c for g in some.groups for e in g.edits for c, _ in e.pairs()} == {0, 1}
    assert some.edges < report("qwen3").sites


def test_an_unknown_group_names_those_there_are() -> None:
    with pytest.raises(BadInputError) as e:
        make_spec(report("qwen3"), only=["ropes"])
    assert "there is no group 'ropes'" in str(e.value)
    assert "groups here: norm_weight, residual_rmsnorm, residual_stream, rope, swiglu" in str(e.value)


def test_a_semantic_divergence_is_not_patched() -> None:
    from graphalign.sites.report import Entry

    broken = report("qwen3").model_copy(update={"semantic": (Entry(side="both", what="mul", where="here", reason="differs"),)})
    with pytest.raises(BadInputError, match="compute different functions"):
        make_spec(broken)


@pytest.mark.parametrize(("text", "layers"), [("", ()), ("3", (3,)), ("0-2, 5", (0, 1, 2, 5)), ("7,9-10", (7, 9, 10))])
def test_layer_ranges(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["2-1", "5, 5", "a", "0-99999999", "-1", "1-"])
def test_bad_layer_ranges(text: str) -> None:
    with pytest.raises(ValueError, match="layer"):
        parse_layers(text)


def _run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_patch_command(tmp_path: Path) -> None:
    write_json(tmp_path / "sites.json", report("qwen3"))
    code, out, err = _run("patch", tmp_path / "sites.json", "-o", tmp_path / "patch.yaml", "--only", "rope,swiglu", "--layers", "0-2")
    assert code == 0, err
    assert "27 edges in 2 groups (rope, swiglu)" in out
    assert load(tmp_path / "patch.yaml") == make_spec(report("qwen3"), only=["rope", "swiglu"], layers="0-2")


def test_the_patch_command_refuses_bad_options(tmp_path: Path) -> None:
    write_json(tmp_path / "sites.json", report("qwen3"))
    code, _, err = _run("patch", tmp_path / "sites.json", "-o", tmp_path / "p.yaml", "--layers", "5-1")
    assert code == 2
    assert "--layers 5-1" in err
    code, _, err = _run("patch", tmp_path / "nothing.json", "-o", tmp_path / "p.yaml")
    assert code == 2
    assert not (tmp_path / "p.yaml").exists()


def test_the_schema_is_that_of_the_spec(tmp_path: Path) -> None:
    import json

    code, out, _ = _run("schema")
    assert code == 0
    assert json.loads(out) == PatchSpec.model_json_schema()


def test_a_spec_says_which_dtype_the_model_is_made_for() -> None:
    found = report("qwen3")
    assert "own dtype" not in dump(make_spec(found))
    made = make_spec(found.model_copy(update={"model": {**found.model, "own_dtype": "float16"}}))
    assert dump(made).startswith("# the model's own dtype is float16; this patch is for an engine that runs it in bfloat16\n")
    assert parse(dump(made)).model["own_dtype"] == "float16"


@pytest.mark.parametrize("what", [LeftOut(group="rope"), LeftOut(layers="0-2,5"), LeftOut()])
def test_what_is_left_out_by_choice_is_written_in_words_and_read_as_it_was(what: LeftOut) -> None:
    entry = Skipped.by_choice(what)
    assert entry.reason.startswith("left out by choice")
    assert Skipped.model_validate(entry.model_dump()).left_out == what
    assert Skipped(site="rope.3", reason="the source of mul is not known").left_out is None
