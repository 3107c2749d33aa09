"""`gap.json`: the result of `graphalign gap` with a live engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from graphalign.gap.residue import Residue
from graphalign.gap.statistics import Estimate, GapStatistics, PairedDifference

FORMAT_VERSION = 1


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measured(Frozen):
    """One variant of the trainer against one set of the engine's log-probabilities."""

    pooled: GapStatistics
    by_seed: dict[int, GapStatistics]
    against_stock: PairedDifference | None
    """This variant minus the stock trainer, same tokens; None for the stock trainer itself."""
    against_stock_by_seed: dict[int, PairedDifference] = Field(default_factory=dict)
    against_paper: PairedDifference | None = None
    """This variant minus the paper's three regions; None where these are not a variant of their own."""


class VariantResult(Frozen):
    """One variant."""

    name: str
    title: str
    groups: tuple[str, ...]
    edges: int
    """Training edges that the patch changes."""
    sampled: Measured
    """Against the log-probabilities that the engine reported when it sampled: what an RL run sees."""
    prefill: Measured
    """Against the same engine's, when it scores the same tokens in one prefill: without decode and batch effects."""


class Share(Frozen):
    """The Shapley share of a group in the reduction of k3 from the stock trainer to the whole patch."""

    group: str
    reduction: Estimate
    """In nats; the shares of all groups add up to the whole reduction."""
    part: float
    """`reduction` divided by the whole reduction; negative for a group that widens the gap."""
    standard_error: float = 0.0
    """Of `reduction.value`, from sampling orders; 0 where every subset was measured."""
    alone: Estimate | None
    """The reduction when only this group is patched; None if that was not measured (sampled orders)."""
    widens: bool
    """The interval of `reduction` or of `alone` lies below 0."""


class Attribution(Frozen):
    """What every group contributes."""

    exact: bool
    """Every subset was measured; else orders were sampled."""
    subsets: int
    sampled: tuple[Share, ...]
    prefill: tuple[Share, ...]


class Emulated(Frozen):
    """The other way round: the engine rounds where the source does (`emulate_precision_casts`), the trainer is stock."""

    sites: int
    """Training edges that still round elsewhere than this engine."""
    groups: dict[str, int]
    gap: GapStatistics
    """The stock trainer against this engine's own samples."""
    prefill: GapStatistics
    tokens_per_second: float


class GapReport(Frozen):
    """Everything that was measured."""

    format: Literal["graphalign.verify"] = "graphalign.verify"
    version: Literal[1] = 1
    model: dict[str, Any]
    versions: dict[str, str]
    target: dict[str, Any]
    regime: dict[str, Any]
    prompts: str
    """Where the prompts are from."""
    notes: tuple[str, ...] = ()
    seeds: tuple[int, ...]
    max_tokens: int
    samples_per_prompt: int
    sequences: int
    tokens: int
    """Generated tokens, all of them scored."""
    engine_gap: GapStatistics
    """The engine against itself: as sampled minus in prefill. No patch of the trainer can remove it."""
    floor: GapStatistics | None = None
    """The patched trainer minus itself with one element of one weight changed by one unit in the last place: a model amplifies the smallest
    difference, so this is about how close two computations come that are not bitwise equal. None if there is no patch."""
    variants: tuple[VariantResult, ...]
    attribution: Attribution | None
    residue: Residue | None
    residue_skipped: str = ""
    """Why kernels were not compared."""
    shared_skipped: str = ""
    """Why the engine's kernels were not tried in the trainer."""
    drift: dict[str, dict[int, float]] = Field(default_factory=dict)
    """Variant to drift by layer (see `residue.drift_by_layer`)."""
    engine_tokens_per_second: float
    emulated: Emulated | None = None
    seconds: dict[str, float] = Field(default_factory=dict)

    def variant(self, name: str) -> VariantResult:
        """A variant by name.

        Raises:
            KeyError: it was not measured.
        """
        for v in self.variants:
            if v.name == name:
                return v
        raise KeyError(name)
