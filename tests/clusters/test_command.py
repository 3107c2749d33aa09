"""`graphalign clusters` and what `find` uses of it: files, refusals, notes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import graphalign.cli.clusters  # noqa: F401  (registers the command)
from graphalign.cli.app import app
from graphalign.clusters.report import Clusters
from graphalign.engines.text import read_sequences
from graphalign.ir.files import read_json, write_json
from graphalign.pipeline.clustering import Probe
from tests.clusters.test_measure import report, site
from tests.clusters.tiny import model


def run(*arguments: str | Path) -> SimpleNamespace:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=" ".join(result.stderr.split()))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with weights and no tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    model().save_pretrained(path)
    return path


@pytest.fixture
def bare(folder: Path, tmp_path: Path) -> Path:
    """The same without weights."""
    path = tmp_path / "bare"
    path.mkdir()
    (path / "config.json").write_text((folder / "config.json").read_text())
    return path


def test_it_writes_both_files_and_says_what_was_run(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    result = run("clusters", folder, "--out", out, "--tokens", "40", "--sequences", "4", "--layers", "2")
    assert result.code == 0, result.err
    assert "4 sequences of 40 tokens" in " ".join(result.out.split())
    assert "the model has no tokenizer" in " ".join(result.out.split())
    found = read_json(out / "clusters.json", Clusters, kind="clusters file")
    assert found.weights == "real"
    assert found.sequences == (40,) * 4
    assert {x.layers for x in found.locations} == {(), (0, 1)}
    assert all((x.interval is None) == (x.kind == "table") for x in found.locations)
    assert (out / "clusters.html").read_text().startswith("<!doctype html>")


def test_a_length_that_is_a_number_of_the_config_is_not_used(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"prompt": "x" * 1000}))
    lengths = {tokens: len(read_sequences(file, folder, tokens=tokens, most=1)[0][0]) for tokens in (16, 50, 64, 96)}
    assert lengths == {16: 15, 50: 50, 64: 63, 96: 95}


def test_prompts_are_joined_and_cut_without_a_rest(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("\n".join(json.dumps({"token_ids": list(range(i, i + 13))}) for i in range(0, 130, 13)))
    sequences, prompts = read_sequences(file, folder, tokens=50, most=9)
    assert [t for s in sequences for t in s] == list(range(100))
    assert prompts.source == "10 prompts of text.jsonl"


@pytest.mark.parametrize("options", [[], ["--weights", "real"]])
def test_random_weights_are_refused_unless_asked_for(bare: Path, tmp_path: Path, options: list[str]) -> None:
    result = run("clusters", bare, "--out", tmp_path / "out", *options)
    assert result.code == 2
    assert "bare has no weights: where their values fall says nothing about a trained model" in result.err
    assert "--weights dummy" in result.err
    result = run("clusters", "example:llama", "--out", tmp_path / "out", *options)
    assert result.code == 2
    assert "the weights of example:llama are random" in result.err


def test_random_weights_that_were_asked_for_are_called_random(bare: Path, tmp_path: Path) -> None:
    result = run("clusters", bare, "--out", tmp_path / "out", "--weights", "dummy", "--tokens", "20", "--sequences", "1")
    assert result.code == 0, result.err
    assert "the weights are random" in " ".join(result.out.split())
    assert read_json(tmp_path / "out" / "clusters.json", Clusters, kind="clusters file").weights == "dummy"


def test_a_regime_without_bf16_is_refused(folder: Path, tmp_path: Path) -> None:
    result = run("clusters", folder, "--out", tmp_path, "--dtype", "float32", "--tokens", "20", "--sequences", "1")
    assert result.code == 2
    assert "rounds nothing to BF16 in this regime" in result.err


def test_a_sites_file_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "sites.json", report([]))
    result = run("clusters", folder, "--out", tmp_path, "--sites", tmp_path / "sites.json", "--tokens", "20", "--sequences", "1")
    assert result.code == 2
    assert "the sites file is of another model" in result.err


def test_bad_arguments_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run("clusters", folder, "--out", tmp_path / "file" / "x").code == 2
    assert run("clusters", tmp_path / "nothing", "--out", tmp_path).code == 2
    assert run("clusters", folder, "--out", tmp_path, "--prompts", tmp_path / "none.jsonl").code == 2
    assert run("clusters", folder, "--out", tmp_path, "--tokens", "1").code == 2
    assert "graphalign clusters" in run("clusters", "--help").out.split("Examples", 1)[1]


def test_the_probe_ranks_sites_and_names_its_prompt(folder: Path) -> None:
    stages: list[str] = []
    probe = Probe(str(folder), None, "none", lambda stage, fraction: stages.append(stage))
    probe(model())
    assert probe.result is not None
    assert stages
    value = probe.result.locations[0]
    ranked = probe.rank(report([site(1, value.producer, (0, 1, 2))]))
    assert ranked.groups[0].sites[0].clustering == pytest.approx(value.corrected)
    assert ranked.notes[-1].startswith("clustering is measured on 63 tokens of 24 prompts of prompts.jsonl")


def test_the_probe_leaves_random_weights_alone_and_says_what_it_cannot_measure(folder: Path, bare: Path) -> None:
    for name, weights in ((folder, "dummy"), (bare, None), ("example:llama", None)):
        probe = Probe(str(name), weights, "none", lambda stage, fraction: None)
        probe(model())
        assert probe.result is None
        assert probe.rank(report([])) == report([])
    probe = Probe(str(folder), None, "none", lambda stage, fraction: None)
    import copy

    probe(copy.deepcopy(model()).float())
    assert probe.rank(report([])).notes == ("clustering was not measured: the model rounds nothing to BF16 in this regime",)
