"""Every known way to lose the patch without a word: the forward raises and says why, or the values prove that it is live."""

from __future__ import annotations

import copy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import graphalign.rewrite.live as live
from graphalign.errors import PatchNotLiveError
from tests.rewrite.tiny import build, by_hand, patch, tokens

ROPE = ["rope"]


def logits(model: nn.Module, batch: int = 1, length: int = 17) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens(batch, length), use_cache=False).logits


def patched(groups: list[str] | None = None) -> tuple[nn.Module, torch.Tensor]:
    """A patched model that has not run yet, and the logits that it must give."""
    model = build(2)
    other = copy.deepcopy(model)
    patch(other, groups)
    want = logits(other)
    torch._dynamo.reset()
    patch(model, groups)
    return model, want


def refused(model: nn.Module, *words: str, **size: int) -> None:
    with pytest.raises(PatchNotLiveError) as e:
        logits(model, **size)
    assert [w for w in words if w not in str(e.value)] == [], str(e.value)


def test_recompile_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "RECOMPILE_LIMIT", 1)
    model, _ = patched(ROPE)
    logits(model)
    refused(model, "ran 0 of the 8 edits of its patch", "recompile limit", batch=2)


def test_global_recompile_limits_do_not_apply() -> None:
    model, want = patched(ROPE)
    with torch._dynamo.config.patch(recompile_limit=1):
        assert torch.equal(logits(model), want)
        logits(model, batch=2)


def test_dispatch_mode_raises_and_the_patch_works_after_it() -> None:
    model, want = patched(ROPE)
    for _ in range(2):
        with FlopCounterMode(display=False):
            refused(model, "a TorchDispatchMode is active (_FlopCounterMode)", "run it outside the mode")
        assert torch.equal(logits(model), want)


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "eager_then_compile", "aot_eager_then_compile"])
def test_stance(stance: str) -> None:
    model, want = patched(ROPE)
    with torch.compiler.set_stance(stance):
        refused(model, f"set_stance('{stance}') is active", "leave the stance at 'default'")
    assert torch.equal(logits(model), want)


def test_forced_backend() -> None:
    model, want = patched(ROPE)
    with torch.compiler.set_stance("default", force_backend="eager"):
        refused(model, "force_backend")
    assert torch.equal(logits(model), want)


def test_fail_on_recompile_is_live_or_raises() -> None:
    model, want = patched(ROPE)
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="Detected recompile"):
        logits(model)
    logits(model)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(logits(model), want)


def test_suppressed_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = patched(ROPE)

    def broken(*args: object) -> None:
        raise RuntimeError("out of cheese")

    monkeypatch.setattr(live, "rewrite", broken)
    with torch._dynamo.config.patch(suppress_errors=True):
        refused(model, "ran 0 of the 8 edits", "out of cheese")


def test_dynamo_disabled_by_config() -> None:
    model, want = patched(ROPE)
    with torch._dynamo.config.patch(disable=True):
        refused(model, "torch.compile is disabled", "TORCH_COMPILE_DISABLE")
    assert torch.equal(logits(model), want)


def test_disabled_caller_is_live() -> None:
    model, want = patched(ROPE)
    assert torch.equal(torch._dynamo.disable(logits)(model), want)


