"""Where Dynamo would run the stock forward without a word: refused before it happens, or named after it did."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, NoReturn

import torch
from torch import nn
from torch._dynamo import eval_frame
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphalign.errors import PatchNotLiveError
from graphalign.rewrite import like_cuda
from graphalign.rewrite.checkpointing import checkpointed_inside
from graphalign.rewrite.unfit import unfit
from graphalign.rewrite.units import UnitEdit
from graphalign.rewrite.wrapped import with_dora

_DEAD_STANCES = frozenset({"force_eager", "eager_on_recompile", "eager_then_compile", "aot_eager_then_compile"})


def refuse_dead(cls: type, autocast: str | None, device: str, cuda: bool = False) -> bool:
    """Raise where Dynamo would skip a frame: it marks some of them (a dispatch mode) as skipped for good.

    Seen on torch 2.13. Called on every forward of a patched module, so everything here is a few attribute reads.

    Args:
        cls: the stock class, for the message.
        autocast: the regime's autocast dtype, None for none.
        device: device type of the module's input.
        cuda: whether the regime's autocast is CUDA's.

    Returns:
        Whether autocast is on although the regime is without: then the graph must tell if that changes anything.
    """
    stance = eval_frame._stance
    if stance.stance != "default" or stance.backend is not None:
        if stance.stance in _DEAD_STANCES or stance.backend is not None:
            _fail(
                cls,
                f"torch.compiler.set_stance({stance.stance!r}{', force_backend=…' if stance.backend is not None else ''}) is active",
                "leave the stance at 'default' while the patched model runs",
            )
    if torch._dynamo.config.disable:
        _fail(cls, "torch.compile is disabled", "unset TORCH_COMPILE_DISABLE, or set torch._dynamo.config.disable = False")
    if torch._C._len_torch_dispatch_stack():
        for mode in _get_current_dispatch_mode_stack():
            if not type(mode).ignore_compile_internals():
                _fail(
                    cls,
                    f"a TorchDispatchMode is active ({type(mode).__name__})",
                    "run it outside the mode, or count on the unpatched model",
                )
    enabled = torch.is_autocast_enabled(device)
    if cuda and device == "cpu" and not like_cuda.active():
        _fail(
            cls,
            "the model runs on a CPU, the patch is for CUDA's autocast, which computes other ops in FP32",
            "move the model to the GPU, or make a patch for the CPU: `graphalign find` without --target",
        )
    if autocast is not None:
        active = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if enabled else None
        if active != autocast:
            here, wanted = (f"on ({x})" if x else "off" for x in (active, autocast))
            _fail(
                cls,
                f"autocast is {here}, the patch is for autocast {wanted}",
                "make a patch for this regime: `graphalign find` with the autocast that training uses",
            )
    return enabled and autocast is None


Regime = tuple[tuple[tuple[str, ...], str, Any], ...]
"""(path of a module inside the unit, setting of its config or name of its parameter, value or dtype)."""
_SETTINGS = {"_attn_implementation": "attention implementation", "_experts_implementation": "experts implementation"}


def regime_of(unit: nn.Module) -> Regime:
    """What decides which kernels a unit runs and in which formats, as it is now: settings of its configs, dtypes of its parameters."""
    found: list[tuple[tuple[str, ...], str, Any]] = []
    seen: set[int] = set()
    for path, m in unit.named_modules():
        at = tuple(path.split(".")) if path else ()
        config = getattr(m, "config", None)
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            found += [(at, key, getattr(config, key)) for key in _SETTINGS if hasattr(config, key)]
        found += [(at, name, p.dtype) for name, p in m._parameters.items() if p is not None and p.is_floating_point()]
    return tuple(found)


def refuse_changed(cls: type, unit: nn.Module, regime: Regime, masters: bool = False) -> None:
    """Raise if a setting or a dtype is another than when the patch was applied. Called on every forward: attribute reads only.

    Args:
        cls, unit: the stock class, the module.
        regime: as it must be, see `regime_of`.
        masters: the weights are FP32 outside of a forward, and FSDP2 must have cast them.
    """
    for path, name, wanted in regime:
        m: Any = unit
        for part in path:
            m = m._modules.get(part) if m is not None else None
        if m is None:
            continue  # replaced since, by an adapter: the edits that ran are counted
        if name in _SETTINGS:
            found = getattr(getattr(m, "config", None), name, wanted)
            if found != wanted:
                _fail(cls, f"its {_SETTINGS[name]} is {found} now, and was {wanted} when the patch was applied", _CHANGED)
        elif (p := m._parameters.get(name)) is not None and p.dtype != wanted:
            now, was = (str(d).removeprefix("torch.") for d in (p.dtype, wanted))
            if masters:
                _fail(
                    cls, f"{'.'.join((*path, name))} is {now} in the forward, the patch is for {was}",
                    f"call fully_shard(…, mp_policy=MixedPrecisionPolicy(param_dtype=torch.{was})) on the layers before the first forward; "
                    f"without FSDP2 load the model in {was}, or make a patch for {now} weights (`graphalign find --dtype {now}`)",
                )  # fmt: skip
            _fail(cls, f"{'.'.join((*path, name))} is {now} now, and was {was} when the patch was applied", _CHANGED)


_CHANGED = "set it back, or undo the patch and make one for this regime with `graphalign find`"


def refuse_rounded_input(cls: type, x: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Raise if a value that the layer before left unrounded arrives rounded."""
    if x is not None and x.dtype == dtype:
        _fail(
            cls,
            f"its input arrives in {str(dtype).removeprefix('torch.')}, the patch passes it unrounded in float32",
            "something between the layers casts it: a hook, a wrapper (with FSDP1 MixedPrecision(cast_forward_inputs=False)); "
            "or the layer before was replaced or undone",
        )


