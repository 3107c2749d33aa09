"""Formats as data: which field of a trainer's dump holds what. The files are `rules/dumps/*.yaml`; `--adapter FILE` adds one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from graphalign.errors import BadInputError
from graphalign.rules import data_dir, read_yaml


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Layout(StrEnum):
    """Which token the entries of a list belong to."""

    TOKENS = "tokens"
    """Entry t belongs to token t of the whole sequence."""
    NEXT = "next"
    """Entry t belongs to token t + 1 of the whole sequence; the list has its length, or one entry fewer."""
    RESPONSE = "response"
    """One entry per token of the response, which ends the sequence."""


class Column(Frozen):
    """A list with one entry per token."""

    field: str
    """Path in the record, parts joined by dots."""
    layout: Layout = Layout.RESPONSE


class Mask(Column):
    """Which tokens count: 1 or true for those that were sampled and are trained on. All masks of a format must say so."""

    per: Literal["token", "row"] = "token"
    """`row`: one number for the whole record, 0 if it does not count; it may be a weight."""
    optional: bool = False
    """The field may be missing or null: every token counts."""


class Skip(Frozen):
    """Records that cannot be used, by a field that is true in them."""

    field: str
    why: str


class Adapter(Frozen):
    """One format."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str
    sources: tuple[str, ...] = ()
    """Files of the trainer that write it."""
    kind: Literal["jsonl", "torch", "parquet"]
    needs: tuple[str, ...] = Field(min_length=1)
    """Fields by which it is recognised: all of them are there."""
    absent: tuple[str, ...] = ()
    """Fields that it does not have."""
    records: str = ""
    """Where the records are in a torch file."""
    by_column: bool = False
    """The records are one dictionary of lists instead of a list of dictionaries."""
    explode: str = ""
    """A list in the record whose elements are the sequences (turns of a conversation)."""
    batch_of_one: bool = False
    """Every value is the only element of a list."""
    tokens: str = ""
    """Ids of the whole sequence, prompt first."""
    prompt: str = ""
    """Ids of the prompt, where prompt and response are apart."""
    response: str = ""
    prompt_length: str = ""
    """Number of prompt tokens, for lists that hold one entry per response token."""
    response_length: str = ""
    """Number of response tokens, for the same."""
    length: str = ""
    """Number of tokens of the sequence; what follows is padding and is cut."""
    inference: Column
    training: Column | None = None
    entropy: Column | None = None
    """The trainer's entropy where it predicts the token, in nats, of the same distribution as `training`."""
    masks: tuple[Mask, ...] = ()
    skip: tuple[Skip, ...] = ()
    step: str = ""
    """Field with the number of the training step."""
    step_from_name: str = ""
    """Regular expression on the file's path whose first group is that number, where no field has it."""
    notes: tuple[str, ...] = ()
    """What a reader of the figures has to know about this trainer."""
    switch: str = ""
    """What makes the trainer write the log-probabilities if they are missing."""

    @field_validator("step_from_name")
    @classmethod
    def _compiles(cls, v: str) -> str:
        try:
            if v and re.compile(v).groups != 1:
                raise ValueError("one group is wanted: the number of the step")
        except re.error as e:
            raise ValueError(f"not a regular expression: {e}") from None
        return v

    @model_validator(mode="after")
    def _whole(self) -> Adapter:
        columns = [c for c in (self.inference, self.training, self.entropy, *self.masks) if c is not None]
        if any(c.layout is not Layout.RESPONSE for c in columns) and not self.tokens:
            raise ValueError("a column with layout tokens or next needs the field `tokens`")
        if bool(self.prompt) != bool(self.response):
            raise ValueError("`prompt` and `response` belong together")
        if self.by_column and self.kind != "torch":
            raise ValueError("`by_column` is for torch files")
        return self


class Refusal(Frozen):
    """A format that is known and cannot be used."""

    name: str
    title: str
    sources: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    """Endings of file names; empty if the fields say what it is."""
    needs: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    why: str
    switch: str
    """What to do instead."""


class Formats(Frozen):
    """The content of `rules/dumps`."""

    adapters: tuple[Adapter, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    def adapter(self, name: str) -> Adapter:
        """A format by name.

        Raises:
            BadInputError: there is none; lists those that there are.
        """
        for a in self.adapters:
            if a.name == name:
                return a
        known = ", ".join(a.name for a in self.adapters)
        raise BadInputError(f"no format is called {name!r}", where="--format", hint=f"one of {known}, vllm-server; or --adapter FILE.yaml")


def load_formats(extra: Path | None = None) -> Formats:
    """The shipped formats, and those of a file, which come first.

    Args:
        extra: a YAML file with `adapters` (and `refusals`), as in `rules/dumps`.

    Raises:
        BadInputError: a file that is none.
    """
    shipped = _shipped()
    if extra is None:
        return shipped
    own = _parse(extra)
    names = {a.name for a in own.adapters}
    return Formats(
        adapters=(*own.adapters, *(a for a in shipped.adapters if a.name not in names)), refusals=(*own.refusals, *shipped.refusals)
    )


@cache
def _shipped() -> Formats:
    parts = [_parse(p) for p in sorted(data_dir("dumps").glob("*.yaml"))]
    return Formats(adapters=tuple(a for p in parts for a in p.adapters), refusals=tuple(r for p in parts for r in p.refusals))


def _parse(path: Path) -> Formats:
    try:
        return Formats.model_validate(read_yaml(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise BadInputError(f"cannot read adapters from {path}: {e}", where=str(path), hint="docs/dumps.md shows one") from None
    except ValidationError as e:
        first = e.errors()[0]
        at = ".".join(str(x) for x in first["loc"])
        raise BadInputError(f"{path} is no file of adapters: {first['msg']}", where=f"at {at}", hint="docs/dumps.md shows one") from None


_MISSING: Any = object()


def look_up(record: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path; numbers index lists.

    Args:
        record: a parsed record.
        path: `a.b.0`.
        default: returned where there is nothing.
    """
    at = record
    for part in path.split("."):
        if isinstance(at, Mapping):
            at = at.get(part, _MISSING)
        elif isinstance(at, list) and part.isdecimal() and int(part) < len(at):
            at = at[int(part)]
        else:
            return default
        if at is _MISSING:
            return default
    return at


def has(record: Any, path: str) -> bool:
    """Whether there is something at a dotted path; null counts."""
    return look_up(record, path, _MISSING) is not _MISSING
