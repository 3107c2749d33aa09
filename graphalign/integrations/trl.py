"""TRL (and any Transformers `Trainer`): `attach(trainer, "patch.yaml")`, between building the trainer and `train()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from graphalign.errors import PatchError
from graphalign.patch.spec import PatchSpec
from graphalign.rewrite.apply import Patched, apply
from graphalign.rewrite.live import ORIGINAL

T = TypeVar("T")


def attach(trainer: T, patch: PatchSpec | str | Path, *, allow_stale: bool = False) -> T:
    """Patch the model that a trainer trains and, if it has one, its reference model.

        trainer = attach(GRPOTrainer(model="my-model", …), "patch.yaml")

    The handles are `trainer.graphalign_patches`, for `undo()`. A model that was patched before it was given to the trainer stays as it is.

    Args:
        trainer: a `GRPOTrainer`, `SFTTrainer`, … that has not trained yet.
        patch: the patch, or its file.
        allow_stale: as in `graphalign.apply`.

    Returns:
        The trainer.

    Raises:
        PatchError: the patch does not fit the model; nothing was changed. Or the object is no trainer.
    """
    model: Any = getattr(trainer, "model", None)
    if not isinstance(model, nn.Module):
        raise PatchError(f"{type(trainer).__name__} has no model to patch", hint="give a Trainer, or call graphalign.apply on the model")
    reference: Any = getattr(trainer, "ref_model", None)
    done: list[Patched] = []
    try:
        for m in (model, reference):
            if isinstance(m, nn.Module) and not any(hasattr(type(x), ORIGINAL) for x in m.modules()):
                done.append(apply(m, patch, allow_stale=allow_stale))
    except PatchError:
        for handle in done:
            handle.undo()
        raise
    trainer.graphalign_patches = done  # type: ignore[attr-defined]
    return trainer
