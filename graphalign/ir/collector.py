"""Python's garbage collector, out of the way."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collections meanwhile: walking a capture's many small objects again and again takes longer than making them.

    Only for code that leaves no large reference cycles behind.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
