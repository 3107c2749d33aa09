"""The result of a diff: sites in groups, and everything that is not a site, with reasons."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from graphalign.ir.drawing import Drawing

FORMAT_VERSION = 1


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class End(Frozen):
    """One end of a training edge."""

    module: str
    """Module path with the layer number as `*`."""
    op: str
    """ATen op, or `parameter`, `table`, `gemm`, `attention`."""
    function: str = ""
    file: str = ""
    line: int = 0
    column: int = 0
    end_line: int = 0
    end_column: int = 0
    text: str = ""
    """The source expression."""
    ordinal: int = 0
    """Which one, among equal ATen ops that the same function runs in the same module, in execution order."""
    operand: int | None = None
    """Consumers only: which tensor operand of the op reads the value."""


class Evidence(Frozen):
    """Where the inference side shows it."""

    layer: int | None
    kernel: str
    producer: str
    consumer: str
    buffers: tuple[str, ...] = ()
    """Buffers passed through; empty if the value stays in a register."""


class Site(Frozen):
    """A training edge whose roundings differ from those on the matching inference paths, in one or more layers."""

    id: str
    kind: Literal["keep", "round"]
    producer: End
    consumer: End
    training: tuple[str, ...]
    """Roundings on the training side, in order."""
    inference: tuple[str, ...]
    layers: tuple[int, ...]
    """Layers of the consumer; empty if it is outside the layers (the final norm)."""
    producer_layers: tuple[int, ...]
    """Layers of the producer, one for each of `layers` (one if that is empty); empty if it is outside the layers."""
    evidence: tuple[Evidence, ...]
    """One per distinct kernel pattern, at most four."""
    effect: float
    """Share of elements of the anchor operands behind it that change when this site alone is left out, mean over layers."""
    reaches: tuple[str, ...]
    """Anchor operands that change when it is left out: exactly the predicted ones, or it wouldn't be a site."""
    count: int
    """Edges (one per layer)."""
    clustering: float | None = None
    """How unevenly the value falls between adjacent BF16 numbers, 0 to 1 (`clusters`); None if it was not measured."""


class Group(Frozen):
    """Sites of one kind."""

    name: str
    kind: Literal["keep", "round", "mixed"]
    layers: tuple[int, ...]
    sites: tuple[Site, ...]


class Entry(Frozen):
    """Something that is not a site."""

    side: Literal["training", "inference", "both"]
    what: str
    where: str
    """Module and source line, or kernel."""
    reason: str
    layers: tuple[int, ...] = ()
    count: int = 1
    names: tuple[str, ...] = ()
    """Node names, at most eight."""


class NodeStatus(Frozen):
    """What became of one op; `why` reads these."""

    name: str
    side: Literal["training", "inference"]
    target: str
    where: str
    status: Literal["paired", "interior", "leftover", "anchor", "source", "tail"]
    partners: tuple[str, ...] = ()
    reason: str = ""
    edges: tuple[str, ...] = ()
    """Its operands' edges, as text."""
    unexercised: str = ""
    """For a clamp, `where` or `max` that took one side only on all inputs that were tried: which."""
    assumed: str = ""
    """Why it is taken to be its partner's equal without having been compared; empty if it was, or is no composite anchor."""
    near: tuple[str, ...] = ()
    """Of a leftover of the trainer: what on the other side comes nearest, and what speaks against it."""


class Report(Frozen):
    """`sites.json`."""

    format: Literal["graphalign.sites"] = "graphalign.sites"
    version: Literal[1] = 1
    target: dict[str, Any]
    regime: dict[str, Any]
    versions: dict[str, str]
    model: dict[str, Any]
    compile: dict[str, Any] = Field(default_factory=dict)
    simulated: bool = False
    groups: tuple[Group, ...]
    interior: tuple[Entry, ...]
    leftovers: tuple[Entry, ...]
    undetermined: tuple[Entry, ...]
    conflicting: tuple[Entry, ...]
    unpatchable: tuple[Entry, ...]
    semantic: tuple[Entry, ...]
    assumed: tuple[Entry, ...] = ()
    """Composite anchors (experts, mixers, latent attention) that are joined by their owner and whose inside was not compared."""
    unexercised: tuple[Entry, ...] = ()
    """Clamps, `where`, `max` of one side that took one side only on all inputs that were tried: what they do otherwise was not compared."""
    tail: tuple[Entry, ...] = ()
    """Ops behind the engine's compiled graph (lm_head and on): not compared."""
    stats: dict[str, Any]
    """Counts, chance-match rate, agreement of anchor operands without and with the sites' edits, seconds per stage."""
    nodes: tuple[NodeStatus, ...] = ()
    notes: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    """In words, which GEMMs, attentions and other anchors have no partner on the other side: the result is of a part of the model."""
    unrotated: tuple[int, ...] = ()
    """Layers of the trainer that have attention and read no table: no rotary embedding is applied there."""
    drawing: Drawing | None = None
    """What `render` draws."""

    @property
    def sites(self) -> int:
        """Number of training edges that are sites."""
        return sum(s.count for g in self.groups for s in g.sites)

    @property
    def assumptions(self) -> str:
        """How many composite anchors are assumed equal, in words; empty if none is."""
        n = sum(e.count for e in self.assumed)
        return f"{n} composite anchor{'' if n == 1 else 's'} assumed" if n else ""
