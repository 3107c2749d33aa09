"""Run by torchrun on two gloo ranks: FSDP2 around a patched model, against the patch by hand on each rank's own data."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphalign
from graphalign.errors import PatchNotLiveError
from tests.rewrite import test_beside as beside
from tests.rewrite.tiny import build, by_hand, patch, tokens


def shard(model: torch.nn.Module, **policy: bool) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, **policy)
    for layer in getattr(model, "model", model).layers:
        fully_shard(layer, mesh=mesh, mp_policy=mp)
    fully_shard(model, mesh=mesh, mp_policy=mp)
    return model


def train(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    out = model.train()(x, labels=x, use_cache=False)
    out.loss.backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return [out.logits.detach(), *grads]


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = build(2)
    hand = shard(by_hand(copy.deepcopy(model)), cast_forward_inputs=False)
    default = copy.deepcopy(model)
    patch(model)
    shard(model, cast_forward_inputs=False)
    x = tokens(2, 9, seed=dist.get_rank())
    a, b = train(model, x), train(hand, x)
    lines = []
    if all(torch.equal(u, v) for u, v in zip(a, b, strict=True)):
        lines.append("bitwise equal to the patch by hand")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if all(torch.equal(u, v) for u, v in zip(train(model, x), b, strict=True)):
        lines.append("bitwise equal with checkpointing")
    outside = beside.build()
    expected = beside.by_hand(outside, beside.IDS)
    graphalign.apply(outside, beside.spec())
    if torch.equal(shard(outside)(beside.IDS), expected):
        lines.append("tables and an embedding arrive unrounded")
    patch(default)
    shard(default)
    try:
        default(x, use_cache=False)
    except PatchNotLiveError as e:
        lines.append(str(e))
    print("\n".join(lines), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
