"""`graphalign render`, and what happens without Graphviz."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import graphalign.cli.render  # noqa: F401  (registers the command)
from graphalign.cli.app import app
from graphalign.ir.files import write_json
from graphalign.render import wheel
from tests.fixtures.recorded import report
from tests.render import needs


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sites") / "sites.json"
    write_json(path, report("qwen3"))
    return path


def run(*arguments: str | Path, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["render", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


@pytest.fixture
def no_dot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(wheel, "program", lambda: None)


def test_text_by_default(sites: Path, tmp_path: Path) -> None:
    printed, _ = run(sites)
    assert printed.startswith("diff Qwen3ForCausalLM")
    run(sites, "-o", tmp_path / "diff.txt")
    assert (tmp_path / "diff.txt").read_text() == printed


@needs.drawing
def test_every_form(sites: Path, tmp_path: Path) -> None:
    for name, start in (("diff.svg", "<svg "), ("diff.dot", "digraph graphalign"), ("report.html", "<!doctype html>")):
        assert run(sites, "-o", tmp_path / name, "--group", "rope")[0].strip() == str(tmp_path / name)
        text = (tmp_path / name).read_text()
        assert text.startswith(start)
        assert "rope.4, .8" in text
    assert "swiglu.1" not in (tmp_path / "diff.svg").read_text()


@needs.drawing
def test_what_does_not_fit_on_a_page_is_several_files(sites: Path, tmp_path: Path) -> None:
    names = [tmp_path / "n.svg", tmp_path / "n-2.svg"]
    assert run(sites, "-o", names[0], "--group", "norm_weight")[0].split() == [str(n) for n in names]
    assert "input_layernorm and post_attention_layernorm" in names[0].read_text()
    assert "q_norm + self_attn and k_norm + self_attn" in names[1].read_text()
    assert not (tmp_path / "n-3.svg").exists()


def test_without_graphviz_there_is_a_dot_file_for_each(sites: Path, tmp_path: Path, no_dot: None) -> None:
    _, err = run(sites, "-o", tmp_path / "n.svg", "--group", "norm_weight", code=2)
    assert "1 more beside it" in " ".join(err.split())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["n-2.dot", "n.dot"]


def test_without_graphviz_the_dot_file_and_one_line(sites: Path, tmp_path: Path, no_dot: None) -> None:
    _, err = run(sites, "-o", tmp_path / "diff.svg", code=2)
    assert "apt-get install graphviz" in err
    assert not (tmp_path / "diff.svg").exists()
    assert (tmp_path / "diff.dot").read_text().startswith("digraph")
    assert str(tmp_path / "diff.dot") in err
    run(sites, "-o", tmp_path / "other.dot")


def test_without_graphviz_the_page_says_so_and_holds_the_text(sites: Path, tmp_path: Path, no_dot: None) -> None:
    run(sites, "-o", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "apt-get install graphviz" in text
    assert "rope.8" in text


def test_a_layer_is_drawn_as_its_kind(sites: Path, tmp_path: Path) -> None:
    run(sites, "-o", tmp_path / "a.dot", "--group", "residual_rmsnorm", "--layer", "0")
    assert "residual_rmsnorm.3" not in (tmp_path / "a.dot").read_text()
    run(sites, "-o", tmp_path / "b.dot", "--group", "residual_rmsnorm", "--layer", "4")
    assert "it stands for layers 1-5" in (tmp_path / "b.dot").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--group", "ropes"), "one of norm_weight, residual_rmsnorm"),
        (("-o", "x.png"), ".svg, .dot, .html, .txt"),
        (("-o", "x.svg", "--layer", "99"), "layers with a diagram"),
    ],
)
def test_messages(sites: Path, tmp_path: Path, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in run(sites, *arguments, code=2)[1]


def test_a_sites_file_without_drawing(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    write_json(path, report("qwen3").model_copy(update={"drawing": None}))
    assert "make it anew" in run(path, "-o", tmp_path / "x.svg", code=2)[1]
    run(path, "-o", tmp_path / "x.html")
    assert "holds no diagram data" in (tmp_path / "x.html").read_text()
