"""`graphalign.apply`: a patch spec on a live model."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from graphalign.errors import PatchError, PatchNotLiveError
from graphalign.ir.config import config_digest
from graphalign.ir.frames import file_digest, is_modeling_file, relative_file
from graphalign.patch.spec import Key, PatchSpec, load
from graphalign.rewrite.alive import Regime, regime_of
from graphalign.rewrite.formats import moved
from graphalign.rewrite.like_cuda import emulated
from graphalign.rewrite.live import ORIGINAL, patched_class, root_class
from graphalign.rewrite.sharded import release, sharded_over, stock_class
from graphalign.rewrite.trial import run_trial
from graphalign.rewrite.unfit import refuse_replaced, refuse_unfit
from graphalign.rewrite.units import UnitEdit, edits_by_unit, find_units

log = logging.getLogger("graphalign")


class Patched:
    """A model with a patch on it. A context manager: the patch comes off at the end."""

    def __init__(self, model: nn.Module, spec: PatchSpec, swapped: list[tuple[nn.Module, type[nn.Module], type[nn.Module]]]) -> None:
        self.model, self.spec = model, spec
        self._swapped = swapped

    def undo(self) -> None:
        """Put the stock classes back. Safe to call twice.

        Raises:
            PatchError: a module's class was changed by somebody else since (FSDP2's `fully_shard` does that).
        """
        for module, _, new in self._swapped:
            if type(module) is not new:
                raise PatchError(
                    f"{type(module).__name__} is no longer the class that the patch put there", hint="undo what was wrapped around it first"
                )
        for module, old, _ in self._swapped:
            module.__class__ = old
            release(module)
        self._swapped = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()


def apply(
    model: nn.Module, spec: PatchSpec | str | Path, *, allow_stale: bool = False, trial: bool = True, masters: bool | None = None
) -> Patched:
    """Make the training model round where inference rounds.

    Parameters, state dict, hooks and module identities stay as they are: only the classes of the layers change.
    Apply it before or after `fully_shard` (FSDP2), and before `torch.compile`.

    Args:
        model: any module that contains the layers (a wrapped or adapted model, a bare backbone).
        spec: the patch, or the path of its file.
        allow_stale: apply although modeling files, the config or the attention implementation differ from those the spec was made
            with. Edits still must match.
        trial: run two tokens through the layers now, without gradients, stock and patched, so that an edit that matches no op, or one
            that changes the format in which a GEMM or an attention kernel reads an operand, is refused here with nothing changed.
            Without it, or for a model that does not take `input_ids`, or one that is sharded or that has FP32 master weights, its first
            forward raises.
        masters: the weights are FP32 master weights, which FSDP2 casts to the patch's dtype for every forward
            (`MixedPrecisionPolicy(param_dtype=…)`). None: where the model is sharded already, or torch.distributed is initialised; a
            forward in which they are not cast raises.

    Returns:
        A handle with `undo()`, also a context manager.

    Raises:
        PatchError: the spec does not fit this model; nothing was changed.
        BadInputError: the file is not a patch spec.
    """
    if not isinstance(spec, PatchSpec):
        spec = load(spec)
    edits = edits_by_unit(spec)
    if not edits:
        log.info("graphalign: the patch has no edits; the model stays as it is")
        return Patched(model, spec, [])
    units = find_units(model, list(edits))
    _refuse_overlap(units)
    _refuse_compiled(units)
    sharded = sharded_over(model, units)
    refuse_unfit(units, sharded)
    _refuse_stale(model, units, spec, allow_stale)
    allowed = masters if masters is not None else sharded or _distributed()
    regimes = {name: _check_regime(name, unit, spec, allowed) for name, unit in units.items()}
    masters = any(cast for _, cast in regimes.values())
    if masters or sharded:
        log.info("graphalign: %s; the patch is checked by the first forward", "sharded already" if sharded else "FP32 master weights")
    edits = {name: _as_traced(units[name], found) for name, found in edits.items()}
    for name, unit in units.items():
        for edit in edits[name]:
            _check_edit(name, unit, edit)
    classes: dict[tuple[Any, ...], type[nn.Module]] = {}
    swapped = []
    autocast = spec.regime.get("autocast")
    for name, unit in units.items():
        cls = type(unit)
        dtype, cast = regimes[name]
        regime = _cast(regime_of(unit), spec) if cast else regime_of(unit)
        edit_keys = tuple((e.group, e.kind, e.format, e.consumer, e.operand, e.producer, e.source) for e in edits[name])
        key = (cls, dtype, regime, edit_keys, cast)
        if key not in classes:
            classes[key] = patched_class(cls, edits[name], dtype, autocast, regime, cast, emulated(spec.regime, "cpu"))
        swapped.append((unit, cls, classes[key]))
    name, root = _root(model, list(units.values()))
    if root is not None and root not in units.values():
        inside = [n for n, m in root.named_modules() if any(m is u for u in units.values())]
        swapped.append((root, type(root), root_class(type(root), len(units), inside)))
    trial = trial and not (sharded or masters)
    stock = run_trial(root, spec.regime) if trial and root is not None else None
    for module, _, new in swapped:
        module.__class__ = new
    handle = Patched(model, spec, swapped)
    if trial and root is not None:
        try:
            found = run_trial(root, spec.regime)
        except (PatchError, PatchNotLiveError) as e:
            handle.undo()
            raise PatchError(f"the patch was not applied: {e.what}", where=e.where, hint=e.hint) from None
        if stock is not None and found is not None and (differ := moved(stock, found)):
            handle.undo()
            raise PatchError(
                "the patch was not applied: GEMMs or attention kernels would read other formats than in the stock model", where=differ,
                hint="this is a fault of the patch or of graphalign, not of the model: report it with the patch",
            )  # fmt: skip
    for group, n in sorted(Counter(e.group for es in edits.values() for e in es if e.consumer is not None).items()):
        log.info("graphalign: %s: %d edges patched", group, n)
    if spec.simulated:
        log.warning("graphalign: this patch comes from a simulated target; it has not been compared with a real device")
    return handle


def undo(model: nn.Module) -> int:
    """Take patches off a model, also off a copy of a patched one (`copy.deepcopy`, for a reference model), which no handle knows.

    Returns:
        Number of modules that were patched.

    Raises:
        PatchError: a module was wrapped since, as in `Patched.undo`; nothing was changed.
    """
    patched = [m for m in model.modules() if hasattr(type(m), ORIGINAL)]
    for m in patched:
        if ORIGINAL not in vars(type(m)):
            raise PatchError(
                f"{type(m).__name__} is no longer the class that the patch put there", hint="undo what was wrapped around it first"
            )
    for m in patched:
        m.__class__ = getattr(type(m), ORIGINAL)
        release(m)
    return len(patched)


def _root(model: nn.Module, units: list[nn.Module]) -> tuple[str, nn.Module | None]:
    """The innermost module around all units that has a forward (not a ModuleList): it can tell when one of them did not run."""
    found: tuple[str, nn.Module | None] = "", None
    wanted = {id(u) for u in units}
    for name, m in model.named_modules():
        if wanted <= {id(x) for x in m.modules()} and getattr(type(m).forward, "__name__", "") != "_forward_unimplemented":
            found = name, m
    return found


def _refuse_overlap(units: dict[str, nn.Module]) -> None:
    for name, unit in units.items():
        if hasattr(type(unit), ORIGINAL):
            raise PatchError(
                f"{name} is patched already", where=type(unit).__name__, hint="undo the first patch; make one patch with all groups"
            )
    seen: dict[int, str] = {}
    for name, unit in units.items():
        if id(unit) in seen:
            raise PatchError(f"{name} and {seen[id(unit)]} are one module; their edits would overlap")
        seen[id(unit)] = name
        for other, inner in units.items():
            if other != name and any(m is inner for m in unit.modules()):
                raise PatchError(f"{other} lies inside {name}; their edits would overlap")


def _refuse_compiled(units: dict[str, nn.Module]) -> None:
    """Layers that `module.compile()` compiled in place; an outer `torch.compile` is fine, its graph breaks at every patched module."""
    for name, unit in units.items():
        for inner, m in unit.named_modules():
            if getattr(m, "_compiled_call_impl", None) is not None:
                raise PatchError(
                    f"{f'{name}.{inner}'.rstrip('.')} is compiled already",
                    where="its compile() was called",
                    hint="apply the patch before compile(), and compile the whole model: patched layers run op by op, so roundings stay",
                )


def _refuse_stale(model: nn.Module, units: dict[str, nn.Module], spec: PatchSpec, allow: bool) -> None:
    """Modeling files that differ from those the spec was made with."""
    files = {path: relative_file(path) for u in units.values() for m in u.modules() if (path := _file(type(m)))}
    differ = []
    for path, name in files.items():
        if name in spec.sources and (found := file_digest(path)) and found != spec.sources[name]:
            differ.append(name)
    used = {e.file for g in spec.groups for edit in g.edits for e in (edit.producer, edit.consumer) if e.file}
    absent = sorted(f for f in used if f.startswith("transformers/models") and f not in files.values())
    problems = []
    if absent:
        problems.append(
            f"the patch is for code in {', '.join(absent)}; this model's layers are from {', '.join(sorted(set(files.values()))[:3])}"
        )
    if differ:
        problems.append(
            f"{', '.join(sorted(differ))}: not the code that the patch was made with "
            f"(transformers {spec.versions.get('transformers', '?')})"
        )
    problems += _other_model(model, spec)
    if not problems:
        return
    if absent or not allow:
        raise PatchError(
            "the patch is stale",
            where="\n".join(problems),
            hint="regenerate it with `graphalign find`" + ("" if absent else ", or pass allow_stale=True (--allow-stale)"),
        )
    for p in problems:
        log.warning("graphalign: stale patch applied: %s", p)


def _other_model(model: nn.Module, spec: PatchSpec) -> list[str]:
    """How the model's config differs from the one that the spec was made with, as far as the spec tells."""
    config: Any = next((c for m in model.modules() if (c := getattr(m, "config", None)) is not None), None)
    if config is None:
        return []
    problems = []
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, wanted = getattr(text, "num_hidden_layers", None), spec.model.get("layers")
    if layers is not None and wanted not in (None, layers):
        problems.append(f"the model has {layers} layers, the patch is for {wanted}")
    digest = spec.model.get("config_digest")
    if digest and digest != config_digest(config):
        problems.append("the model's config is not the one that the patch was made with")
    attention, wanted = getattr(config, "_attn_implementation", None), spec.regime.get("attention")
    if attention and wanted and attention != wanted:
        problems.append(f"the model runs {attention} attention, the patch is for {wanted}")
    return problems


