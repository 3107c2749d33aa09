"""The verdict on a patch: what speaks against it, and what it does not cover, in words.

Edges are compared one by one, by the identity that drift uses: a count would let a wrong edit make up for a missing one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from graphalign.drift.changes import edge_words
from graphalign.drift.snapshot import EdgeKey, Layers, Snapshot, edges_of, identity, of_report, of_spec
from graphalign.patch.spec import PatchSpec
from graphalign.proof.replay import Score, Summary, shares, summarise
from graphalign.sites.report import Report

Edge = tuple[EdgeKey, Layers]
Verdict = Literal["proven", "partial", "not proven"]
STOCK, PATCHED, NEGATED, FP32 = "stock", "patched", "negated", "all in FP32"
WHOLE, OTHERS = "all sites", "all but these"
"""Beside a partial patch: the patch of everything, and the same without the edits of the patch."""
ENOUGH = 0.9995
"""Share of bitwise equal elements that a patched region must reach."""
REMAINING = ("unpatchable", "conflicting", "undetermined")
"""Kinds of entries that no patch removes."""


@dataclass
class Proof:
    """What was shown of a patch."""

    stock: Report
    patched: Report
    spec: PatchSpec
    edges: dict[str, int] = field(default_factory=dict)
    """Variant to the number of edges it changes."""
    scores: dict[str, list[Score]] = field(default_factory=dict)
    """Variant to the scores of its replay; empty if nothing was recorded."""
    missing: dict[str, str] = field(default_factory=dict)
    """Variants that could not be replayed, with the reason."""
    skipped: str = ""
    """Why nothing was replayed."""
    formats: tuple[str, ...] = ()
    """GEMMs and attention calls that read other formats than in the stock model, in words: must be empty."""
    notes: tuple[str, ...] = ()
    """In words, positions and batches for which nothing is shown."""

    @cached_property
    def _sites(self) -> Snapshot:
        return of_report(self.stock)

    @cached_property
    def _edits(self) -> Snapshot:
        return of_spec(self.spec)

    @cached_property
    def left_out(self) -> dict[str, int]:
        """Group to the number of the stock model's sites that the patch leaves as they are."""
        return dict(Counter(c.group for at, c in self._sites.edges.items() if at not in self._edits.edges))

    @cached_property
    def remaining(self) -> dict[str, int]:
        """Group to the number of sites that the patched model has, other than those that the patch left out: must be empty."""
        found = of_report(self.patched)
        left = {at: (c.kind, c.format) for at, c in self._sites.edges.items() if at not in self._edits.edges}
        return dict(Counter(c.group for at, c in found.edges.items() if left.get(at) != (c.kind, c.format)))

    @property
    def unpatched(self) -> dict[str, int]:
        """Kind to the number of differences that the patch does not remove, or of which nothing is known."""
        found = {"left out": sum(self.left_out.values())}
        found |= {kind: sum(e.count for e in getattr(self.patched, kind)) for kind in (*REMAINING, "assumed")}
        return {kind: n for kind, n in found.items() if n}

    @cached_property
    def problems(self) -> list[str]:
        """Everything that speaks against the patch, or was not shown of its edits, in words; empty if they are proven."""
        return [*self._against_map(), *self._entries(), *self._replayed()]

    @property
    def verdict(self) -> Verdict:
        """`partial`: the patch's edits are proven, and differences stay."""
        return "not proven" if self.problems else "partial" if self.unpatched else "proven"

    # -- the map ------------------------------------------------------------------------------------------------------------

    def _against_map(self) -> list[str]:
        """Edits that this engine and this trainer do not ask for, and sites that are still there."""
        sites, edits = self._sites, self._edits
        out = []
        if self.stock.semantic:
            n = sum(e.count for e in self.stock.semantic)
            out.append(f"the two sides compute different functions ({n} places, the first: {self.stock.semantic[0].what}): no patch helps")
        if not edits.edges:
            out.append("the patch has no edits: there is nothing to prove")
        if self.spec.edges > len(edits.edges):
            out.append(f"{self.spec.edges - len(edits.edges)} edges are in the patch twice")
        strange = [at for at in edits.edges if at not in sites.edges]
        if strange:
            out.append(f"{len(strange)} edges of the patch are no sites between this engine and this trainer: {_some(edits, strange)}")
        other = [at for at, c in edits.edges.items() if at in sites.edges and (c.kind, c.format) != _change(sites, at)]
        if other:
            asked = ", ".join(sorted({"{} in {}".format(*_change(sites, at)) for at in other}))
            out.append(f"{len(other)} edges are changed otherwise than the engine asks for ({asked}): {_some(edits, other)}")
        if self.formats:
            more = f"; and {len(self.formats) - 1} more" if len(self.formats) > 1 else ""
            out.append(f"the patch changes what GEMMs or attention read: {self.formats[0]}{more}")
        return out + [f"{name}: {n} sites remain after the patch" for name, n in self.remaining.items()]

    def _entries(self) -> list[str]:
        """What else the patched model differs in from the stock model, and what has no partner."""
        out = []
        for kind in ("leftovers", *REMAINING, "semantic"):
            before, after = _counted(self.stock, kind), _counted(self.patched, kind)
            out += [f"the patched model has {n} {kind} entries that the stock model does not have: {what}"
                    for (what, _), n in (after - before).items()]  # fmt: skip
            if kind == "unpatchable":  # what a patch cannot remove is still there, or it is not seen any more
                out += [f"{n} {kind} entries of the stock model are not found in the patched one: {what}"
                        for (what, _), n in (before - after).items()]  # fmt: skip
        if lost := sum(e.count for e in self.patched.leftovers):
            out.append(f"{lost} ops or edges have no partner on the other side: nothing is shown about what they compute")
        return out

    # -- the replay ---------------------------------------------------------------------------------------------------------

    @cached_property
    def reaches(self) -> dict[str, set[str]]:
        """Group of the patch to the anchor operands, layer by layer, that its edges change; groups that it leaves out as well."""
        groups = {at: c.group for at, c in self._edits.edges.items() if at in self._sites.edges}
        mine, others = operands_by_group(self.stock, groups), operands_by_group(self.stock)
        return mine | {name: operands for name, operands in others.items() if name not in mine}

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        """Variant to its replay scores by group; empty if nothing was recorded."""
        return {name: summarise(scores, self.reaches) for name, scores in self.scores.items()}

    def _replayed(self) -> list[str]:
        if not self.scores:
            why = self.skipped or "no values of the engine"
            return [f"nothing was replayed on the engine's values ({why}): the patch is consistent with the captured graph, no more"]
        out = []
        for name in dict.fromkeys(g.name for g in self.spec.groups if g.edits):
            patched = self.summaries[PATCHED]
            if name not in patched.operands:
                out.append(
                    f"{name}: not one region behind its edits was replayed on the engine's values: nothing shows that they are right"
                )
                continue
            out += self._reached(name) + self._told_apart(name)
        return out

    def _reached(self, name: str) -> list[str]:
        """A region of the patched model must give what the engine's does; what a partial patch lacks, the other sites must add."""
        mine, whole = shares(self.scores[PATCHED]), shares(self.scores.get(WHOLE, ()))
        low = {at: max(mine[at], whole.get(at, 0.0)) for at in self.reaches[name] if at in mine}
        worst = min(low, key=low.__getitem__)
        if low[worst] >= ENOUGH:
            return []
        text = f"{name}: only {low[worst]:.4%} of a region's elements are bitwise the engine's ({worst})"
        if WHOLE in self.scores:
            return [f"{text}, with all other sites patched too"]
        if WHOLE in self.missing:
            return [f"{text}, and the patch of all sites could not be replayed: {self.missing[WHOLE]}"]
        if n := sum(self.left_out.values()):
            return [f"{text}; {n} sites are not in this patch nor in any, and may be the cause"]
        return [text]

    def _told_apart(self, name: str) -> list[str]:
        """Without the patch, and with the opposite of the map, regions must be worse: or the replay would accept anything."""
        best = self.summaries[WHOLE if WHOLE in self.summaries else PATCHED].equal.get(name, 0.0)
        against = [OTHERS if OTHERS in self.summaries else STOCK, NEGATED]
        words = {STOCK: "the stock model does", OTHERS: "the other sites' edits do without this patch", NEGATED: "the negated map does"}
        return [
            f"{name}: {words[v]} as well there ({self.summaries[v].equal[name]:.5f}): the replay does not show that these edits are right"
            for v in against
            if v in self.summaries and name in self.summaries[v].equal and self.summaries[v].equal[name] >= best
        ]


