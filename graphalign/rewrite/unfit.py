"""Ways of sharding a model, and of replacing what its layers run, under which a patch cannot work: refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphalign.errors import PatchError
from graphalign.rewrite.sharded import is_sharded

_FLAT = (
    "FSDP1 with use_orig_params=False, which flattens a layer's weights into one that Dynamo cannot trace",
    "use FSDP2 (verl: actor_rollout_ref.actor.strategy=fsdp2), or FSDP1 with use_orig_params=True",
)
_ZERO = (
    "DeepSpeed ZeRO-3, whose hooks on every module gather weights outside of what Dynamo can trace",
    "use ZeRO stage 2 or below, or FSDP2",
)
_TENSOR = (
    "tensor parallelism (tp_plan, parallelize_module), which replaces the forward of linear layers and splits what they compute",
    "load the model without tp_plan and shard it with FSDP2 (fully_shard)",
)


def unfit(unit: nn.Module, *, whole: bool = False) -> tuple[str, str] | None:
    """Under what a unit is sharded that no patch can work with, and what to do; None if under nothing of that kind.

    Args:
        unit: the module.
        whole: whether FSDP2 shards a module around it, so that DTensors say nothing.
    """
    for m in unit.modules():
        # how FSDP1 tells Dynamo of itself (torch 2.13, `_annotate_modules_for_dynamo`)
        if getattr(m, "_is_fsdp_managed_module", False) and not getattr(m, "_fsdp_use_orig_params", True):
            return _FLAT
    for p in unit.parameters():
        if getattr(p, "_is_flat_param", False):
            return _FLAT
        if hasattr(p, "ds_id"):  # deepspeed/runtime/zero/partition_parameters.py
            return _ZERO
    if not whole and _dtensors(unit):
        return _TENSOR
    return None


def refuse_unfit(units: Mapping[str, nn.Module], sharded: bool) -> None:
    """Refuse a model that is sharded in a way that no patch can work with.

    Args:
        units: the modules, by path.
        sharded: whether FSDP2 holds parameters of theirs.

    Raises:
        PatchError: names the way.
    """
    for name, unit in units.items():
        if (found := unfit(unit, whole=sharded)) is not None:
            raise PatchError(f"the patch cannot work under {found[0]}", where=name, hint=found[1])


def _dtensors(unit: nn.Module) -> bool:
    if not torch.distributed.is_available() or any(is_sharded(m) for m in unit.modules()):
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) for p in unit.parameters())


def refuse_replaced(path: str, module: nn.Module, text: str) -> None:
    """Refuse a module whose `forward` was replaced on the instance by another function than its class's, as Liger does; wrappers that say
    what they wrap (accelerate's) are no replacement.

    Args:
        path: of the module.
        module: an edit is in it.
        text: the edit's source expression.

    Raises:
        PatchError: names the function and where it is from.
    """
    replaced = vars(module).get("forward")
    if replaced is None:
        return
    found: Any = inspect.unwrap(replaced)
    found = getattr(getattr(found, "func", found), "__func__", getattr(found, "func", found))
    own = inspect.unwrap(type(module).forward)
    if getattr(found, "__code__", None) is getattr(own, "__code__", own):
        return
    name = f"{getattr(found, '__module__', '?')}.{getattr(found, '__qualname__', type(found).__name__)}"
    hint = "undo the replacement, or leave the groups in this module out of the patch"
    if "liger" in name.lower():
        hint = "load the model without Liger (use_liger_kernel=False, use_liger=False): its kernels round in other places"
    raise PatchError(f"{path}.forward was replaced by {name}", where=f"needed for {text}", hint=hint)
