"""What is wrapped around or inside a patched module and cannot work with it: sharding before the patch, DoRA, pickling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import nn

from graphalign.errors import PatchError

FULLGRAPH = (
    "graphalign patched this module, whose ops run one by one so that they round where the patch says; "
    "compile the model without fullgraph=True (the graph breaks at every patched module)"
)
"""Reason that an outer `torch.compile(fullgraph=True)` gives when it fails at a patched module."""


def with_dora(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Names of modules that hold DoRA adapters (peft 0.21: a `lora_magnitude_vector` that is not empty)."""
    return [n for n, m in modules if len(getattr(m, "lora_magnitude_vector", ())) > 0]


class _Class:
    """Stands for a patched class where a module is copied; pickling it raises, because a patched class exists in this process only."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __deepcopy__(self, memo: Any) -> _Class:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PatchError(
            f"a patched {self.cls.__name__} cannot be pickled", where="torch.save or pickle of the model itself",
            hint="save model.state_dict() (or save_pretrained), which the patch leaves as they are; "
            "or undo() the patch, save, and apply it again; in another process apply the spec there",
        )  # fmt: skip


def _make(made: _Class) -> Any:
    cls: Any = made.cls
    return cls.__new__(cls)


def reduce_ex(cls: Any) -> Callable[[Any, Any], Any]:
    """`__reduce_ex__` of a patched class made from `cls`: copies as ever, pickles not."""

    def reduce(self: Any, protocol: Any) -> Any:
        found: Any = cls.__reduce_ex__(self, protocol)
        if isinstance(found, tuple) and getattr(found[0], "__name__", "") == "__newobj__" and found[1] == (type(self),):
            return (_make, (_Class(type(self)),), *found[2:])
        return found

    return reduce
