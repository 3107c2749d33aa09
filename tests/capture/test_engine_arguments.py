"""A wrong engine argument is named, and told from an engine that fails by itself. A stand-in plays vLLM."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

import graphalign.capture.inference as inference
from graphalign.capture import engine_arguments as checks
from graphalign.errors import BadInputError


@dataclasses.dataclass
class CompilationConfig:
    mode: int = 3
    custom_ops: tuple[str, ...] = ()


@dataclasses.dataclass
class EngineArgs:
    model: str = ""
    dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 8
    compilation_config: CompilationConfig = dataclasses.field(default_factory=CompilationConfig)


class LLM:
    def __init__(self, model: str, *, enable_return_routed_experts: bool = False, **kwargs: Any) -> None: ...


class Config(BaseModel):
    """What vLLM validates with pydantic."""

    max_model_len: int | None = None
    max_num_seqs: int = 8


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in (("vllm", {"LLM": LLM}), ("vllm.engine", {}), ("vllm.engine.arg_utils", {"EngineArgs": EngineArgs})):
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        ({"max_modl_len": 128}, "this vLLM's engine has no argument 'max_modl_len'", "did you mean max_model_len"),
        ({"zzz": 1}, "this vLLM's engine has no argument 'zzz'", "vllm.LLM"),
        ({"compilation_config": {"modee": 3}}, "this vLLM's compilation_config has no entry 'modee'", "did you mean mode?"),
        ({"model": "other"}, "the model is the command's argument", "MODEL"),
        ({"load_format": "dummy"}, "load_format=dummy cannot be had", "--weights dummy"),
    ],
)
def test_a_name_that_vllm_does_not_have(arguments: dict[str, Any], what: str, hint: str) -> None:
    found = checks.wrong_name(arguments)
    assert found is not None
    assert what in found[0]
    name, value = next(iter(arguments.items()))
    assert found[1] == f"--engine-arg {name}={value}"
    assert hint in found[2]


def test_names_that_vllm_has() -> None:
    given = {"max_model_len": 1, "compilation_config": {"mode": 3}, "enable_return_routed_experts": True, "load_format": "auto"}
    assert checks.wrong_name(given) is None
    assert checks.wrong_name({"compilation_config": 3}) is None


def blame(arguments: dict[str, Any], make: Any = lambda given: Config(**given)) -> tuple[str, str, str] | None:
    try:
        make(arguments)
    except Exception as e:
        return checks.at_fault(e, arguments, make)
    return checks.at_fault(ValueError("later"), arguments, make)


def test_the_argument_that_does_not_fit_is_named_with_vllms_words() -> None:
    what, where, _ = blame({"max_num_seqs": 4, "max_model_len": "many"}) or ("", "", "")
    assert what.startswith("the engine's argument does not fit: max_model_len: Input should be a valid integer")
    assert where == "--engine-arg max_model_len=many"


def test_arguments_that_only_together_do_not_fit_are_all_named() -> None:
    def make(given: Any) -> None:
        if len(given) > 0 and sum(given.values()) > 1:
            raise ValueError("too many\nand a second line")

    what, where, _ = blame({"a": 2, "b": 2}, make) or ("", "", "")
    assert what == "the engine's arguments do not fit: ValueError: too many"
    assert where == "--engine-arg a=2, --engine-arg b=2"


def test_what_fails_without_them_or_not_at_all_is_not_blamed_on_arguments() -> None:
    def never(given: Any) -> None:
        raise ValueError("no such architecture")

    assert blame({"a": 1}, never) is None
    assert blame({"max_model_len": 5}) is None
    assert blame({}, never) is None


def test_a_usage_error_of_the_engines_process_is_bad_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""print('@graphalign {"error": "no argument x", "where": "--engine-arg x=1", "hint": "y", "usage": true}')""")
    monkeypatch.setattr(inference, "SCRIPT", script)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInputError, match="no argument x") as failure:
        inference.capture_inference(tmp_path, tmp_path / "out.json")
    assert (failure.value.exit_code, failure.value.where, failure.value.hint) == (2, "--engine-arg x=1", "y")
    assert not (tmp_path / inference.ENGINE_LOG).exists()
