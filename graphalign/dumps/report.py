"""`gap.json`: what `graphalign gap --dump` found."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from graphalign.gap.statistics import Estimate, GapStatistics, PairedDifference


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Finding(Frozen):
    """Something about the dump as a whole that changes what its figures mean."""

    kind: str
    what: str
    where: str = ""
    hint: str = ""
    side: Literal["inference", "training", "both"] = "both"
    """Whose column it is about."""
    refuses: bool
    """The difference is then no numeric gap, and is shown only if asked for."""


class LeftOutRows(Frozen):
    """Rows that were left out for one reason."""

    fault: str
    rows: int
    examples: tuple[str, ...]
    hint: str


class FileRead(Frozen):
    """One file."""

    path: str
    format: str
    title: str
    rows: int
    used: int
    """Rows that are compared or scored."""
    tokens: int
    """Their tokens that count."""


class Part(Frozen):
    """The gap of a part of the tokens."""

    name: str
    gap: GapStatistics


class Logged(Frozen):
    """A figure that trainers log, worked out from this dump."""

    name: str
    value: float
    logged_as: str


class Scored(Frozen):
    """The gap of a trainer that was run here on the dump's tokens, against the engine's log-probabilities in the dump."""

    name: str
    title: str
    edges: int
    gap: GapStatistics
    against_stock: PairedDifference | None
    against_dump: PairedDifference | None
    """This trainer minus the one that wrote the dump, both against the engine; None where the dump has no trainer's column."""


class Sampling(Frozen):
    """How the tokens were drawn, as the stock trainer's logits say."""

    tokens: int
    top_k: int | None
    """No token of a lower rank was drawn, where chance would have drawn some."""
    top_p: float | None
    min_p: float | None
    temperature: float | None
    """Relative to the one that is compared; None if a filter explains the tokens better."""
    temperature_error: float
    """Standard error."""
    reported: str | None
    """What brings the engine's log-probabilities to the model's, in words; None if they are the model's as they are."""


class DumpReport(Frozen):
    """Everything that was found."""

    format: Literal["graphalign.dump-gap"] = "graphalign.dump-gap"
    version: Literal[1] = 1
    files: tuple[FileRead, ...]
    rows: int
    empty: int
    """Rows without a token that counts."""
    left_out: tuple[LeftOutRows, ...]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]
    gap: GapStatistics | None
    """The dump's two columns; None if it has the engine's only, or if a finding refuses it."""
    sampling_bias: Estimate | None = None
    """1 − mean p/q = mean d − k3: 0 within noise if the tokens were drawn from q; the probability that a filter cut away, if one was."""
    outside_clip: float | None = None
    """Share of tokens whose ratio p/q lies outside of 1 ± 0.2."""
    by_step: tuple[Part, ...] = ()
    by_position: tuple[Part, ...] = ()
    by_probability: tuple[Part, ...] = ()
    logged: tuple[Logged, ...] = ()
    engine_gap: GapStatistics | None = None
    """The engine against itself, as sampled minus in prefill, of rows that have both."""
    model: dict[str, Any] = Field(default_factory=dict)
    scored: tuple[Scored, ...] = ()
    floor: GapStatistics | None = None
    """The patched trainer against itself with one weight 1 ULP off."""
    sampling: Sampling | None = None
    resamples: int
    sampled_rows: int | None = None
    """How many responses the checks of the whole, the plots and the scoring saw; None for all."""
    seconds: dict[str, float] = Field(default_factory=dict)
