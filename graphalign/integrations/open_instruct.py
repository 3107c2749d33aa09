"""open-instruct: its scripts take `AutoModelForCausalLM` from here instead of from Transformers, with `GRAPHALIGN_PATCH` set.

    from graphalign.integrations.open_instruct import AutoModelForCausalLM  # open_instruct/grpo_fast.py, open_instruct/model_utils.py

`grpo_fast.py` builds the model and gives it to DeepSpeed in one method (`PolicyTrainerRayProcess.from_pretrained`): what builds it is the
only place between the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphalign.integrations.hooks import put_on

if TYPE_CHECKING:
    AutoModelForCausalLM: Any

__all__ = ["AutoModelForCausalLM"]


def __getattr__(name: str) -> Any:
    """`AutoModelForCausalLM`, whose `from_pretrained` returns patched models. Made on demand: only it needs Transformers."""
    if name != "AutoModelForCausalLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from graphalign.engines.patched_auto import patched_auto

    made = globals()[name] = patched_auto(put_on, "open-instruct's model", __name__)
    return made
