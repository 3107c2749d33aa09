"""The stock modeling file as the generated one starts from it: absolute imports, no hub kernels; and its classes on a live model."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from graphalign.errors import PatchError
from graphalign.ir.frames import is_modeling_file, relative_file

HUB_KERNELS = ("use_kernel_forward_from_hub", "use_kernel_func_from_hub", "use_kernelized_func", "use_kernel_func_from_hub_with_fallback")
"""Decorators of Transformers 5 that may replace what they decorate by a kernel, and the patch with it."""


@dataclass(frozen=True)
class Stock:
    """One modeling file."""

    module: str
    """`transformers.models.qwen3.modeling_qwen3`."""
    file: str
    """Relative to its package's root."""
    text: str
    """With absolute imports and without hub-kernel decorators."""
    raw: bytes
    dropped: tuple[str, ...]
    """Decorators that are left out."""

    def line(self, number: int) -> str:
        """A line of `text`, without the white space around it; lines count from 1."""
        return self.text.split("\n")[number - 1].strip()


def read_stock(model: nn.Module) -> Stock:
    """The file that defines a model's class.

    Raises:
        PatchError: the model's class has no file, or instances in it run another forward than their class (Liger).
    """
    cls = type(model)
    path = inspect.getsourcefile(cls)
    if path is None or not is_modeling_file(path):
        raise PatchError(f"{cls.__name__} has no modeling file", where=str(path), hint="give a model that Transformers builds")
    for name, m in model.named_modules():
        if "forward" in vars(m):
            raise PatchError(
                f"{name or cls.__name__} runs a forward of its own instead of its class's", where=type(m).__name__,
                hint="build the model without it (Liger, an instance-level patch), then generate the source",
            )  # fmt: skip
    raw = Path(path).read_bytes()
    text, dropped = _without_hub_kernels(_absolute(raw.decode(), cls.__module__.rpartition(".")[0]))
    return Stock(cls.__module__, relative_file(path), text, raw, dropped)


def swap_classes(model: nn.Module, old: str, new: dict[str, object]) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Give every module whose class is from the module `old` the class of the same name in `new`; returns what to undo."""
    done: list[tuple[nn.Module, type[nn.Module]]] = []
    for m in model.modules():
        cls = type(m)
        found = new.get(cls.__name__)
        if cls.__module__ == old and isinstance(found, type):
            done.append((m, cls))
            m.__class__ = found
    return done


def restore(swapped: list[tuple[nn.Module, type[nn.Module]]]) -> None:
    """Undo `swap_classes`."""
    for m, cls in swapped:
        m.__class__ = cls


def load_module(name: str, file: str, code: object, names: dict[str, object] | None = None) -> dict[str, object]:
    """Run compiled module code under a name of its own; returns the module's globals."""
    import types

    module = types.ModuleType(name)
    module.__file__ = file
    module.__dict__.update(names or {})
    sys.modules[name] = module  # Transformers looks a class's module up while the class is made
    exec(code, module.__dict__)  # type: ignore[arg-type]  # the model's own code, which this process runs anyway
    return module.__dict__


def _absolute(text: str, package: str) -> str:
    """Relative imports made absolute; `package` is that of the file."""

    def replace(m: re.Match[str]) -> str:
        parts = package.split(".")
        base = parts[: len(parts) - len(m[1]) + 1]
        return f"from {'.'.join([*base, *([m[2]] if m[2] else [])])} import"

    return re.sub(r"^from (\.+)([\w.]*) import", replace, text, flags=re.MULTILINE)


def _without_hub_kernels(text: str) -> tuple[str, tuple[str, ...]]:
    lines = text.split("\n")
    gone: set[int] = set()
    dropped = []
    replaced: dict[int, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            for d in node.decorator_list:
                called = d.func if isinstance(d, ast.Call) else d
                if isinstance(called, ast.Name) and called.id in HUB_KERNELS:
                    dropped.append(f"{ast.unparse(d)} of {node.name}")
                    gone.update(range(d.lineno, (d.end_lineno or d.lineno) + 1))
        elif isinstance(node, ast.ImportFrom) and any(a.name in HUB_KERNELS for a in node.names):
            kept = [a.name + (f" as {a.asname}" if a.asname else "") for a in node.names if a.name not in HUB_KERNELS]
            gone.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            if kept:
                replaced[node.lineno] = f"from {node.module} import {', '.join(kept)}"
    out = []
    for number, line in enumerate(lines, 1):
        if number in replaced:
            out.append(replaced[number])
        elif number not in gone:
            out.append(line)
    return "\n".join(out), tuple(dropped)
