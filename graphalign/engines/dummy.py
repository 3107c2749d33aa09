"""Weights for models that have none: noise, in memory of its own for small models, in shared memory for large ones."""

from __future__ import annotations

import math
import mmap
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphalign.engines.noise import PERIOD, SCALE, Region, unit_noise
from graphalign.engines.products import SharedNoise, remember

SHARE_FROM = 4 << 30
"""Bytes of parameters above which dummy matrices map noise, each privately."""
READ_ONLY_FROM = 512 << 20
"""The same where nothing will be written to: all matrices at the same addresses."""
SHIFTS = 64
LAZY_FROM = 16 << 20
"""Bytes from which zeros are lazy."""


def dummy_model(config: Any, options: dict[str, Any], *, read_only: bool = False) -> nn.Module:
    """From the config with dummy weights: buffers are computed as always, parameters are filled with repeated noise."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), _LazyZeros():  # nothing is written to a large matrix here, so that it takes addresses and no memory
        model: nn.Module = AutoModelForCausalLM.from_config(config, **options)
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()  # tying is part of the initialisation that was skipped
    if sum(p.numel() * p.element_size() for p in model.parameters()) > (READ_ONLY_FROM if read_only else SHARE_FROM):
        share_dummy(model, read_only=read_only)
    else:
        fill_dummy(model)
    return model


class _LazyZeros(TorchDispatchMode):
    """Large `torch.zeros` are pages that the system fills when they are touched (Llama 4 makes its experts so, Transformers 5.19)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.zeros.default and str(kwargs.get("device") or "cpu") == "cpu":
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            size = math.prod(args[0]) * dtype.itemsize
            if size >= LAZY_FROM:
                memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                return torch.frombuffer(memory, dtype=dtype).view(args[0])
        return func(*args, **kwargs)


@torch.no_grad()
def share_dummy(model: nn.Module, *, read_only: bool = False) -> None:
    """Let the matrices of a large model lie in mapped noise, two neighbours never at the same place of it. Vectors are filled.

    Args:
        read_only: all matrices of a dtype at the same addresses, so that a page counts once however many read it; a write to one is a
            write to all. Otherwise a page that is written to becomes the writer's own.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1 and p.numel()]
    shared = SharedNoise(max(p.numel() + SHIFTS * mmap.PAGESIZE // p.itemsize for p in matrices))
    for index, p in enumerate(matrices):
        offset = index % SHIFTS * mmap.PAGESIZE
        region = shared.region((p.dtype,)) if read_only else Region((p.dtype,), offset + p.nbytes)
        p.data = region.tensor(offset // p.itemsize, p.shape, p.stride())
    fill_dummy(model, vectors_only=True)
    if read_only:
        remember(model, shared)


@torch.no_grad()
def fill_dummy(model: nn.Module, *, vectors_only: bool = False) -> None:
    """Fill parameters with noise: standard deviation 0.02, vectors other than biases around 1 (norm weights are not all ones)."""
    blocks: dict[torch.dtype, torch.Tensor] = {}
    for index, (name, p) in enumerate(model.named_parameters()):
        if vectors_only and p.ndim > 1:
            continue
        noise = blocks.setdefault(p.dtype, (unit_noise() * SCALE).to(p.dtype))
        flat = p.data.view(-1)
        shift = index * 7919 % (PERIOD // 2)  # no two parameters alike
        for start in range(0, flat.numel(), PERIOD // 2):
            piece = flat[start : start + PERIOD // 2]
            piece.copy_(noise[shift : shift + piece.numel()])
        if p.ndim <= 1 and not name.endswith("bias"):
            flat.mul_(5).add_(1)
