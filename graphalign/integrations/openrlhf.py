"""OpenRLHF: name `graphalign.integrations.openrlhf.install` as Ray's `worker_process_setup_hook`, with `GRAPHALIGN_PATCH` in `env_vars`.

Every `openrlhf.models.Actor` (policy, reference, moving average; also in the trainers without Ray, where a script calls `install()` first)
is patched when it is built, before `strategy.prepare` hands it to DeepSpeed. ZeRO-3 is refused by name.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from graphalign.integrations.hooks import after, member, put_on, when_imported

MODULE = "openrlhf.models.actor"


def install() -> None:
    """Have OpenRLHF patch every `Actor` that is built in this process from now on. Safe to call twice."""
    when_imported(MODULE, _change)


def _change(module: ModuleType) -> None:
    after(member(module, "Actor", "openrlhf"), "__init__", _patch, "openrlhf")


def _patch(actor: Any, _: None) -> None:
    put_on(actor.model, "OpenRLHF's Actor")