@pytest.mark.parametrize(
    ("variable", "message"), [("TORCH_COMPILE_DISABLE", "is disabled"), ("TORCHDYNAMO_DISABLE", "TORCHDYNAMO_DISABLE")]
)
def test_disabled_by_environment(variable: str, message: str) -> None:
    code = (
        "import graphalign, torch; from graphalign.errors import PatchNotLiveError; from tests.rewrite.tiny import *\n"
        "m = build(2); patch(m, ['rope'])\n"
        "try: m(tokens(), use_cache=False)\nexcept PatchNotLiveError as e: print(e)\nelse: print('silent')"
    )
    env = {"PATH": "/usr/bin:/bin", variable: "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], env=env)
    assert f"unset {variable}" in done.stdout, done.stdout + done.stderr


def test_opaque_submodule() -> None:
    class Opaque(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.weight = norm.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(x, x.shape[-1:], self.weight)

    model, _ = patched()
    logits(model)
    model.model.layers[1].post_attention_layernorm = Opaque(model.model.layers[1].post_attention_layernorm)
    refused(model, "ran 17 of the 20 edits", "norm_weight: post_attention_layernorm.mul", "was replaced after the patch")


def test_replaced_units() -> None:
    model, _ = patched(["norm_weight"])
    logits(model)
    model.model.norm = copy.deepcopy(build(2).model.norm)
    refused(model, "ran 2 of its 3 patched modules", "not run, or replaced since the patch was applied: norm")
    model, _ = patched(ROPE)
    model.model.layers[1] = build(2).model.layers[1]
    refused(model, "ran 1 of its 2 patched modules", "layers.1")


def test_replaced_forward_on_the_instance() -> None:
    model, want = patched(ROPE)
    layer = model.model.layers[1]
    stock = type(build(2).model.layers[0])
    mine = layer.forward
    layer.forward = lambda *a, **k: mine(*a, **k)  # a wrapper, as accelerate makes them
    assert torch.equal(logits(model), want)
    layer.forward = types.MethodType(stock.forward, layer)
    refused(model, "its forward was replaced", "make it call the forward that it replaced")


def test_replaced_forward_of_a_submodule() -> None:
    model, _ = patched(["swiglu"])
    logits(model)
    model.model.layers[0].mlp.forward = lambda x: x
    refused(model, "swiglu: mlp.mul", "was replaced after the patch")


def test_hook_that_breaks_the_graph() -> None:
    model, _ = patched()
    model.model.layers[0].self_attn.register_forward_hook(torch._dynamo.disable(lambda *a: None))
    refused(model, "hooks that may have broken the graph: on self_attn", "remove the forward hooks inside the layer")


def test_selective_checkpointing_is_live() -> None:
    model, _ = patched()
    hand = by_hand(build(2))
    x = tokens(2, 9)
    grads = []
    for m in (model, hand):
        keep = lambda ctx, op, *a, **k: CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE  # noqa: E731
        m.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": lambda keep=keep: create_selective_checkpoint_contexts(keep)}
        )
        try:
            m.train()(x, labels=x).loss.backward()
        except PatchNotLiveError as e:
            assert "TorchDispatchMode" in str(e)  # noqa: PT017  refused by name is as good
            return
        grads.append([p.grad for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_autocast_that_changes_nothing_and_autocast_that_does() -> None:
    """With BF16 weights autocast leaves Qwen3 as it is; an op on its FP32 list (`prod` on the CPU) it does not."""
    model, want = patched(ROPE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits(model), want)
    assert torch.equal(logits(model), want)

    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(x) * x.new_ones(2).prod()

    model.model.layers[0].mlp.act_fn = Gate()
    logits(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refused(model, "autocast is on (bfloat16), the patch is for autocast off", "prod gives float32 with it, bfloat16 without")


def test_threads_count_apart() -> None:
    import threading

    model, want = patched(ROPE)
    logits(model)
    got: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: got.append(logits(model))) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(got) == 3
    assert all(torch.equal(g, want) for g in got)


def test_hidden_states_are_recorded_and_attentions_are_refused() -> None:
    """Transformers' hooks stay inside the layers after the first call that asks for either; Dynamo cannot trace them."""
    model, want = patched()
    with torch.no_grad():
        result = model(tokens(1, 17), use_cache=False, output_hidden_states=True)
        assert torch.equal(result.logits, want)
        assert len(result.hidden_states) == 3
        with pytest.raises(PatchNotLiveError, match="output_attentions is recorded inside Qwen3DecoderLayer"):
            model(tokens(1, 17), use_cache=False, output_attentions=True)
    assert torch.equal(logits(model), want)
    counted = [len(m._forward_hooks) for m in model.modules()]
    assert sum(counted) >= 4  # Transformers' hooks are where they were
