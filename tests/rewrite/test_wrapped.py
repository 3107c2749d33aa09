"""Copies and wrappers of patched models; what cannot work with a patch says so by name."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import types
from collections.abc import Iterator

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import graphalign
from graphalign.errors import PatchError, PatchNotLiveError
from tests.rewrite.tiny import build, by_hand, patch, tokens


def test_a_patched_model_is_copied_but_not_pickled() -> None:
    model = build(2)
    patch(model, ["rope"])
    for save in (pickle.dumps, lambda m: torch.save(m, io.BytesIO()), lambda m: torch.save(m.model.layers[0], io.BytesIO())):
        with pytest.raises(PatchError, match=r"a patched Qwen3.* cannot be pickled") as failure:
            save(model)
        assert "state_dict" in failure.value.hint
    assert type(copy.copy(model).model.layers[0]) is type(copy.deepcopy(model).model.layers[0]) is type(model.model.layers[0])
    torch.save(model.state_dict(), io.BytesIO())


def test_one_graph_around_a_patched_model() -> None:
    model = build(2)
    patch(model, ["rope"])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the model without fullgraph=True"):
        torch.compile(model, fullgraph=True, backend="eager")(tokens(), use_cache=False)


def test_dora() -> None:
    model = build(2)
    patch(model, ["swiglu"])
    config = peft.LoraConfig(use_dora=True, r=4, target_modules=["up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    with pytest.raises(PatchNotLiveError, match=r"DoRA adapters, .*: on mlp.up_proj") as failure:
        adapted(tokens(), use_cache=False)
    assert "use_dora=False" in failure.value.hint


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_as_a_whole_before_the_patch(mesh: DeviceMesh) -> None:
    model = build(2)
    hand = by_hand(copy.deepcopy(model))
    fully_shard(model, mesh=mesh)
    with patch(model), torch.no_grad():
        assert torch.equal(model(tokens(), use_cache=False).logits, hand(tokens(), use_cache=False).logits)
    patch(model, ["rope"]).undo()


def test_fsdp1(mesh: DeviceMesh) -> None:
    """With original parameters it works, also with FP32 masters; with flat ones (verl's `strategy: fsdp`) it is named, before or after."""

    def wrap(model: nn.Module, original: bool) -> nn.Module:
        policy = ModuleWrapPolicy({type(x) for x in model.model.layers})
        cast = MixedPrecision(param_dtype=torch.bfloat16)
        return FSDP(
            model, auto_wrap_policy=policy, use_orig_params=original, mixed_precision=cast, device_id=torch.device("cpu")
        )  # fmt: skip

    model = build(2, dtype=torch.float32)
    hand, flat, late = wrap(by_hand(copy.deepcopy(model)), True), copy.deepcopy(model), wrap(copy.deepcopy(model), False)
    patch(model)
    model = wrap(model, True)
    with torch.no_grad():
        assert torch.equal(model(tokens(), use_cache=False).logits, hand(tokens(), use_cache=False).logits)
    with pytest.raises(PatchError, match="cannot work under FSDP1 with use_orig_params=False") as failure:
        patch(late)
    assert "strategy=fsdp2" in failure.value.hint
    patch(flat)
    flat = wrap(flat, False)
    with pytest.raises(PatchNotLiveError, match="FSDP1 with use_orig_params=False") as lost:
        flat(tokens(), use_cache=False)
    assert "strategy=fsdp2" in lost.value.hint


def test_tensor_parallel(mesh: DeviceMesh) -> None:
    model = build(2)
    parallelize_module(model, mesh, {"model.layers.*.mlp.up_proj": ColwiseParallel()})
    with pytest.raises(PatchError, match="cannot work under tensor parallelism") as failure:
        patch(model)
    assert "without tp_plan" in failure.value.hint


def test_zero_3() -> None:
    """DeepSpeed is not installed here: what stands for it is the mark that it leaves on parameters."""
    model = build(2)
    for i, p in enumerate(model.parameters()):
        p.ds_id = i
    with pytest.raises(PatchError, match="cannot work under DeepSpeed ZeRO-3") as failure:
        patch(model)
    assert "stage 2" in failure.value.hint


def test_forward_replaced_on_the_instance() -> None:
    """As Liger's `_bind_method_to_module` does it (liger-kernel is not installed here), and a wrapper that says what it wraps."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x

    forward.__module__, forward.__qualname__ = "liger_kernel.transformers.rms_norm", "LigerRMSNorm.forward"
    model = build(2)
    norm = model.model.layers[1].input_layernorm
    norm.forward = types.MethodType(forward, norm)
    with pytest.raises(PatchError, match=r"input_layernorm.forward was replaced by liger_kernel.*LigerRMSNorm.forward") as failure:
        patch(model)
    assert "use_liger" in failure.value.hint
    own = type(norm).forward
    norm.forward = functools.wraps(own)(functools.partial(own, norm))
    patch(model)


def test_a_copy_is_undone_and_patched_again() -> None:
    """Reference models are made by `deepcopy`."""
    model = build(2)

    def run(m: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return m(tokens(), use_cache=False).logits

    stock = run(model)
    patch(model)
    want = run(model)
    copied = copy.deepcopy(model)
    assert torch.equal(run(copied), want)
    assert graphalign.undo(copied) == 4  # two layers, the norm, the model around them
    assert torch.equal(run(copied), stock)
    assert torch.equal(run(model), want)
    pickle.dumps(copied)
    patch(copied)
    assert torch.equal(run(copied), want)
    assert graphalign.undo(build(2)) == 0
