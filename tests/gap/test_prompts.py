"""Prompts: forms, tokenizers, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphalign.engines.prompts import read_prompts, vocabulary_size
from graphalign.errors import BadInputError, GapInputError
from graphalign.rules import rules_dir

BUILT_IN = rules_dir() / "prompts" / "prompts.jsonl"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300}))
    return folder


def write(folder: Path, *rows: object) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return file


def test_built_in_prompts_are_many_and_short() -> None:
    rows = [json.loads(line) for line in BUILT_IN.read_text().splitlines()]
    assert len(rows) >= 16
    assert len({json.dumps(r) for r in rows}) == len(rows)


def test_without_a_tokenizer_bytes_stand_in_and_it_is_said(model: Path) -> None:
    found = read_prompts(write(model, {"prompt": "aé"}, "", {"messages": [{"role": "user", "content": "b"}]}), model)
    assert found.ids == ((97, 195, 169), (98,))
    assert "no tokenizer" in found.note


def test_token_ids_are_taken_as_they_are(model: Path) -> None:
    found = read_prompts(write(model, {"token_ids": [1, 299]}), model, limit=1)
    assert found.ids == ((1, 299),)
    assert found.note == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 1 of the prompts is not JSON"),
        ("[" * 100_000, "not JSON"),
        ({"text": "a"}, "line 1 is not a prompt"),
        ([1, 2], "not a prompt"),
        ({"messages": []}, "not a prompt"),
        ({"messages": [{"role": "user"}]}, "not a prompt"),
        ({"token_ids": [1, True]}, "not a prompt"),
        ({"token_ids": [300]}, "token 300 of the prompt on line 1 is outside the model's vocabulary of 300"),
        ({"token_ids": [-1]}, "outside"),
        ({"token_ids": []}, "has no tokens"),
        ({"prompt": ""}, "has no tokens"),
    ],
)
def test_bad_prompts_are_named(model: Path, row: object, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        read_prompts(write(model, row), model)


def test_no_file_no_prompts_no_text(model: Path) -> None:
    with pytest.raises(BadInputError, match="cannot read the prompts"):
        read_prompts(model / "nope", model)
    with pytest.raises(BadInputError, match="holds no prompts"):
        read_prompts(write(model, ""), model)
    (model / "bad.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInputError, match="cannot read the prompts"):
        read_prompts(model / "bad.jsonl", model)


def test_a_tokenizer_of_another_model_is_named(model: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, "hello": 1, "far": 100_000}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert read_prompts(write(model, {"prompt": "hello"}), model).ids == ((1,),)
    with pytest.raises(GapInputError, match=r"token 100000 .* outside the model's vocabulary"):
        read_prompts(write(model, {"prompt": "hello far"}), model)
    assert vocabulary_size(model) == 300


def test_a_damaged_tokenizer_is_named(model: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(BadInputError, match="tokenizer cannot be loaded"):
        read_prompts(write(model, {"prompt": "hello"}), model)
