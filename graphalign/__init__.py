"""graphalign: make an RL trainer round where its inference engine rounds."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Patched", "apply"]

if TYPE_CHECKING:
    from graphalign.rewrite.apply import Patched, apply


def __getattr__(name: str) -> Any:
    if name in __all__:  # torch is imported only by those who patch
        from graphalign.rewrite import apply as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
