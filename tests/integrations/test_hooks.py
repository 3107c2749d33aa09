"""The hooks on stubs: packages of the stacks' names with nothing in them but the classes and signatures that the hooks follow.

The stacks' own code runs in `test_stacks.py`; for open-instruct, which is in no package index, this stub is all.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import graphalign
from graphalign.errors import PatchError
from graphalign.integrations import hooks
from graphalign.patch.spec import save
from tests.rewrite.tiny import build, by_hand, spec_for, tokens

STUBS = {
    # verl 0.9.1 workers/engine/fsdp/transformer_impl.py L106, L254
    "verl": ("verl.workers.engine.fsdp.transformer_impl", """
class FSDPEngine:
    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        self.model_config, self.engine_config = model_config, engine_config
    def _build_module(self):
        return build()
"""),
    # openrlhf 0.11.2 models/actor.py L53, L76
    "openrlhf": ("openrlhf.models.actor", """
class Actor(nn.Module):
    def __init__(self, pretrain_or_model, attn_implementation="flash_attention_2", param_dtype="bf16", **kwargs):
        super().__init__()
        self.model = build()
"""),
    # skyrl 0.3.0 backends/skyrl_train/workers/model_wrapper.py L59
    "skyrl": ("skyrl.backends.skyrl_train.workers.model_wrapper", """
class HFModelWrapper(nn.Module):
    def __init__(self, pretrain_or_model, use_flash_attention_2=False, bf16=True, **kwargs):
        super().__init__()
        self.model = build()
"""),
}  # fmt: skip
HEAD = "from torch import nn\nfrom tests.rewrite.tiny import build as tiny\nbuild = lambda: tiny(2)\n"


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes a stub, makes the hook new, and names a patch."""
    save(spec_for(2), tmp_path / "patch.yaml")
    monkeypatch.setenv(hooks.ENV, str(tmp_path / "patch.yaml"))
    monkeypatch.setenv(hooks.STALE, "1")
    monkeypatch.syspath_prepend(tmp_path)
    before, finders = set(sys.modules), list(sys.meta_path)

    def write(stack: str, text: str | None = None) -> str:
        name, source = STUBS[stack]
        for part in (folders := name.split(".")[:-1]):
            (tmp_path / Path(*folders[: folders.index(part) + 1])).mkdir(exist_ok=True)
        (tmp_path / Path(*name.split("."))).with_suffix(".py").write_text(HEAD + (source if text is None else text))
        importlib.invalidate_caches()
        return name

    yield write
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        if name.split(".")[0] in STUBS or name.startswith("graphalign.integrations."):
            del sys.modules[name]


def patched(model: nn.Module) -> bool:
    """Bitwise the patch by hand, and not the stock model."""
    x = tokens(1, 9)
    with torch.no_grad():
        got, want, plain = (m(x, use_cache=False).logits for m in (model, by_hand(build(2)), build(2)))
    return torch.equal(got, want) and not torch.equal(plain, want)


def make(stack: str, module: Any, **config: Any) -> Any:
    if stack == "verl":
        engine = module.FSDPEngine(SimpleNamespace(**config), SimpleNamespace(), None, None)
        return engine._build_module()
    cls = module.Actor if stack == "openrlhf" else module.HFModelWrapper
    return cls("model").model


@pytest.mark.parametrize("imported", ["before", "after"])
@pytest.mark.parametrize("stack", STUBS)
def test_models_that_the_stack_builds_are_patched(stack: str, imported: str, stub: Any) -> None:
    name = stub(stack)
    if imported == "before":
        importlib.import_module(name)
    hook = importlib.import_module(f"graphalign.integrations.{stack}")
    for _ in range(2):  # a second time does nothing
        hook.install()
    model = make(stack, importlib.import_module(name))
    assert patched(model)
    assert graphalign.undo(model) > 0


def test_verls_value_models_stay_as_they_are(stub: Any) -> None:
    module = importlib.import_module(stub("verl"))
    importlib.import_module("graphalign.integrations.verl")
    assert graphalign.undo(make("verl", module, model_type="value_model")) == 0


def test_no_patch_is_an_error_never_a_stock_model(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(stub("openrlhf"))
    importlib.import_module("graphalign.integrations.openrlhf").install()
    monkeypatch.delenv(hooks.ENV)
    with pytest.raises(PatchError, match="no patch for OpenRLHF's Actor: GRAPHALIGN_PATCH is not set in this process") as e:
        make("openrlhf", module)
    assert "runtime_env" in str(e.value)


@pytest.mark.parametrize(("stack", "text", "lacks"), [
    ("verl", "class FSDPEngine:\n    def build(self): pass\n", "FSDPEngine._build_module"),
    ("skyrl", "class Wrapper: pass\n", "HFModelWrapper"),
])  # fmt: skip
def test_a_stack_that_has_changed_is_named(stack: str, text: str, lacks: str, stub: Any) -> None:
    name = stub(stack, text)
    hook = importlib.import_module(f"graphalign.integrations.{stack}")
    hook.install()
    with pytest.raises(PatchError, match=rf"{stack} .* has no .*{lacks}, which the hook follows") as e:
        importlib.import_module(name)
    assert "graphalign.apply" in str(e.value)


def test_open_instruct_takes_its_models_from_here(stub: Any, tmp_path: Path) -> None:
    """As `grpo_fast.py` calls it (commit 001d52f5, `PolicyTrainerRayProcess.from_pretrained`)."""
    build(2).save_pretrained(tmp_path / "model")
    from graphalign.integrations.open_instruct import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "model", revision=None, dtype=torch.bfloat16, attn_implementation="sdpa")
    assert patched(policy.eval())
    assert AutoModelForCausalLM.__module__ == "graphalign.integrations.open_instruct"  # Ray's workers find it by this name
