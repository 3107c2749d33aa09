"""The patch spec: which training edges to change, and what the spec is good for. Data only, no code.

Keys survive wrappers and reformatting: module path without wrapper prefixes, qualified function, ATen op, ordinal among
equal ops of that function in that module, operand; the source text is a second witness that must agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from graphalign.errors import BadInputError
from graphalign.ir.files import write_bytes

FORMAT_VERSION = 1
MAX_BYTES = 16 << 20
"""Largest spec accepted."""


Format = Literal["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Key(Frozen):
    """One op of the training model."""

    module: str
    """Path with the layer number as `*`, without wrappers."""
    function: str
    """Qualified name of the function whose expression runs the op."""
    op: str
    """ATen op without overload: `mul`. Of a fused op also one of its steps, which is put there in its place: `native_layer_norm:mean`."""
    ordinal: int = Field(ge=0)
    """Among equal ops of that function in that module, in execution order."""
    text: str
    """Source expression, white space normalised."""
    file: str
    """Source file, from its package's root; its digest is in `sources`."""


class Edit(Frozen):
    """One edge to change, in some layers."""

    kind: Literal["keep", "round"]
    """`keep`: the consumer reads the value unrounded. `round`: it reads it rounded to `format`."""
    format: Format
    """The format that training rounds to (keep) or must round to (round)."""
    producer: Key
    consumer: Key
    operand: int = Field(ge=0)
    """Which tensor operand of the consumer."""
    layers: str
    """Layers of the consumer, `0-5, 7`; empty if it is outside the layers."""
    producer_layers: str
    """Layers of the producer, one for each of `layers`."""
    site: str = ""
    """Id of the site in `sites.json`, `rope.1`; empty in files from before 0.2."""

    @field_validator("layers", "producer_layers")
    @classmethod
    def _parses(cls, text: str) -> str:
        parse_layers(text)
        return text

    def pairs(self) -> list[tuple[int | None, int | None]]:
        """(consumer layer, producer layer) of every edge."""
        consumers: list[int | None] = list(parse_layers(self.layers)) or [None]
        producers: list[int | None] = list(parse_layers(self.producer_layers)) or [None]
        if len(producers) == 1 and len(consumers) > 1:
            producers = producers * len(consumers)
        if len(consumers) != len(producers):
            raise ValueError(f"an edit lists {len(consumers)} consumer layers and {len(producers)} producer layers")
        return list(zip(consumers, producers, strict=True))


class Group(Frozen):
    """Edits of one kind."""

    name: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class LeftOut:
    """What was left out by choice: a group, layers of every group, or (both empty) what lies outside the layers."""

    group: str = ""
    layers: str = ""
    """Numbers and ranges."""


_BY_CHOICE, _LAYERS, _OUTSIDE = "left out by choice", "left out by choice: layers ", "left out by choice: outside the layers"


class Skipped(Frozen):
    """What the spec does not patch, with the reason."""

    site: str
    """A site's id, `rope.*` for a group, `*` for layers of every group."""
    reason: str

    @classmethod
    def by_choice(cls, what: LeftOut) -> Skipped:
        """An entry for what was left out by choice; `left_out` reads it."""
        if what.group:
            return cls(site=f"{what.group}.*", reason=_BY_CHOICE)
        return cls(site="*", reason=f"{_LAYERS}{what.layers}" if what.layers else _OUTSIDE)

    @property
    def left_out(self) -> LeftOut | None:
        """What was left out by choice; None if there is another reason."""
        if self.reason == _BY_CHOICE:
            return LeftOut(group=self.site.removesuffix(".*"))
        if self.reason.startswith(_LAYERS):
            return LeftOut(layers=self.reason.removeprefix(_LAYERS))
        return LeftOut() if self.reason == _OUTSIDE else None


class PatchSpec(Frozen):
    """`patch.yaml`."""

    format: Literal["graphalign.patch"] = "graphalign.patch"
    version: Literal[1] = 1
    simulated: bool = False
    target: dict[str, Any]
    regime: dict[str, Any]
    versions: dict[str, str]
    compile: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any]
    """architecture, config_digest, layers; own_dtype if the model is made for another dtype than BF16."""
    sources: dict[str, str]
    """SHA-256 of every modeling file, by relative path."""
    captures: dict[str, str] = Field(default_factory=dict)
    """Digests of both captures."""
    groups: tuple[Group, ...]
    skipped: tuple[Skipped, ...] = ()
    partial: tuple[str, ...] = ()
    """In words, what of the model was not compared; empty for a patch that is of the whole model."""

    @property
    def edges(self) -> int:
        """Number of training edges the spec changes."""
        return sum(len(e.pairs()) for g in self.groups for e in g.edits)


