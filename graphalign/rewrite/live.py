"""Putting the rewriter on live modules and taking it off again; a patch that is not live raises."""

from __future__ import annotations

import logging
import os
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from graphalign.errors import PatchError, PatchNotLiveError
from graphalign.rewrite.edit import ENTRY, Rewritten, rewrite
from graphalign.rewrite.units import UnitEdit

log = logging.getLogger("graphalign")
_RUNNING = threading.local()
RECOMPILE_LIMIT = 256
"""Graphs per patched class: layers of one class differ in attributes that Dynamo specialises on."""
ORIGINAL = "_graphalign_original"
"""Attribute of a patched class: the class it was made from."""


def entry_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Narrow a value that another unit left unrounded; edits that keep it bypass this cast."""
    return x.to(dtype)


class Count(threading.local):
    """Edits executed by the forward that runs now, per thread."""

    ids: list[int]

    def __init__(self) -> None:
        self.ids = []


def patched_class(cls: type[nn.Module], edits: Sequence[UnitEdit], dtype: torch.dtype, autocast: str | None) -> type[nn.Module]:
    """A subclass of `cls` whose forward runs with the edits, or raises.

    Args:
        cls: the module's class.
        edits: the unit's edits.
        dtype: the format in which the stock module receives activations.
        autocast: the autocast dtype of the regime, None for none.
    """
    expected = sorted(e.id for e in edits)
    carried = any(e.consumer is not None and e.producer is None and e.kind == "keep" for e in edits)
    count = Count()
    problems: list[str] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        unit = getattr(_RUNNING, "unit", None)
        if unit is None:
            raise PatchError("a patched layer was compiled outside its own forward")
        try:
            if carried:
                _mark_entry(gm, dtype)
            result: Rewritten = rewrite(gm, unit, edits)
        except Exception as e:
            problems.append(str(e))
            raise
        ids = [e.id for e in result.done]
        forward = gm.forward

        def run(*args: Any) -> Any:
            count.ids += ids
            return forward(*args)

        return run

    def graphalign_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if carried:
            args, kwargs = _narrow(args, kwargs, dtype)
        return cls.forward(self, *args, **kwargs)

    # a code object of its own, so that Dynamo's cache is not shared between patched classes
    own = types.FunctionType(
        graphalign_forward.__code__.replace(co_name=f"graphalign_{cls.__name__}"), graphalign_forward.__globals__, graphalign_forward.__name__,
        graphalign_forward.__defaults__, graphalign_forward.__closure__,
    )  # fmt: skip
    # recompile_limit and isolate_recompiles are in torch 2.13 but not in its stubs
    options: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
    compiled = torch.compile(own, backend=backend, dynamic=True, **options)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_dead(cls, autocast, carried, dtype, args, kwargs)
        outer, count.ids = count.ids, []
        unit, _RUNNING.unit = getattr(_RUNNING, "unit", None), self
        try:
            result = compiled(self, *args, **kwargs)
            executed = sorted(count.ids)
        finally:
            count.ids, _RUNNING.unit = outer, unit
        if executed != expected:
            raise PatchNotLiveError(
                f"{cls.__name__} ran {len(executed)} of the {len(expected)} edits of its patch",
                where=problems[-1] if problems else _missing(edits, executed),
                hint=_cause(problems),
            )
        return result

    body = {
        "forward": torch._dynamo.disable(forward, recursive=False),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        ORIGINAL: cls,
    }
    body["__doc__"] = cls.__doc__
    return type(cls.__name__, (cls,), body)


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | int, torch.Tensor] | None:
    """The layer's input: its first floating tensor argument."""
    for i, a in enumerate(args):
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            return i, a
    for k, a in kwargs.items():
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            return k, a
    return None


def _narrow(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found = _first_tensor(args, kwargs)
    if found is None:
        return args, kwargs
    where, x = found
    narrow = entry_cast(x, dtype)
    if isinstance(where, int):
        return (*args[:where], narrow, *args[where + 1 :]), kwargs
    return args, {**kwargs, where: narrow}


def _mark_entry(gm: torch.fx.GraphModule, dtype: torch.dtype) -> None:
    """Find the entry cast: traced in `entry_cast`, of a placeholder."""
    for node in gm.graph.nodes:
        if node.op == "call_method" and node.target == "to" and "in entry_cast" in str(node.meta.get("stack_trace")):
            node.meta[ENTRY] = True
            return


def _refuse_dead(cls: type, autocast: str | None, carried: bool, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where Dynamo would run the stock forward without a word, before it marks the frame to be skipped for good."""
    from torch._dynamo import eval_frame
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    def fail(what: str, hint: str) -> None:
        raise PatchNotLiveError(f"{cls.__name__} would run without its patch: {what}", hint=hint)

    stance = getattr(getattr(eval_frame, "_stance", None), "stance", "default")
    if stance in ("force_eager", "eager_on_recompile"):
        fail(f"torch.compiler.set_stance({stance!r}) is active", "leave the stance at 'default' while the patched model runs")
    if torch._dynamo.config.disable or os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        fail("torch.compile is disabled", "unset TORCH_COMPILE_DISABLE")
    for mode in _get_current_dispatch_mode_stack():
        ignores = getattr(type(mode), "ignore_compile_internals", None)
        if not (callable(ignores) and ignores()):
            fail(f"a TorchDispatchMode is active ({type(mode).__name__})", "run it outside, or on the unpatched model")
    if carried:
        found = _first_tensor(args, kwargs)
        if found is not None and found[1].dtype == dtype:
            fail(
                f"its input arrives in {str(dtype).removeprefix('torch.')}, the patch passes it unrounded in float32",
                "something between the layers casts it: with FSDP2 set MixedPrecisionPolicy(cast_forward_inputs=False)",
            )
    active = str(torch.get_autocast_dtype("cpu" if not torch.cuda.is_available() else "cuda")).removeprefix("torch.")
    enabled = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if enabled != (autocast is not None):
        fail(
            f"autocast is {'on (' + active + ')' if enabled else 'off'}, the patch is for autocast {autocast or 'off'}",
            "make a patch for this regime",
        )


def _missing(edits: Sequence[UnitEdit], executed: list[int]) -> str:
    left = [e for e in edits if e.id not in executed]
    return "not executed: " + "; ".join(
        f"{e.group} {e.consumer.module}.{e.consumer.op}: {e.consumer.text}" if e.consumer else f"{e.group} (leaves the layer)"
        for e in left[:4]
    )


def _cause(problems: list[str]) -> str:
    from torch._dynamo.utils import counters

    if problems:
        return "the graph that Dynamo traced does not fit the patch; regenerate it with `graphalign find`"
    reasons = [k for kind in ("recompile_limit", "cache_size_limit", "graph_break", "unimplemented") for k in counters.get(kind, {})]
    return "Dynamo skipped the frame: " + (
        "; ".join(map(str, reasons[-3:]))[:400] or "the recompile limit was hit, or compilation failed and errors are suppressed"
    )
