"""What the hooks share: where the patch is, and changing a class of a module that is perhaps not imported yet."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from torch import nn

from graphalign.errors import PatchError
from graphalign.patch.spec import PatchSpec
from graphalign.rewrite.apply import apply

log = logging.getLogger("graphalign")
ENV: Final = "GRAPHALIGN_PATCH"
"""Environment variable: the path of `patch.yaml`, as the stack's workers see it."""
STALE: Final = "GRAPHALIGN_ALLOW_STALE"
"""Environment variable: `1` applies a patch although modeling files differ from those that it was made with."""
_MARK: Final = "_graphalign_hook"


def put_on(model: nn.Module, what: str, patch: PatchSpec | str | Path | None = None) -> None:
    """Apply the patch to a model that a stack has built.

    Args:
        model: the model, not sharded yet.
        what: which model it is, for messages.
        patch: the patch; None for the file that `GRAPHALIGN_PATCH` names.

    Raises:
        PatchError: there is no patch, or it does not fit the model.
    """
    found = patch if patch is not None else os.environ.get(ENV)
    if not found:
        raise PatchError(
            f"no patch for {what}: {ENV} is not set in this process", where=f"process {os.getpid()}",
            hint=f"set {ENV} to the path of patch.yaml for all workers (Ray: runtime_env, env_vars), or remove the hook",
        )  # fmt: skip
    apply(model, found, allow_stale=os.environ.get(STALE) == "1")
    log.info("graphalign: %s is patched with %s", what, "the given patch" if isinstance(found, PatchSpec) else found)


def after(owner: type, method: str, then: Callable[[Any, Any], None], package: str) -> None:
    """Call `then(self, result)` after every call of a method. Does nothing if that was done before.

    Raises:
        PatchError: the class has no such method of its own: another version of the package.
    """
    found = vars(owner).get(method)
    if found is None:
        raise PatchError(
            f"{package} {version(package)} has no {owner.__qualname__}.{method}, which the hook follows",
            where=owner.__module__, hint="call graphalign.apply on the model by hand, between building it and sharding it",
        )  # fmt: skip
    if hasattr(found, _MARK):
        return

    @functools.wraps(found)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = found(self, *args, **kwargs)
        then(self, result)
        return result

    setattr(followed, _MARK, True)
    setattr(owner, method, followed)


def member(module: ModuleType, name: str, package: str) -> Any:
    """A class of a stack's module.

    Raises:
        PatchError: there is none of that name.
    """
    if not hasattr(module, name):
        raise PatchError(
            f"{package} {version(package)} has no {module.__name__}.{name}, which the hook follows",
            hint="call graphalign.apply on the model by hand, between building it and sharding it",
        )
    return getattr(module, name)


def version(package: str) -> str:
    """The installed version of a package, `of unknown version` if it is not installed as one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def when_imported(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call `change(module)` once the module is imported: now if it is, else when somebody imports it."""
    if name in sys.modules:
        change(sys.modules[name])
    elif not any(isinstance(f, _Waiting) and f.name == name for f in sys.meta_path):
        sys.meta_path.insert(0, _Waiting(name, change))


class _Waiting(MetaPathFinder):
    """Finds one module as everybody else does, and has its loader call back."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name, self.change = name, change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Following(spec.loader, self.change)
        return spec


class _Following(Loader):
    def __init__(self, loader: Loader, change: Callable[[ModuleType], None]) -> None:
        self.loader, self.change = loader, change

    def __getattr__(self, name: str) -> Any:  # get_source, is_package, …: what inspect and pickle ask of a loader
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.change(module)
