"""graphalign: make an RL trainer round where its inference engine rounds."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = ["GapDriftWarning", "GapInputError", "GapMonitor", "Outcome", "Patched", "Result", "apply", "find", "load_graph", "undo"]

if TYPE_CHECKING:
    from graphalign.errors import GapInputError
    from graphalign.monitor import GapDriftWarning, GapMonitor
    from graphalign.pipeline.find import Outcome, Result, find
    from graphalign.pipeline.load import load_graph
    from graphalign.rewrite.apply import Patched, apply, undo

_HOME = {
    "GapDriftWarning": "monitor",
    "GapInputError": "errors",
    "GapMonitor": "monitor",
    "Outcome": "pipeline.find",
    "Patched": "rewrite.apply",
    "Result": "pipeline.find",
    "apply": "rewrite.apply",
    "find": "pipeline.find",
    "load_graph": "pipeline.load",
    "undo": "rewrite.apply",
}
"""Modules by what they export; each is imported when it is asked for, because most of them load torch."""


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"graphalign.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
