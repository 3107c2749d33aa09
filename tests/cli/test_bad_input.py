"""Bad input is refused before any long work, with a message that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphalign import console
from graphalign.errors import BadInputError
from graphalign.ir.files import write_json


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("max_model_len=128", 128),
        ("max-model-len=128", 128),
        ("--enforce_eager=false", False),
        ("dtype=bfloat16", "bfloat16"),
        ('compilation_config={"mode": 3}', {"mode": 3}),
        ("a=b=c", "b=c"),
        ("a=", ""),
        ("a=null", None),
        ("a=NaN", "NaN"),
        ("a=" + "[" * 100_000, "[" * 100_000),
    ],
)
def test_engine_arg_is_json_where_it_parses(text: str, value: object) -> None:
    assert list(console.parse_engine_args([text]).values()) == [value]


@pytest.mark.parametrize("pairs", [["max_model_len"], ["=3"], ["a b=3"], ["a=1", "a=2"], ["a-b=1", "a_b=2"]])
def test_engine_arg_of_another_form_is_refused(pairs: list[str]) -> None:
    with pytest.raises(BadInputError, match="--engine-arg"):
        console.parse_engine_args(pairs)


def test_options_reach_the_captures(stage, tmp_path: Path) -> None:
    options = ["--layers", "4", "--weights", "real", "--vllm-python", "/py", "--engine-arg", "max_model_len=64", "--timeout", "60"]
    regime = ["--factory", "pkg.mod:build", "--dtype", "float32", "--autocast", "bfloat16", "--attention", "eager"]
    assert stage.run("find", "m", "--out", tmp_path, *options, *regime).code == 0
    inference, training = stage.calls["inference"], stage.calls["training"]
    assert (inference["python"], inference["engine_args"], inference["timeout"]) == (Path("/py"), {"max_model_len": 64}, 60.0)
    assert (training["factory"], training["dtype"], training["autocast"], training["attention"]) == (
        "pkg.mod:build",
        "float32",
        "bfloat16",
        "eager",
    )
    assert inference["layers"] == training["layers"] == 4
    assert (inference["weights"], training["weights"]) == ("real", "checkpoint")
    assert stage.run("find", "m", "--out", tmp_path).code == 0
    assert stage.calls["training"]["autocast"] is None
    assert stage.calls["inference"]["weights"] is None
    assert not stage.calls["inference"]["trust_remote_code"]
    assert stage.run("find", "m", "--out", tmp_path, "--trust-remote-code").code == 0
    assert stage.calls["inference"]["trust_remote_code"]
    assert stage.calls["training"]["trust_remote_code"]


def test_a_model_of_another_dtype_is_said_before_the_engine_starts(stage, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("graphalign.engines.dtypes.own_dtype", lambda folder: "float16")
    said = "warning: the model's own dtype is float16; both sides run in bfloat16, which is what graphalign maps"
    result = stage.run("find", "m", "--out", tmp_path)
    assert (result.code, result.err.count("own dtype")) == (0, 1)
    assert said in result.err.partition("inference: a stage")[0]
    result = stage.run("find", "m", "--out", tmp_path, "--dtype", "float32", "--autocast", "bfloat16")
    assert "the engine runs in bfloat16, which is what graphalign maps, and the trainer in float32, as asked" in result.err
    result = stage.run("find", "m", "--out", tmp_path, "--factory", "pkg.mod:build")
    assert "the engine runs in bfloat16, which is what graphalign maps\n" in result.err
    result = stage.run("capture", "training", "m", "-o", tmp_path / "x")
    assert "the trainer is built in bfloat16, as --dtype says" in result.err


@pytest.mark.parametrize("command", [["find", "m", "--out"], ["capture", "inference", "m", "-o"], ["capture", "training", "m", "-o"]])
def test_an_unwritable_folder_is_refused_before_the_capture(stage, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "file").write_text("")
    result = stage.run(*command, tmp_path / "file" / "below" / "x")
    assert result.code == 2
    assert "error: cannot write to the folder" in result.err
    assert "give a folder you may write to" in result.err
    assert stage.calls == {}


def test_an_output_that_is_a_folder_is_refused(stage, tmp_path: Path) -> None:
    result = stage.run("capture", "training", "m", "-o", tmp_path)
    assert result.code == 2
    assert f"error: cannot write {tmp_path}: it is a folder" in result.err


@pytest.mark.parametrize("factory", ["pkg.module", "pkg:", ":f", "pkg/module.py:f", "pkg:f()"])
def test_a_factory_of_another_form_is_refused(stage, tmp_path: Path, factory: str) -> None:
    result = stage.run("capture", "training", "m", "-o", tmp_path / "x", "--factory", factory)
    assert result.code == 2
    assert f"--factory {factory!r} is not pkg.module:function" in result.err
    assert stage.calls == {}


def test_a_missing_extra_names_the_line_that_installs_it(stage, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(console.importlib.util, "find_spec", lambda name: None if name == "vllm" else object())
    result = stage.run("find", "m", "--out", tmp_path)
    assert result.code == 2
    assert "error: vLLM is not installed here, and capturing needs it" in result.err
    assert "pip install 'graphalign[cpu]'" in result.err
    assert stage.calls == {}
    assert stage.run("find", "m", "--out", tmp_path, "--vllm-python", "/other/python").code == 0


def test_an_extra_that_fails_to_import_late_is_named_too(stage, tmp_path: Path) -> None:
    stage.fail["training"] = ModuleNotFoundError("No module named 'gguf'", name="gguf")
    result = stage.run("capture", "training", "m", "-o", tmp_path / "x")
    assert result.code == 2
    assert "error: gguf is not installed here" in result.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"\x1f\x8b\x08", "is truncated"),
        (b"[1, 2]", "is not a valid"),
        (b"\xff\xfe", "is damaged"),
        (None, "cannot read"),
    ],
)
def test_an_unreadable_capture_is_refused(stage, tmp_path: Path, content: bytes | None, message: str) -> None:
    capture = tmp_path / "inf.json"
    if content is not None:
        capture.write_bytes(content)
    write_json(tmp_path / "train.json", stage.training)
    result = stage.run("diff", capture, tmp_path / "train.json", "-o", tmp_path / "sites.json")
    assert result.code == 2
    assert message in result.err
    assert str(capture) in result.err
    assert "diff" not in stage.calls


def test_captures_given_in_the_wrong_order_are_refused(stage, tmp_path: Path) -> None:
    write_json(tmp_path / "train.json", stage.training)
    result = stage.run("diff", tmp_path / "train.json", tmp_path / "train.json", "-o", tmp_path / "sites.json")
    assert result.code == 2
    assert "is not a valid inference capture" in result.err


def test_a_rules_folder_that_is_not_there_is_refused(stage, tmp_path: Path) -> None:
    result = stage.run("find", "m", "--out", tmp_path, "--rules", tmp_path / "none")
    assert result.code == 2
    assert f"error: no rules folder {tmp_path / 'none'}" in result.err
