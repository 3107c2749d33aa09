"""Where a model's name leads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphalign.engines.examples import example_names, resolve_model
from graphalign.errors import BadInputError


def test_the_examples_are_listed() -> None:
    assert {"qwen2", "qwen3", "llama", "smollm2"} <= set(example_names())


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_a_tiny_example_is_built_once(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = resolve_model(f"example:{name}", tmp_path)
    assert folder.name == name
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(f"example:{name}", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [p.name for p in folder.parent.iterdir()] == [name], "no temporary directory is left"
    weights = load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 6
    assert all(str(w.dtype) == "torch.bfloat16" for w in weights.values())
    assert weights["model.layers.0.input_layernorm.weight"].float().std() > 0.1
    biases = [w for n, w in weights.items() if n.endswith("_proj.bias")]
    assert bool(biases) == (name == "qwen2")
    assert all(b.float().std() > 0.1 for b in biases)


def test_the_same_example_has_the_same_weights_anywhere(tmp_path: Path) -> None:
    import torch

    before = torch.random.get_rng_state()
    first, second = (resolve_model("example:llama", tmp_path / n) / "model.safetensors" for n in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_directory_is_checked(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"holds no config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BadInputError, match="not a model's config"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInputError, match="names neither model_type nor architectures"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert resolve_model(tmp_path) == tmp_path.resolve()
    with pytest.raises(BadInputError, match="is a file, not a model's folder"):
        resolve_model(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["example:nobody", "/nowhere/at/all", "./nothing", "nothing"])
def test_a_wrong_name_says_what_there_is(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError) as failure:
        resolve_model(name, tmp_path)
    assert "qwen3" in failure.value.hint


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("example:qwen33", "example:qwen3"),
        ("qwen3", "example:qwen3"),
        ("examples:lama", "example:llama"),
        ("example/smollm", "example:smollm2"),
    ],
)
def test_a_misspelt_example_is_recognised(name: str, meant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def refuse(*args: object, **kwargs: object) -> str:
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(BadInputError) as failure:
        resolve_model(name, tmp_path)
    assert failure.value.hint.startswith(f"did you mean {meant}")


@pytest.mark.parametrize(
    ("error", "what", "hint"),
    [
        ("LocalEntryNotFoundError", "the hub cannot be reached", "hf download owner/model"),
        ("RepositoryNotFoundError", "the hub does not give a model of that name to you", "log in"),
        ("GatedRepoError", "the hub does not give a model of that name to you", "accept its terms"),
    ],
)
def test_what_the_hub_says_is_told_apart(error: str, what: str, hint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def refuse(*args: object, **kwargs: object) -> str:
        kind = getattr(huggingface_hub.errors, error)
        raise kind.__new__(kind, "Got: 1")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(BadInputError, match=what) as failure:
        resolve_model("owner/model", tmp_path)
    assert hint in failure.value.hint


def test_a_hub_that_cannot_be_reached_is_bad_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def refuse(*args: object, **kwargs: object) -> str:
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(BadInputError, match="could not be had from the hub") as failure:
        resolve_model("owner/model", tmp_path)
    assert failure.value.where == "offline"
