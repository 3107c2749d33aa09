"""Two tokens through a patched model, so that an edit that matches nothing is known before training starts."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphalign.errors import PatchError, PatchNotLiveError
from graphalign.rewrite.formats import Calls, formats_of
from graphalign.rewrite.like_cuda import emulated, like_cuda

log = logging.getLogger("graphalign")


def run_trial(root: nn.Module, regime: Mapping[str, Any]) -> Calls | None:
    """Run the module around all patched modules once, without gradients; random state, mode and parameters stay as they are.

    Args:
        root: a module whose forward takes `input_ids`; of others nothing is known until their first forward.
        regime: of the spec, for autocast.

    Returns:
        What its GEMMs and attention kernels read; None if it did not run.

    Raises:
        PatchError, PatchNotLiveError: an edit does not fit.
    """
    parameters = inspect.signature(root.forward).parameters
    anchor = next(root.parameters(), None)
    if "input_ids" not in parameters or anchor is None:
        log.info("graphalign: %s takes no input_ids; the patch is checked by its first forward", type(root).__name__)
        return None
    device = anchor.device
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    autocast = regime.get("autocast")
    cast = torch.autocast(device.type, dtype=getattr(torch, str(autocast), None), enabled=autocast is not None)
    forked = [device] if device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices=forked),
            torch.no_grad(),
            like_cuda(emulated(regime, device.type)),
            cast,
            formats_of(root) as calls,
        ):
            root(input_ids=torch.tensor([[0, 1]], device=device), **options)
    except (PatchError, PatchNotLiveError):
        raise
    except Exception as e:  # whatever else this model needs, its own forward will say
        log.info("graphalign: the patch is checked by the first forward (a trial failed: %s: %s)", type(e).__name__, str(e)[:120])
        return None
    return calls