def operands_by_group(report: Report, groups: Mapping[Edge, str] | None = None) -> dict[str, set[str]]:
    """Group to the anchor operands (`module[slot]`, layer by layer) that its sites change.

    Args:
        report: of the stock model.
        groups: edges to the groups that they are in, others are left out; None for the report's own groups.
    """
    out: dict[str, set[str]] = defaultdict(set)
    for g in report.groups:
        for s in g.sites:
            for at in edges_of(s):
                group = g.name if groups is None else groups.get(at)
                if group is None:
                    continue
                # a residual sum reaches into the next layer too; what lies before the layers reaches the first ones
                first = at[1][0] or 0
                out[group] |= {pattern.replace("*", str(n), 1) for pattern in s.reaches for n in (first, first + 1)}
    return dict(out)


def without(spec: PatchSpec, edges: Iterable[Edge]) -> PatchSpec:
    """A spec without some of its edges."""
    gone = set(edges)
    groups = []
    for g in spec.groups:
        edits = []
        for e in g.edits:
            for consumer, producer in e.pairs():
                if (identity(e.producer, e.consumer, e.operand), (consumer, producer)) not in gone:
                    edits.append(e.model_copy(update={"layers": _text(consumer), "producer_layers": _text(producer)}))
        if edits:
            groups.append(g.model_copy(update={"edits": tuple(edits)}))
    return spec.model_copy(update={"groups": tuple(groups)})


def _text(layer: int | None) -> str:
    return "" if layer is None else str(layer)


def _change(s: Snapshot, at: Edge) -> tuple[str, str]:
    return s.edges[at].kind, s.edges[at].format


def _some(s: Snapshot, edges: Sequence[Edge]) -> str:
    """The first of some edges, in words."""
    return edge_words(s, edges[0][0]) + (" and others" if len({key for key, _ in edges}) > 1 else "")


_VALUE = re.compile(r"%\d+")


def _counted(report: Report, kind: str) -> Counter[tuple[str, str]]:
    """Entries of a kind, by what they are about and why, without value numbers; an op in place is the same as its function."""
    out: Counter[tuple[str, str]] = Counter()
    for e in getattr(report, kind):
        out[e.what.replace("_.", "."), _VALUE.sub("%", e.reason)] += e.count
    return out
