"""Findings as a diagram needs them: looked up by edge, and the names of what is at their ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from graphalign.align.align import Alignment
from graphalign.align.edges import Finding
from graphalign.align.regions import Regions
from graphalign.ir.dataflow import Op
from graphalign.sites.ends import pattern_of

Edge = tuple[int, int, int]
"""Consumer, slot, producer."""


@dataclass
class Judged:
    """All findings, for looking up an edge."""

    findings: dict[Edge, Finding]
    sites: dict[Edge, str]
    """An edge to the site it is."""
    semantic: dict[int, str] = field(default_factory=dict)
    """Training op at which the sides part to the reason."""
    _launch: dict[int, int] = field(default_factory=dict)
    _sites_of: dict[int, list[Edge]] = field(default_factory=dict)
    _members: dict[int, list[int]] = field(default_factory=dict)
    _position: dict[Edge, int] = field(default_factory=dict)
    _count: int = 0

    def verdict(self, edge: Edge) -> str:
        """What is wrong with an edge that is no site; empty if nothing is. What was proposed and not confirmed is undetermined."""
        f = self.findings.get(edge)
        if edge in self.sites:
            return ""
        if edge[0] in self.semantic:
            return "semantic"
        if f is None or f.verdict == "agree":
            return ""
        return "undetermined" if f.verdict in ("keep", "round") else f.verdict

    def sites_read_by(self, consumers: Iterable[int]) -> list[Edge]:
        """Edges that are sites and end in one of some ops, in the order of `sites`."""
        if not self._sites_of:
            self._position.update((key, n) for n, key in enumerate(self.sites))
            for key in self.sites:
                self._sites_of.setdefault(key[0], []).append(key)
        return sorted((key for c in consumers for key in self._sites_of.get(c, ())), key=self._position.__getitem__)

    def members(self, regions: Regions, region: int) -> list[int]:
        """The ops of one region."""
        if not self._members:
            for x, r in regions.region.items():
                self._members.setdefault(r, []).append(x)
        return self._members.get(region, [])

    def launches(self, al: Alignment) -> dict[int, int]:
        """Inference op to the number of its kernel's launch: one generated function can be launched many times."""
        if not self._launch:
            before = None
            for op in al.inference.ops:
                if op.kind in ("op", "anchor"):
                    here = op.where if op.kind == "op" else None
                    if here is None or here != before:
                        self._count += 1
                    self._launch[op.id], before = self._count, here
        return self._launch


def label(op: Op, text: str) -> str:
    if op.kind == "parameter":
        return short_module(op.target)
    if op.kind in ("anchor", "output"):
        return short_module(op.module) or op.target
    return text or short_module(op.target) or op.target


def short_module(module: str) -> str:
    """A module path without the part up to the layer number."""
    pattern = pattern_of(module)
    return (pattern.rpartition(".*.")[2] if ".*." in pattern else pattern.removeprefix("model.")) or module


def title(ops: list[Op]) -> str:
    names = dict.fromkeys(short_module(o.module) if pattern_of(o.module) != o.module else o.module for o in ops if o.module)
    return ", ".join("layer" if n.split(".")[-1] == "*" else n.split(".")[-1] for n in names) or "region"
