"""Where edits go: the modules that are rewritten (layers, and modules outside layers), found under any wrapper."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import nn

from graphalign.errors import PatchError
from graphalign.ir.paths import layer_of, unit_of
from graphalign.patch.spec import Key, PatchSpec

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names that wrappers put into module paths (torch.compile, checkpoint wrapper, FSDP1)."""


@dataclass(frozen=True, slots=True)
class UnitEdit:
    """One edit, relative to the module that is rewritten."""

    id: int
    """Index of the edge in the spec, for counting."""
    group: str
    kind: str
    format: str
    consumer: Key | None
    """With `module` relative to the unit; None: the value leaves the unit unrounded for a consumer in another unit."""
    operand: int
    producer: Key | None
    """None: the value enters the unit from another one."""
    source: str = ""
    """Of a value that crosses units beside its rounded form (`rewrite.beside`), because its producer is outside the layers: names it."""


def concrete(module: str, layer: int | None) -> str:
    """A module pattern with its layer number filled in."""
    return module.replace("*", str(layer), 1) if layer is not None else module


def strip(name: str) -> str:
    """A module path without wrappers' parts."""
    return ".".join(p for p in name.split(".") if p not in WRAPPERS)


def edits_by_unit(spec: PatchSpec) -> dict[str, tuple[UnitEdit, ...]]:
    """All edits of a spec, by unit; an edge between two units gives each of them its half.

    Raises:
        PatchError: two edits claim one operand.
    """
    out: dict[str, list[UnitEdit]] = defaultdict(list)
    exits: set[tuple[str, Key]] = set()
    number = 0
    for group in spec.groups:
        for edit in group.edits:
            for c, p in edit.pairs():
                consumer, producer = concrete(edit.consumer.module, c), concrete(edit.producer.module, p)
                uc, up = unit_of(consumer), unit_of(producer)
                ck = _relative(edit.consumer, consumer, uc)
                pk = _relative(edit.producer, producer, up)
                crosses = uc != up and edit.producer.op not in ("parameter", "table")
                carried = crosses and edit.kind == "keep"
                source = f"{up}: {pk.module}.{pk.op}#{pk.ordinal}" if carried and layer_of(up) is None else ""
                out[uc].append(UnitEdit(number, group.name, edit.kind, edit.format, ck, edit.operand, None if crosses else pk, source))
                if carried and (up, pk) not in exits:
                    exits.add((up, pk))
                    out[up].append(UnitEdit(-1 - len(exits), group.name, "keep", edit.format, None, 0, pk, source))
                number += 1
    for unit, found in out.items():
        _refuse_two_claims(unit, found)
    return {k: tuple(sorted(v, key=_order)) for k, v in out.items()}


def _refuse_two_claims(unit: str, edits: list[UnitEdit]) -> None:
    claimed: dict[tuple[str, str, str, int, int], UnitEdit] = {}
    for e in edits:
        if e.consumer is None:
            continue
        c = e.consumer
        place = (c.module, c.function, c.op, c.ordinal, e.operand)
        if place in claimed:
            raise PatchError(
                f"two edits claim operand {e.operand} of {c.op}#{c.ordinal} in {c.function}",
                where=f"{unit}.{c.module}".rstrip("."), hint=f"remove one of them: groups {claimed[place].group} and {e.group}",
            )  # fmt: skip
        claimed[place] = e


def _order(e: UnitEdit) -> tuple[bool, str, str, int, int]:
    """Equal layers get equal sequences, whatever order their edges came in."""
    key = e.consumer or e.producer
    assert key is not None
    return e.consumer is None, key.module, f"{key.function} {key.op}", key.ordinal, e.operand


def _relative(key: Key, module: str, unit: str) -> Key:
    rest = module[len(unit) :].lstrip(".") if module.startswith(unit) else module
    return key.model_copy(update={"module": rest})


def find_units(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    """The modules with the given paths, under whatever prefix the model has (peft, DDP, a bare backbone).

    Raises:
        PatchError: not all of them are there, or more than one place fits; names the nearest.
    """
    modules = {strip(n): m for n, m in model.named_modules()}
    fits: dict[tuple[int, ...], dict[str, nn.Module]] = {}
    for prefix, cut in _prefixes(modules, names):
        found = {n: m for n in names if (m := modules.get(_join(prefix, n[len(cut) :]))) is not None and n.startswith(cut)}
        if len(found) == len(names):
            fits.setdefault(tuple(id(found[n]) for n in names), found)
    if len(fits) == 1:
        return next(iter(fits.values()))
    if fits:
        raise PatchError(
            "the patch fits more than one place of this model", where=", ".join(names[:3]), hint="apply it to the submodule you mean"
        )
    missing = [n for n in names if n not in modules]
    layers = sorted({strip(n) for n in modules if layer_of(n) is not None and unit_of(n) == n})[:3]
    raise PatchError(
        f"this model does not have the modules that the patch is for: {', '.join(missing[:3])}",
        where=f"nearest here: {', '.join(layers) or ', '.join(list(modules)[1:4])}",
        hint="make a patch for this architecture with `graphalign find`",
    )


def _prefixes(modules: dict[str, nn.Module], names: list[str]) -> list[tuple[str, str]]:
    """(prefix in the model, leading part of the spec's names to cut) to try."""
    first = names[0].split(".")
    out: dict[tuple[str, str], None] = {("", ""): None}
    for k in range(len(first)):
        cut, rest = ".".join(first[:k]) + ("." if k else ""), ".".join(first[k:])
        if any(not n.startswith(cut) for n in names):
            break
        for m in modules:
            if m == rest or m.endswith("." + rest):
                out[m[: len(m) - len(rest)].rstrip("."), cut] = None
    return list(out)


def _join(prefix: str, rest: str) -> str:
    return f"{prefix}.{rest}" if prefix and rest else prefix or rest
