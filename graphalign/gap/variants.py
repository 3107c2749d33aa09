"""The trainers that are compared: stock, every subset of the patch's groups, and the two that always belong beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from graphalign.patch.spec import PatchSpec

PAPER = ("rope", "swiglu", "residual_rmsnorm", "norm_weight")
"""Groups of the paper's three regions ("Where Rounding Happens Matters"): the RoPE path with the Q/K norms, SwiGLU, and residual RMSNorm up
to its output. The residual stream itself stays rounded in it."""
STOCK, EVERYTHING, FP32, POINTWISE, NUDGED = "stock", "everything", "fp32", "pointwise fp32", "everything, nudged"
PAPERS_TITLE = "the paper's three regions"
ALL_SUBSETS = 6
"""Most groups of which every subset is measured."""


@dataclass(frozen=True)
class Variant:
    """One way to run the trainer."""

    name: str
    title: str
    groups: tuple[str, ...] = ()
    """Groups of the patch that are applied."""
    spec: PatchSpec | None = None
    """The patch; None for the stock model."""
    upcast: bool = False
    """Run the whole model in FP32."""
    nudge: bool = False
    """Change one element of the first norm's weight by one unit in the last place."""
    shared: tuple[str, ...] = ()
    """Kernels of the engine that the trainer uses: "gemm", "attention"."""

    @property
    def edges(self) -> int:
        return self.spec.edges if self.spec else 0


def subset(spec: PatchSpec, groups: Iterable[str]) -> PatchSpec:
    """The patch with some of its groups only."""
    wanted = set(groups)
    return spec.model_copy(update={"groups": tuple(g for g in spec.groups if g.name in wanted)})


def subset_name(spec: PatchSpec, groups: Iterable[str]) -> str:
    """A name for the subset, the same whatever the order: `stock`, `everything`, or the groups joined by `+`."""
    wanted = [g.name for g in spec.groups if g.name in set(groups)]
    return STOCK if not wanted else EVERYTHING if len(wanted) == len(spec.groups) else "+".join(wanted)


def subset_variant(spec: PatchSpec, groups: Iterable[str]) -> Variant:
    """A subset as a variant."""
    name = subset_name(spec, groups)
    chosen = subset(spec, groups)
    titles = {STOCK: "stock trainer", EVERYTHING: "everything the graph shows"}
    if name == STOCK:
        return Variant(name, titles[name])
    if name != EVERYTHING and {g.name for g in chosen.groups} == set(paper_groups(spec)):
        titles[name] = PAPERS_TITLE
    return Variant(name, titles.get(name, ", ".join(g.name for g in chosen.groups)), tuple(g.name for g in chosen.groups), chosen)


def paper_groups(spec: PatchSpec) -> tuple[str, ...]:
    """Those of the paper's groups that this patch has."""
    return tuple(g.name for g in spec.groups if g.name in PAPER)


def main_variants(spec: PatchSpec, pointwise: PatchSpec | None) -> list[Variant]:
    """Stock, everything, the paper's three regions, everything in FP32: always measured.

    Args:
        spec: the whole patch.
        pointwise: the patch that drops every rounding between pointwise ops; left out if it is None or changes the same edges.
    """
    names = [g.name for g in spec.groups]
    out = [subset_variant(spec, ()), subset_variant(spec, names)]
    paper = paper_groups(spec)
    if paper and len(paper) < len(names):
        out.append(subset_variant(spec, paper))
    if pointwise is not None and pointwise.edges != spec.edges:
        out.append(Variant(POINTWISE, "all pointwise ops in FP32", ("everything_fp32",), pointwise))
    out.append(Variant(FP32, "all of the trainer in FP32", upcast=True))
    return out


def nudged_variant(spec: PatchSpec) -> Variant:
    """The whole patch, and the smallest change of one weight: how far apart two runs are that are not bitwise equal."""
    whole = subset_variant(spec, [g.name for g in spec.groups])
    return Variant(NUDGED, f"{whole.title}, one weight 1 ULP off", whole.groups, whole.spec, nudge=True)


def shared_variants(spec: PatchSpec) -> list[Variant]:
    """The whole patch with the engine's kernels in place of the trainer's."""
    whole = subset_variant(spec, [g.name for g in spec.groups])
    return [
        Variant("+".join([whole.name, "engine's", *kernels]), f"everything, engine's {' and '.join(kernels)}", whole.groups,
                whole.spec, shared=kernels)
        for kernels in (("gemm",), ("attention",), ("gemm", "attention"))
    ]  # fmt: skip


def all_subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Every subset of the groups, smallest first."""
    return [c for n in range(len(names) + 1) for c in combinations(names, n)]
