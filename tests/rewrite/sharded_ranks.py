"""Run on two gloo ranks: FP32 master weights under FSDP2 as real stacks set it up, against the patch by hand on each rank's own data.

Arguments: a folder for what the ranks say, and scenes. Each policy is what the stack passes to `fully_shard`; the line of its source is in
`docs/trainers.md`.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

import graphalign
from graphalign.errors import PatchNotLiveError
from tests.rewrite import kernels, matrix
from tests.rewrite import test_beside as beside
from tests.rewrite.matrix import run, same
from tests.rewrite.tiny import build, by_hand, patch, tokens
from tests.rewrite.tiny import config as tiny_config

BF16, FP32 = torch.bfloat16, torch.float32
POLICIES: dict[str, dict[str, Any]] = {
    "verl, SkyRL": {"param_dtype": BF16, "reduce_dtype": FP32, "cast_forward_inputs": True},
    "accelerate, TRL": {"param_dtype": BF16, "reduce_dtype": BF16, "output_dtype": BF16},
    "NeMo-RL": {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32},
}


def shard(model: Any, policy: dict[str, Any], **options: Any) -> Any:
    """Every layer and the embedding by themselves, then the rest: as verl's `apply_fsdp2`."""
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "mp_policy": MixedPrecisionPolicy(**policy)} | options
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for part in (*inner.model.layers, inner.model.embed_tokens):
        fully_shard(part, **options)
    return fully_shard(model, **options)


def by_hand_sharded(model: Any, policy: dict[str, Any], **options: Any) -> Any:
    """The patch by hand, whose unrounded values pass between layers because the layers' policy casts nothing."""
    by_hand(model)
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))} | options
    layers = MixedPrecisionPolicy(**policy | {"cast_forward_inputs": False, "output_dtype": None})
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for part in (*inner.model.layers, inner.model.embed_tokens):
        fully_shard(part, mp_policy=layers, **options)
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy), **options)


def inputs_for(batch: int = 2, length: int = 9) -> dict[str, Any]:
    x = tokens(batch, length, seed=dist.get_rank())
    return {"input_ids": x, "labels": x, "use_cache": False}


def model_of(layers: int = 2) -> nn.Module:
    """FP32 weights that are no BF16 numbers."""
    return build(layers, dtype=FP32)


def nemo_rl() -> dict[str, bool]:
    """NeMo-RL, whose FP32 outputs need autocast, builds and shards in one: patched after it. verl's policy is in `cells` and `adapters`."""
    policy, model, x = POLICIES["NeMo-RL"], model_of(), inputs_for()
    hand, stock = by_hand_sharded(copy.deepcopy(model), policy), shard(copy.deepcopy(model), policy)
    patch(shard(model, policy))
    want = run(hand, x, cast=True)
    found = {"NeMo-RL": same(run(model, x, cast=True), want)}
    found["NeMo-RL, stock differs"] = not torch.equal(run(stock, x, cast=True)[0], want[0])  # type: ignore[arg-type]
    return found


def cells() -> dict[str, bool]:
    """The matrix of `matrix.py`: verl's policy, sharded, then patched. Then autocast, parameters kept unsharded, and undone."""
    policy, found = POLICIES["verl, SkyRL"], {}
    for attention, (implementation, _, _) in matrix.ATTENTION.items():
        with pytest.MonkeyPatch.context() as patcher:
            model: Any = kernels.use(model_of(), implementation, patcher)
            hand = by_hand_sharded(copy.deepcopy(model), policy)
            handle = patch(shard(model, policy))
            for cell, word in matrix.cells(attention, model, hand, cast=False, seed=dist.get_rank()).items():
                say("|".join(("cell", *cell, word)))
            if implementation != "flash_attention_2":
                continue
            for m in (model, hand):
                m.gradient_checkpointing_disable()
                m.set_reshard_after_forward(False)
            x = matrix.inputs_for(attention, dist.get_rank())
            want = run(hand, x)
            found["kept unsharded"] = same(run(model, x), want)
            found["packed, autocast"] = same(run(model, x, cast=True), run(hand, x, cast=True))
            handle.undo()
            found["undone"] = not torch.equal(run(model, x)[0], want[0])  # type: ignore[arg-type]
            hooks = [sum(len(x._forward_hooks) + len(x._forward_pre_hooks) for x in m.modules()) for m in (model, hand)]
            found["no hooks left"] = hooks[0] == hooks[1]
    return found