def parse_layers(text: str) -> tuple[int, ...]:
    """`0-2, 5` as (0, 1, 2, 5).

    Raises:
        ValueError: not a list of ascending numbers and ranges below 100000.
    """
    out: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is not a layer or a range of layers")
        a, b = int(first), int(last or first)
        if b < a or b >= 100_000 or (out and a <= out[-1]):
            raise ValueError(f"layers must ascend: {text!r}")
        out += range(a, b + 1)
    return tuple(out)


def dump(spec: PatchSpec) -> str:
    """YAML text of a spec, in a fixed order, one edit's fields a line each, fit for diffs."""
    data = json.loads(spec.model_dump_json())
    if not spec.partial:
        del data["partial"]
    for edit in (e for g in data["groups"] for e in g["edits"] if not e["site"]):
        del edit["site"]
    head = "".join(f"# PARTIAL: {said}\n" for said in spec.partial)
    if own := spec.model.get("own_dtype"):
        head += f"# the model's own dtype is {own}; this patch is for an engine that runs it in bfloat16\n"
    return head + yaml.safe_dump(data, sort_keys=False, width=120, allow_unicode=True)


def save(spec: PatchSpec, path: str | Path) -> None:
    """Write a spec, atomically."""
    write_bytes(path, dump(spec).encode())


def parse(text: str, where: str = "patch spec") -> PatchSpec:
    """Read YAML text.

    Raises:
        BadInputError: not YAML, not a spec, or of a newer format; names the first problem.
    """
    try:
        raw = yaml.load(text, Loader=_PlainLoader)
    except yaml.YAMLError as e:
        raise BadInputError(f"{where} is not YAML", where=str(e)[:300], hint="regenerate it with `graphalign patch`") from None
    except RecursionError:
        raise BadInputError(f"{where} is nested too deeply", where=where) from None
    if not isinstance(raw, dict) or raw.get("format") != "graphalign.patch":
        raise BadInputError(
            f"{where} is not a patch spec",
            where="its `format` is not graphalign.patch",
            hint="give a patch.yaml as `graphalign patch` writes it",
        )
    if isinstance(raw.get("version"), int) and raw["version"] > FORMAT_VERSION:
        raise BadInputError(
            f"{where} is of format version {raw['version']}; this graphalign reads up to {FORMAT_VERSION}", hint="upgrade graphalign"
        )
    if "skipped" not in raw:  # YAML that is cut between two lines is YAML
        hint = "copy it again, or regenerate it with `graphalign patch`"
        raise BadInputError(f"{where} is cut short", where="its last entry, `skipped`, is missing", hint=hint)
    try:
        spec = PatchSpec.model_validate_json(json.dumps(raw))
        _ = spec.edges
        return spec
    except (ValidationError, ValueError, TypeError) as e:
        first = e.errors()[0] if isinstance(e, ValidationError) else {"loc": (), "msg": str(e)}
        at = ".".join(str(x) for x in first["loc"][:8])
        raise BadInputError(
            f"{where} is not a valid patch spec: {first['msg']}",
            where=f"at {at or 'the top level'}",
            hint="regenerate it with `graphalign patch`",
        ) from None


def load(path: str | Path) -> PatchSpec:
    """Read a spec from a file; errors as `parse`."""
    try:
        data = Path(path).read_bytes()
        if len(data) > MAX_BYTES:
            raise BadInputError(f"{path} is too large for a patch spec", where=f"{len(data)} bytes")
        return parse(data.decode(), str(path))
    except (OSError, UnicodeDecodeError) as e:
        raise BadInputError(f"cannot read patch spec {path}: {e}", hint="give a patch.yaml as `graphalign patch` writes it") from None


def refuse_other_target(spec: PatchSpec, target: Mapping[str, Any]) -> None:
    """Compare a spec's target with that of a capture.

    Raises:
        BadInputError: they differ in the device, the instruction set or the tensor-parallel size.
    """
    differ = [k for k in ("device", "isa", "tp") if k in spec.target and k in target and spec.target[k] != target[k]]
    if differ:
        what = "; ".join(f"{k} is {target[k]}, the patch is for {spec.target[k]}" for k in differ)
        raise BadInputError("the patch is for another target", where=what, hint="make a patch for this target with `graphalign find`")


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases: a small file must not unfold into a large one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed in a patch spec")
        return super().compose_node(parent, index)


def digest(data: bytes) -> str:
    """SHA-256, in hex."""
    return hashlib.sha256(data).hexdigest()
