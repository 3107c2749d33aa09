"""Transformers' own hooks for `output_hidden_states` and `output_attentions`.

The first call that asks for one leaves hooks on modules inside the layers for good (`transformers.utils.output_capturing`, 5.19.0). They do
nothing unless their output is asked for, but they read a context variable, which Dynamo cannot trace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from graphalign.errors import PatchNotLiveError

MODULE = "transformers.utils.output_capturing"


@contextmanager
def without_idle_hooks(unit: nn.Module) -> Iterator[None]:
    """Within the block, the idle ones of these hooks inside a unit are off. Hooks on the unit itself run outside of its graph and stay.

    Raises:
        PatchNotLiveError: one of them is to record something inside the layer now.
    """
    if MODULE not in sys.modules:  # the model is not from Transformers, or from an older one
        yield
        return
    found = [(m, ours) for m in unit.modules() if m is not unit and (ours := [k for k, h in m._forward_hooks.items() if _capturing(h)])]
    if not found:
        yield
        return
    wanted = sys.modules[MODULE]._active_collector.get() or {}
    asked = sorted({key for m, ours in found for k in ours if (key := _key(m._forward_hooks[k])) in wanted})
    if asked:
        raise PatchNotLiveError(
            f"output_{asked[0]} is recorded inside {type(unit).__name__}, whose forward is patched",
            where=f"a hook of {MODULE}",
            hint=f"leave output_{asked[0]} out, or undo the patch for that call; output_hidden_states works",
        )
    saved = [(m, list(m._forward_hooks.items())) for m, _ in found]
    for m, ours in found:
        for k in ours:
            del m._forward_hooks[k]
    try:
        yield
    finally:
        for m, hooks in saved:
            m._forward_hooks.clear()
            m._forward_hooks.update(hooks)


def _capturing(hook: Any) -> bool:
    return getattr(hook, "__module__", "") == MODULE


def _key(hook: Any) -> str:
    """What the hook records, `attentions`: a variable that it closes over."""
    names = hook.__code__.co_freevars
    return str(hook.__closure__[names.index("key")].cell_contents) if "key" in names else ""