def adapters() -> dict[str, bool]:
    """LoRA on FP32 weights; AdamW steps; a checkpoint saved and resumed in a model that is made on no device and filled after sharding."""
    policy, found = POLICIES["verl, SkyRL"], {}
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model_of(), config)
    hand = by_hand_sharded(copy.deepcopy(model), policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    patch(model)
    shard(model, policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for m in (model, hand):
        optimizer = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
        run(m, inputs_for())
        optimizer.step()
    x = inputs_for()
    want = run(hand, x)
    found["LoRA, CPU offload, after a step"] = same(run(model, x), want)
    saved = get_model_state_dict(hand, options=StateDictOptions(full_state_dict=True))
    with torch.device("meta"):
        empty = peft.get_peft_model(AutoModelForCausalLM.from_config(tiny_config(2), attn_implementation="sdpa", dtype=FP32), config)
    patch(empty)  # as rank 1 of verl and SkyRL does, on no device
    shard(empty, policy)
    empty.to_empty(device="cpu")
    rotary = model.get_base_model().model.rotary_emb
    empty.get_base_model().model.rotary_emb.load_state_dict(rotary.state_dict())
    for name, buffer in rotary.named_buffers():
        setattr(empty.get_base_model().model.rotary_emb, name, buffer.clone())
    set_model_state_dict(empty, saved, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    found["resumed in a model made on no device"] = same(run(empty, x), want)
    return found


def frameworks() -> dict[str, bool]:
    """accelerate's own sharding: BF16 weights, upcast by it after the patch; its policy, its choice of layers, norm and head as a group.

    `Accelerator.prepare` takes FSDP only on accelerators, so what it calls is called here, with what that reads of an `Accelerator`.
    """
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        cpu_ram_efficient_loading=False,
    )  # fmt: skip
    plugin.set_mixed_precision("bf16")
    model = build(2)
    hand = copy.deepcopy(model).to(FP32)
    patch(model)
    state = SimpleNamespace(fsdp_plugin=plugin)
    made = fsdp2_prepare_model(SimpleNamespace(state=state, mixed_precision="bf16", is_main_process=False, device="cpu"), model)
    policy = {k: getattr(plugin.mixed_precision_policy, k) for k in ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")}
    found = {"accelerate shards every layer": all(isinstance(layer, FSDPModule) for layer in made.model.layers)}
    found["accelerate makes FP32 masters"] = all(p.dtype == FP32 for p in made.parameters())
    found["accelerate, its own code"] = same(run(made, inputs_for(), True), run(by_hand_sharded(hand, policy), inputs_for(), True))
    return found


def tables() -> dict[str, bool]:
    """An embedding and the tables of a module outside the layers travel beside their rounded forms, past what FSDP2 casts."""
    found = {}
    for name, policy in POLICIES.items():
        model = beside.build()
        want = beside.by_hand(model, beside.IDS)
        graphalign.apply(model.to(FP32), beside.spec())
        options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "mp_policy": MixedPrecisionPolicy(**policy)}
        # an embedding whose output FSDP2 makes FP32 would hand FP32 to the tables' module, which then rounds nothing
        for part in model.layers if policy.get("output_dtype") is FP32 else (model.embed, *model.layers):
            fully_shard(part, **options)
        found[f"{name}: tables and an embedding"] = torch.equal(fully_shard(model, **options)(beside.IDS).to(BF16), want)
    return found


def bf16() -> dict[str, bool]:
    """BF16 weights, FSDP2's default policy but for the dtype; FP32 weights that nobody casts are refused."""
    model, policy = build(2), {"param_dtype": BF16}
    hand = by_hand_sharded(copy.deepcopy(model), policy)
    patch(model)
    found = {"BF16 weights": same(run(shard(model, policy), inputs_for()), run(hand, inputs_for()))}
    model = model_of()
    patch(model)
    try:
        model(**inputs_for())
    except PatchNotLiveError as e:
        found["FP32 weights that nobody casts are named"] = "is float32 in the forward, the patch is for bfloat16" in str(e)
    return found


SCENES: dict[str, Callable[[], dict[str, bool]]] = {f.__name__: f for f in (nemo_rl, cells, adapters, frameworks, tables, bf16)}


def say(line: str) -> None:
    """Into a file of this rank in the folder of the first argument: standard output has both ranks' lines mixed."""
    with (Path(sys.argv[1]) / f"rank{dist.get_rank()}").open("a") as f:
        f.write(line + "\n")


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.getLogger("graphalign").setLevel(logging.ERROR)
    for scene in sys.argv[2:]:
        for what, holds in SCENES[scene]().items():
            say(f"{'holds' if holds else 'FAILS'}: {what}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