def _check_regime(name: str, unit: nn.Module, spec: PatchSpec, masters: bool) -> tuple[torch.dtype, bool]:
    """The unit's parameter dtype must be the regime's, or FP32 where FSDP2 casts it to that.

    Returns:
        The dtype of its activations, and whether its weights are FP32 masters.
    """
    wanted = str(spec.regime.get("param_dtype") or "bfloat16")
    found = {str(p.dtype).removeprefix("torch.") for p in unit.parameters() if p.is_floating_point()}
    cast = masters and "," not in wanted and wanted != "float32" and "float32" in found
    if found and not cast and wanted not in found and "," not in wanted:
        hint = "make a patch for this regime, or load the model in that dtype"
        if found == {"float32"}:
            hint += "; where FSDP2 is to cast FP32 master weights (param_dtype), pass masters=True"
        raise PatchError(f"{name} has {', '.join(sorted(found))} parameters; the patch is for {wanted} ones", hint=hint)
    formats = {e.format for g in spec.groups for e in g.edits}
    return getattr(torch, next(iter(sorted(formats)), "bfloat16")), cast


def _cast(regime: Regime, spec: PatchSpec) -> Regime:
    """A unit's regime as it is in a forward, where FSDP2 has cast its FP32 weights."""
    wanted = getattr(torch, str(spec.regime.get("param_dtype") or "bfloat16"))
    return tuple((path, name, wanted if value is torch.float32 else value) for path, name, value in regime)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _check_edit(name: str, unit: nn.Module, edit: UnitEdit) -> None:
    """The modules an edit names exist, and still run the function it names."""
    for key in (edit.consumer, edit.producer):
        if key is None or key.op in ("parameter", "table"):
            continue
        try:
            module = unit.get_submodule(key.module) if key.module else unit
        except AttributeError:
            near = [n for n, _ in unit.named_modules() if n.split(".")[-1] == key.module.split(".")[-1]] or [
                n for n, _ in unit.named_children()
            ]
            raise PatchError(
                f"{name} has no module {key.module}", where=f"needed for {key.text}", hint=f"nearest: {', '.join(near[:4])}"
            ) from None
        owner, _, method = key.function.rpartition(".")
        if not owner:
            continue
        around = [module]
        if not is_modeling_file(_file(type(module))):  # torch's own, `nn.LayerNorm`: its ops are placed in the function that calls it
            parts = key.module.split(".")
            around += [unit.get_submodule(".".join(parts[:n])) for n in range(len(parts) - 1, -1, -1)]
        owning = next((m for m in around if any(c.__qualname__ == owner for c in type(m).__mro__)), None)
        if owning is None:
            raise PatchError(
                f"{name}.{key.module} is a {type(module).__name__}, the patch is for {owner}", where=f"needed for {key.text}",
                hint="another implementation of this module was swapped in (a kernel, Liger, an adapter); make a patch for this model",
            )  # fmt: skip
        if method == "forward":
            refuse_replaced(f"{name}.{key.module}".rstrip("."), owning, key.text)
        actual = inspect.unwrap(getattr(type(owning), method, None) or (lambda: None))
        if getattr(actual, "__qualname__", key.function) != key.function and not key.function.startswith(
            getattr(actual, "__qualname__", "")
        ):
            raise PatchError(
                f"{type(owning).__name__}.{method} is {actual.__qualname__} here, the patch is for {key.function}",
                where=f"{name}.{key.module}",
            )


def _as_traced(unit: nn.Module, edits: tuple[UnitEdit, ...]) -> tuple[UnitEdit, ...]:
    """Edits as a trace of the unit alone names them: a unit of torch's own (a final `nn.LayerNorm`) has no modeling function in it."""
    if is_modeling_file(_file(type(unit))):
        return edits

    def inside(key: Key | None) -> Key | None:
        return key.model_copy(update={"function": ""}) if key is not None and not key.module else key

    return tuple(replace(e, consumer=inside(e.consumer), producer=inside(e.producer)) for e in edits)


def _file(cls: type) -> str:
    import sys

    return getattr(sys.modules.get(stock_class(cls).__module__), "__file__", None) or ""