def refuse_lost(cls: type, lost: Set[str]) -> None:
    """Raise if a value arrives without the unrounded one that should travel beside it.

    Args:
        cls: the stock class, for the message.
        lost: sources that were not found among the arguments.
    """
    if lost:
        _fail(
            cls,
            f"what {sorted(lost)[0].split(': ')[0]} computes arrives without its unrounded form",
            "something between the two copies or changes the tensor (another device, an edit of its elements), or passes one of its own; "
            "or that module was replaced or undone; or FSDP2 shards the embedding by itself with output_dtype=float32, so that it gets "
            "another format: shard the embedding without output_dtype",
        )


def not_executed(
    cls: type, unit: nn.Module, edits: Sequence[UnitEdit], executed: Sequence[int], problems: Sequence[Exception], near: Mapping[int, str],
    *, traced: bool, compiled: bool, breaks: Sequence[str] = (),
) -> NoReturn:  # fmt: skip
    """Raise for a forward that ran without some of its edits.

    Args:
        cls, unit: the stock class, the module.
        edits, executed: of the patch; ids of those that ran.
        problems: what the rewriter raised.
        near: by id of a missing edit, the ops that come nearest.
        traced: whether a graph from Dynamo ran at all.
        compiled: whether torch.compile did anything when the patch was applied.
        breaks: where Dynamo broke the graph of such a module, see `graph_breaks`.
    """
    what = f"{cls.__name__} ran {len(executed)} of the {len(edits)} edits of its patch"
    left = [e for e in edits if e.id not in executed]
    if (found := unfit(unit, whole=True)) is not None:
        raise PatchNotLiveError(f"{what}, under {found[0]}", where="not executed: " + "; ".join(map(_show, left[:2])), hint=found[1])
    if problems and not breaks:
        raise PatchNotLiveError(what, where=str(problems[-1]), hint="regenerate the patch with `graphalign find`")
    where = "not executed: " + "; ".join(map(_show, left[:4])) + (f"; and {len(left) - 4} more" if len(left) > 4 else "")
    if dora := with_dora(unit.named_modules()):
        raise PatchNotLiveError(
            what, where=f"{where}\nDoRA adapters, whose weight norms break the graph: on {', '.join(dora[:4])}",
            hint="train with LoRA (use_dora=False), or merge the adapter before the patch is applied",
        )  # fmt: skip
    hooked = [n for n, m in unit.named_modules() if m is not unit and (m._forward_hooks or m._forward_pre_hooks)]
    if traced and hooked:
        raise PatchNotLiveError(
            what, where=f"{where}\nhooks that may have broken the graph: on {', '.join(hooked[:4])}",
            hint="remove the forward hooks inside the layer (hooks on the layer itself are fine)",
        )  # fmt: skip
    if nested := [n for n, _ in checkpointed_inside(unit)]:
        raise PatchNotLiveError(
            what, where=f"{where}\ngradient checkpointing of modules inside it, which breaks the graph: {', '.join(nested[:4])}",
            hint=f"checkpoint the {cls.__name__} as a whole, and not what it holds (set their gradient_checkpointing to False)",
        )  # fmt: skip
    if traced and breaks:
        raise PatchNotLiveError(
            what, where=f"{where}\nDynamo cannot trace what the module runs now: {'; '.join(breaks[-3:])}",
            hint="the part behind that place ran as it stands: replace that code by some that does not decide by numbers, or make it an "
            "attention function that is registered with Transformers (AttentionInterface.register), which is not looked into",
        )  # fmt: skip
    nearest = next((near[e.id] for e in left if near.get(e.id)), "") if traced else ""
    raise PatchNotLiveError(what, where=where + (f"\nnearest: {nearest}" if nearest else ""), hint=_cause(compiled, traced))


