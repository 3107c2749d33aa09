"""Findings as a diagram needs them: looked up by edge, and the names of what is at their ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphalign.align.align import Alignment
from graphalign.align.edges import Finding
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
