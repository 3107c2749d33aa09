"""Gradient checkpointing inside a patched module (Zamba 2: a checkpointed layer that holds a checkpointed layer).

Transformers turns checkpointing on for every `GradientCheckpointingLayer`, also for one inside another. Dynamo cannot trace the inner
one, and the outer one recomputes everything inside it anyway: the same values, without the inner one's second recompute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

FLAG = "gradient_checkpointing"
"""Attribute of `transformers.modeling_layers.GradientCheckpointingLayer` (5.19.0) that turns it on."""


def checkpointed_inside(unit: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules inside a unit that checkpoint themselves when they are called, by their path from it."""
    found = ((n, m) for n, m in unit.named_modules() if m is not unit and m.training)
    return [(n, m) for n, m in found if vars(m).get(FLAG) is True and hasattr(m, "_gradient_checkpointing_func")]


@contextmanager
def one_checkpoint(unit: nn.Module) -> Iterator[None]:
    """Within the block, modules inside a unit that is checkpointed itself do not checkpoint once more."""
    held: Any = unit
    found = checkpointed_inside(unit) if getattr(held, FLAG, False) is True and unit.training else []
    for _, m in found:
        setattr(m, FLAG, False)
    try:
        yield
    finally:
        for _, m in found:
            setattr(m, FLAG, True)