def graph_breaks() -> Counter[str]:
    """Why and where Dynamo broke graphs in this process, with counts."""
    from torch._dynamo.utils import counters

    return Counter({_reason(str(text)): n for text, n in counters["graph_break"].items()})


def _reason(text: str) -> str:
    """The first line of Dynamo's account, its explanation and the user's line, where it tells (torch 2.13)."""
    first = text.strip().splitlines()[0] if text.strip() else "a graph break"
    said, at = re.search(r"Explanation: (.*)", text), re.search(r'File "([^"]+)", line (\d+), in (\S+), code: (.*)', text)
    place = f" ({at[1].rpartition('/')[2]}:{at[2]} in {at[3]}: {at[4].strip()})" if at else f" ({said[1].strip()[:160]})" if said else ""
    return first + place


def _show(e: UnitEdit) -> str:
    key = e.consumer or e.producer
    assert key is not None
    return f"{e.group}: {key.module or 'the layer'}.{key.op}#{key.ordinal}: {key.text}" + ("" if e.consumer else " (leaves the layer)")


def _fail(cls: type, what: str, hint: str) -> NoReturn:
    raise PatchNotLiveError(f"{cls.__name__} would run without its patch: {what}", hint=hint)


def _cause(compiled: bool, traced: bool) -> str:
    if not compiled or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile was disabled when the patch was applied: unset TORCHDYNAMO_DISABLE and apply it again"
    if traced:
        return (
            "the module no longer runs the code that the patch is for: a submodule, method or kernel was replaced after the patch "
            "was made, or its parameters have another dtype now; undo that, or regenerate the patch with `graphalign find`"
        )
    from torch._dynamo.utils import counters

    reasons: list[Any] = [
        k for kind, found in counters.items() if kind in ("unimplemented", "graph_break", "frames_skipped") for k in found
    ]
    if torch._dynamo.config.suppress_errors:
        return "Dynamo ran the stock forward: torch._dynamo.config.suppress_errors hides a failed compilation; set it to False"
    return (
        "Dynamo skipped the frame: the recompile limit was hit, or it was marked to be skipped"
        + (f" ({'; '.join(map(str, reasons[-3:]))[:300]})" if reasons else "")
        + "; apply the patch again after torch._dynamo.reset()"
    )
