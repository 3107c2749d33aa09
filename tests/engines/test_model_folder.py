"""What a user may name as MODEL: each is one line that says what it is, before anything is started."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from graphalign.capture.inference import capture_inference
from graphalign.capture.training import capture_training
from graphalign.engines.dtypes import refuse_other_dtype, words
from graphalign.engines.examples import resolve_model
from graphalign.engines.model_folder import own_dtype
from graphalign.errors import BadInputError

CONFIG = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
ADAPTER = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "owner/base"})
SIDES: dict[str, Callable[[Path], object]] = {
    "name": resolve_model,
    "engine": lambda path: capture_inference(path, path.parent / "out.json"),
    "trainer": capture_training,
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("files", "what", "hint"),
    [
        ({}, "holds no config.json: it is empty", "check the path"),
        ({"notes.txt": ""}, "holds no config.json", "save_pretrained"),
        ({"model.safetensors": ""}, r"holds weights \(model.safetensors\) but no config.json", "copy config.json"),
        ({"params.json": "{}", "consolidated.00.pth": ""}, r"but no config.json \(params.json is of another layout\)", "convert them"),
        ({"model.q4.gguf": ""}, "model.q4.gguf is a GGUF file", "gguf_file='model.q4.gguf'"),
        ({"step-1/config.json": CONFIG, "step-2/config.json": CONFIG}, "but its folders do: step-1, step-2", "give one of these"),
        ({"adapter_config.json": ADAPTER}, r"is an adapter \(LORA of owner/base\), not a model", "or give its base model, owner/base"),
        ({"adapter_config.json": ADAPTER}, "is an adapter", "merge_and_unload"),
        ({"adapter_config.json": "{"}, r"is an adapter \(PEFT\), not a model", "or give its base model: it"),
        (
            {"adapter_config.json": ADAPTER, "adapter_model.safetensors": "", "config.json": CONFIG, "training_args.bin": ""},
            "is an adapter",
            "merge_and_unload",
        ),
        ({"config.json": "{"}, "cannot read", "download the model again"),
        ({"config.json": "[]"}, "is not a model's config", "download the model again"),
    ],
)
def test_a_folder_that_is_no_model(side: str, files: dict[str, str], what: str, hint: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    with pytest.raises(BadInputError, match=what) as failure:
        SIDES[side](folder)
    assert "\n" not in failure.value.what
    assert hint in failure.value.hint


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("config.json", "is a file, not a model's folder", "give its folder"),
        ("model.safetensors", "is a weight file, not a model's folder", "the folder that holds it"),
        ("model.gguf", "is a GGUF file", "gguf_file='model.gguf'"),
        ("notes.txt", "is a file, not a model's folder", "the folder that holds it"),
    ],
)
def test_a_file_is_no_model(side: str, name: str, what: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(CONFIG)
    with pytest.raises(BadInputError, match=what) as failure:
        SIDES[side](tmp_path / name)
    assert hint in failure.value.hint


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n")


def _short(folder: Path) -> None:
    save_file({"a": torch.ones(64)}, folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])


def _shard_missing(folder: Path) -> None:
    save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("side", ["engine", "trainer"])
@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (_pointer, "is a pointer of Git LFS"),
        (_short, r"model.safetensors is cut short: \d+ of \d+ bytes"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x00"), "its header is cut short"),
        (_shard_missing, "1 of the 2 files that model.safetensors.index.json names are missing, the first is model-00002-of-00002"),
        (lambda folder: (folder / "consolidated.pth").write_bytes(b"x"), r"holds weights \(consolidated.pth\) that Transformers does not"),
    ],
)
def test_a_checkpoint_that_is_not_whole(side: str, spoil: Callable[[Path], object], what: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG)
    spoil(folder)
    with pytest.raises(BadInputError, match=what):
        SIDES[side](folder)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": "auto"}, ""),
        ({}, ""),
    ],
)
def test_the_dtype_that_a_model_is_made_for(config: dict[str, object], dtype: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    assert own_dtype(tmp_path) == dtype
    note = refuse_other_dtype(tmp_path, {})
    assert note == (
        f"the model's own dtype is {dtype}; the engine ran it in bfloat16, which is what graphalign maps" if dtype[:1] == "f" else ""
    )
    assert words(tmp_path, trainer="bfloat16").startswith(f"the model's own dtype is {dtype}; both sides run in bfloat16") == bool(note)


def test_weights_tell_the_dtype_where_the_config_does_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(64).half(), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    assert own_dtype(tmp_path) == "float16"


def test_what_is_said_of_the_trainers_dtype(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float16"}')
    assert "the engine runs in bfloat16, which is what graphalign maps, and the trainer in float32, as asked" in words(
        tmp_path, trainer="float32"
    )
    assert words(tmp_path).endswith("the engine runs in bfloat16, which is what graphalign maps")
    assert words(tmp_path, engine=False, trainer="bfloat16").endswith("the trainer is built in bfloat16, as --dtype says")
    assert words(tmp_path, engine=False, trainer="float16") == ""


@pytest.mark.parametrize(
    ("own", "asked", "what"),
    [
        ("float16", "float16", "the engine is asked to run in float16"),
        ("bfloat16", "half", "the engine is asked to run in float16"),
        ("bfloat16", "float", "the engine is asked to run in float32"),
        ("float16", "auto", "dtype=auto runs the engine in the model's own float16"),
        ("bfloat16", 16, "the engine is asked to run in 16"),
        ("bfloat16", "auto", ""),
        ("float16", "bfloat16", ""),
    ],
)
def test_an_engine_of_another_dtype_is_refused(own: str, asked: object, what: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": own}))
    if not what:
        refuse_other_dtype(tmp_path, {"dtype": asked})
        return
    with pytest.raises(BadInputError, match=what):
        capture_inference(tmp_path, tmp_path / "out.json", engine_args={"dtype": asked})


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with modeling code of its own: Transformers' Llama under other names."""
    folder = tmp_path / "own"
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    text = (Path(transformers.__file__).parent / "models" / "llama" / "modeling_llama.py").read_text()
    text = re.sub(r"from \.\.\.(\w[\w.]*) import", r"from transformers.\1 import", text).replace(
        "from ... import", "from transformers import"
    )
    text = text.replace("from .configuration_llama import LlamaConfig", "from .configuration_own import OwnConfig as LlamaConfig")
    (folder / "modeling_own.py").write_text(text.replace("LlamaForCausalLM", "OwnForCausalLM"))
    (folder / "configuration_own.py").write_text(
        'from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = "own_llama"\n'
    )
    raw = json.loads((folder / "config.json").read_text()) | {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(raw))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def test_code_that_comes_with_a_model_is_run_only_if_it_may_be(own_code: Path, tmp_path: Path) -> None:
    for side in ("engine", "trainer"):
        with pytest.raises(BadInputError, match="which is run only with --trust-remote-code") as failure:
            SIDES[side](own_code)
        assert "(configuration_own.py, modeling_own.py)" in failure.value.what
    graph = capture_training(own_code, trust_remote_code=True)
    assert graph.header.model["architecture"] == "OwnForCausalLM"
    assert any(s.file.endswith("modeling_own.py") and s.text == "q * cos" for s in graph.sources)
    assert graph.header.notes == ()


def test_where_transformers_has_the_model_its_code_is_left_out_and_that_is_said(own_code: Path) -> None:
    raw = json.loads((own_code / "config.json").read_text()) | {"model_type": "llama"}
    (own_code / "config.json").write_text(json.dumps(raw))
    graph = capture_training(own_code)
    assert graph.header.model["architecture"] == "LlamaForCausalLM"
    assert graph.header.notes[0].startswith("the model comes with code of its own (auto_map), which was not run")
