"""What stands in for FlashInfer where vLLM's defaults need it: its fused all-reduce, residual sum and RMSNorm, as an op that is never run.

A CUDA build of vLLM comes with FlashInfer, and fuses `all_reduce` with the norm behind it (`fuse_allreduce_rms`) in a tensor-parallel
engine on Hopper and Blackwell, for few enough tokens. Without the package vLLM would silently compile another graph here. How the op
rounds is declared in `rules/ops`. Seen on vLLM 0.32.0.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

ALL_REDUCE = "vllm.all_reduce.default"
FUSED = "vllm.flashinfer_trtllm_fused_allreduce_norm.default"
UNKNOWN_BACKEND = (
    "which FlashInfer kernel runs the fused all-reduce and norm is not known: its TRT-LLM kernel is assumed; its MNNVL kernel, vLLM's "
    "first choice where NVSwitch multicast joins the GPUs, also rounds the norm's squares to BF16"
)
PASS = "vllm.compilation.passes.fusion.allreduce_rms_fusion"
SAID = "FlashInfer's fused all-reduce and RMSNorm is an op without an implementation; vLLM's pass fuses as if FlashInfer were installed"
MISSING = "vLLM fuses all_reduce, residual sum and norm by default on this device (fuse_allreduce_rms), which could not be reproduced: {}"


class Pattern:
    """`flashinfer.comm.AllReduceFusionPattern`, as far as vLLM names it."""

    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3


def stand_in(note: Any) -> list[str]:
    """Give vLLM's pass its op, and let vLLM's defaults switch it on. Does nothing if FlashInfer is there.

    Args:
        note: called with what could not be reproduced.

    Returns:
        What was replaced, in words.
    """
    import vllm.utils.flashinfer as flashinfer

    if flashinfer.has_flashinfer():
        return []
    try:
        with _package():
            fusion = __import__(PASS, fromlist=["AllReduceFusionPass"])
        if fusion.flashinfer_comm is None:
            raise ImportError("vLLM's pass does not find flashinfer.comm")
        for name, made in (("get_fi_ar_workspace", object()), ("get_fi_ar_quant_workspace", None)):
            setattr(fusion, name, lambda made=made, **_: made)
        _switch_on(flashinfer)
    except (ImportError, AttributeError) as e:
        note(MISSING.format(f"{type(e).__name__}: {e}"))
        return []
    return [SAID]


def describe(graphs: list[dict[str, Any]], ranks: int) -> tuple[list[str], list[str]]:
    """What of a tensor-parallel engine is not in its graphs: in words, (not simulated, unknown)."""
    called = {n.get("op") for g in graphs for k in g["kernels"] for n in k["nodes"]}
    said = []
    if called & {ALL_REDUCE, FUSED}:
        said.append(f"in which order all_reduce adds the {ranks} ranks' parts (each rounded when it is stored), and where it rounds")
    return said, [UNKNOWN_BACKEND] if FUSED in called else []


@contextlib.contextmanager
def _package() -> Iterator[None]:
    """`flashinfer` with the names that vLLM's pass looks for, and only while it is imported."""
    package, comm = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.comm")
    for module in (package, comm):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    comm.AllReduceFusionPattern = Pattern  # type: ignore[attr-defined]
    comm.allreduce_fusion = comm.create_allreduce_fusion_workspace = None  # type: ignore[attr-defined]
    package.comm = comm  # type: ignore[attr-defined]
    package.__path__ = []
    sys.modules |= {"flashinfer": package, "flashinfer.comm": comm}
    try:
        yield
    finally:
        for name in ("flashinfer", "flashinfer.comm"):
            del sys.modules[name]


def _switch_on(flashinfer: Any) -> None:
    """Let vLLM's own condition for the fusion see FlashInfer; nothing else does."""
    import vllm.config.vllm as config

    condition = config.enable_allreduce_rms_fusion
    found = flashinfer.has_flashinfer

    def as_if_installed(settings: Any) -> bool:
        flashinfer.has_flashinfer = lambda: True
        try:
            return bool(condition(settings))
        finally:
            flashinfer.has_flashinfer = found

    levels = [x["compilation_config"] for x in vars(config).values() if isinstance(x, dict) and "compilation_config" in x]
    places = [p for level in levels if (p := level.get("pass_config", {})).get("fuse_allreduce_rms") is condition]
    if not places:
        raise AttributeError("none of vLLM's optimisation levels has this condition")
    for place in places:
        place["fuse_allreduce_rms"] = as_if_installed
