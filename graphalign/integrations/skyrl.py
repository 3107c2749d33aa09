"""SkyRL: name `graphalign.integrations.skyrl.install` as Ray's `worker_process_setup_hook`, with `GRAPHALIGN_PATCH` in `env_vars`.

Every `HFModelWrapper` (policy, reference) is patched when it is built, before `strategy.prepare` shards it; critics stay as they are.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from graphalign.integrations.hooks import after, member, put_on, when_imported

MODULE = "skyrl.backends.skyrl_train.workers.model_wrapper"


def install() -> None:
    """Have SkyRL patch every `HFModelWrapper` that is built in this process from now on. Safe to call twice."""
    when_imported(MODULE, _change)


def _change(module: ModuleType) -> None:
    after(member(module, "HFModelWrapper", "skyrl"), "__init__", _patch, "skyrl")


def _patch(wrapper: Any, _: None) -> None:
    put_on(wrapper.model, "SkyRL's HFModelWrapper")
