"""Autocast around a patch that is for none: allowed where it changes nothing that the patch depends on.

verl, SkyRL and NeMo-RL run their BF16 layers (FSDP2 casts the FP32 master weights) under `torch.autocast` besides. With BF16 operands it
leaves most models as they are; an op on its FP32 list that reads BF16 (on CUDA `softmax`, `sum`, `rsqrt`, …) it does not. So every op of
the traced graph is run on its fake tensors with autocast and without.
"""

from __future__ import annotations

import torch
from torch import fx

from graphalign.errors import PatchNotLiveError
from graphalign.rewrite.analyse import Info, dtypes_of, is_anchor


def refuse_other_numbers(gm: fx.GraphModule, info: dict[fx.Node, Info], device: str) -> None:
    """Raise if autocast, as it is set now, changes the format in which an op of the model's own code computes.

    GEMMs and attention are left out: they run as in the stock model under that autocast, and a patch changes none of their operands.

    Args:
        gm: graph as Dynamo hands it to a backend, not rewritten yet.
        info: of its nodes.
        device: device type of the module's input.

    Raises:
        PatchNotLiveError: names the op.
    """
    dtype = torch.get_autocast_dtype(device)
    for node, found in info.items():
        if node.op not in ("call_function", "call_method", "call_module") or not found.ops or not found.text or is_anchor(found):
            continue
        with torch.autocast(device, dtype=dtype, enabled=True):
            cast = dtypes_of(gm, node)
        with torch.autocast(device, enabled=False):
            plain = dtypes_of(gm, node)
        if cast != plain:
            name = str(dtype).removeprefix("torch.")
            raise PatchNotLiveError(
                f"autocast is on ({name}), the patch is for autocast off, and here that is not the same: {found.ops[-1].op} gives "
                f"{_words(cast)} with it, {_words(plain)} without",
                where=f"{found.ops[-1].module or 'the layer'}: {found.text}",
                hint=f"train without autocast (the weights are {name} already), or make a patch for this regime: "
                f"`graphalign find MODEL --autocast {name}`",
            )  # fmt: skip


def _words(dtypes: tuple[torch.dtype, ...]) -> str:
    return str(dtypes[-1]).removeprefix("torch.") if dtypes else "nothing"
