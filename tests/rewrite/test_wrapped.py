"""What cannot work with a patch says so: sharded before, DoRA, pickled, compiled as one graph."""

from __future__ import annotations

import copy
import io
import pickle

import peft
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphalign
from graphalign.errors import PatchError, PatchNotLiveError
from tests.rewrite.tiny import build, patch, spec_for, tokens


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


@pytest.mark.parametrize("layers", [True, False])
def test_sharded_before_the_patch(layers: bool) -> None:
    model = build(2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for m in (*model.model.layers, model) if layers else (model,):
            fully_shard(m, mesh=mesh)
        with pytest.raises(PatchError, match=r"model\.layers\.0 is sharded already") as failure:
            graphalign.apply(model, spec_for(2))
        assert "then call fully_shard" in failure.value.hint
    finally:
        dist.destroy_process_group()
