"""One difference between two snapshots, as it is written down."""

from __future__ import annotations

from typing import Literal

from graphalign.patch.spec import Frozen


class Item(Frozen):
    """One thing that moved, or that is worth saying."""

    topic: Literal["site", "evidence", "finding", "op", "edge", "kernel", "setting", "parameter", "note"]
    change: Literal["appeared", "vanished", "changed"]
    what: str
    old: str = ""
    new: str = ""
    layers: str = ""

    @property
    def moved(self) -> bool:
        """False for what is said without being drift."""
        return self.topic != "note"
