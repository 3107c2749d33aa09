"""graphalign: make an RL trainer round where its inference engine rounds."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["GapDriftWarning", "GapMonitor", "Patched", "apply", "undo"]

if TYPE_CHECKING:
    from graphalign.monitor import GapDriftWarning, GapMonitor
    from graphalign.rewrite.apply import Patched, apply, undo

_HOME = {
    "GapDriftWarning": "graphalign.monitor",
    "GapMonitor": "graphalign.monitor",
    "Patched": "graphalign.rewrite.apply",
    "apply": "graphalign.rewrite.apply",
    "undo": "graphalign.rewrite.apply",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:  # torch is imported only by those who patch or monitor
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
