"""verl: name this module as `external_lib`, with `GRAPHALIGN_PATCH` in the environment of the workers.

    actor_rollout_ref.model.external_lib=graphalign.integrations.verl actor_rollout_ref.actor.strategy=fsdp2

verl imports an `external_lib` when it reads a model's configuration (`verl/workers/config/model.py`), in every worker. Every language
model that verl's FSDP engine builds (the actor, the reference) is patched then, before LoRA and sharding; value models stay as they are.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn

from graphalign.integrations.hooks import after, member, put_on, when_imported

MODULE = "verl.workers.engine.fsdp.transformer_impl"


def install() -> None:
    """Have verl's FSDP engine patch the language models that it builds. Importing this module does it; safe to call twice."""
    when_imported(MODULE, _change)


def _change(module: ModuleType) -> None:
    after(member(module, "FSDPEngine", "verl"), "_build_module", _patch, "verl")


def _patch(engine: Any, model: nn.Module) -> None:
    if getattr(engine.model_config, "model_type", "language_model") == "language_model":
        put_on(model, "verl's reference" if getattr(engine.engine_config, "forward_only", False) else "verl's actor")


install()
