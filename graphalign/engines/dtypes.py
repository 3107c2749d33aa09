"""The dtype a model is made for, and the one that graphalign analyses: BF16, on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphalign.engines.model_folder import own_dtype
from graphalign.errors import BadInputError

ANALYSED = "bfloat16"
OTHER_NAMES = {"half": "float16", "float": "float32"}
"""vLLM's."""


def refuse_other_dtype(model: Path, engine_args: Mapping[str, Any]) -> str:
    """The engine's dtype is BF16.

    Args:
        model: the model's folder.
        engine_args: arguments of vLLM's engine.

    Returns:
        A note for the capture if the model's own dtype is another one, else an empty text.

    Raises:
        BadInputError: the arguments ask for another dtype.
    """
    own, asked = own_dtype(model), engine_args.get("dtype", ANALYSED)
    wanted = (own or ANALYSED) if asked == "auto" else OTHER_NAMES.get(str(asked), str(asked)).removeprefix("torch.")
    if wanted != ANALYSED:
        what = f"the engine is asked to run in {wanted}; graphalign maps the rounding of BF16"
        if asked == "auto":
            what = f"dtype=auto runs the engine in the model's own {wanted}; graphalign maps the rounding of BF16"
        hint = "leave dtype out: the engine then runs in BF16, whatever the checkpoint is stored in"
        raise BadInputError(what, where=f"--engine-arg dtype={asked}", hint=hint)
    return (
        f"the model's own dtype is {own}; the engine ran it in bfloat16, which is what graphalign maps" if own not in ("", ANALYSED) else ""
    )


def words(model: Path, *, engine: bool = True, trainer: str = "") -> str:
    """What to tell a user before anything is started; empty for a BF16 model.

    Args:
        model: the model's folder.
        engine: whether an engine is started.
        trainer: dtype of the trainer's parameters; empty if it is not known, or there is no trainer.
    """
    own = own_dtype(model)
    if own in ("", ANALYSED) or not (engine or trainer == ANALYSED):
        return ""
    if not engine:
        return f"the model's own dtype is {own}; the trainer is built in {trainer}, as --dtype says"
    sides = "both sides run" if trainer == ANALYSED else "the engine runs"
    other = f", and the trainer in {trainer}, as asked" if trainer not in ("", ANALYSED) else ""
    return f"the model's own dtype is {own}; {sides} in {ANALYSED}, which is what graphalign maps{other}"
