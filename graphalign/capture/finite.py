"""Looks for NaN and Inf on the trainer's side: in its parameters, and in what its forward makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphalign.capture.engine_numbers import BROKEN, broken
from graphalign.errors import BadInputError, CaptureFailedError

HINT = "its weights are broken or not initialised, or its dtype is too narrow for them: run it once without graphalign on the same inputs"


def refuse_broken(module: nn.Module) -> None:
    """Refuse a model with a parameter that holds NaN or Inf.

    Raises:
        BadInputError: it names the parameter.
    """
    for name, p in module.named_parameters():
        if what := broken(p):
            raise BadInputError(f"the checkpoint is broken: {name} holds {what}", where=name, hint=BROKEN)


def require_numbers(logits: torch.Tensor, module: nn.Module, forward: Callable[[], Any]) -> None:
    """Refuse a trainer whose logits are NaN or +Inf; -Inf alone is a masked token.

    Args:
        logits: what its forward returned.
        module: the trainer.
        forward: runs the same forward again, to find where it begins.

    Raises:
        BadInputError: a parameter holds NaN or Inf.
        CaptureFailedError: the forward makes them; it names the module that does so first.
    """
    if logits.device.type == "meta" or not (logits.isnan().any() or (logits == float("inf")).any()):
        return
    refuse_broken(module)
    found: list[str] = []
    with _watching(module, found):
        forward()
    where = found[0] if found else f"{type(module).__name__}: no module's output but the logits, so it comes from their last steps"
    raise CaptureFailedError(f"the trainer's logits are no numbers: {broken(logits)}", where=where, hint=HINT)


@contextmanager
def _watching(module: nn.Module, found: list[str]) -> Iterator[None]:
    """Note the first module whose output is broken: an inner one ends before the one around it."""

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(m: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) and output else output
            if not found and isinstance(first, torch.Tensor) and (what := broken(first)):
                read = next((b for a in args if (b := broken(a))), "")
                why = f"reads {read}" if read else "reads numbers"
                found.append(f"first seen in {name or 'the model'} ({type(m).__name__}): it {why}, and returns {what}")

        return hook

    handles = [m.register_forward_hook(look(name)) for name, m in module.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
