"""Runs a diff on a synthetic pair and says it in the program's terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphalign.align.align import align, prepare
from graphalign.align.edges import compare
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph
from graphalign.rules import rules_dir
from graphalign.sites.find import diff_pair
from graphalign.sites.report import Report
from tests.synthetic import Plan, Program, truth, writes

Moves = set[tuple[str, int | None, int | None]]
HIDDEN = "proposed as"
"""How a report lists a move that, on the few values that the check looks at, does not change all the operands behind it."""


@dataclass
class Judged:
    """A diff and the truth."""

    moves: Moves
    """Proposed differences (verdict, producer value, consumer value)."""
    planted: Moves
    report: Report
    leftovers: list[str]

    @property
    def hidden(self) -> int:
        """Proposed, and refused for its effect on the check's values."""
        return sum(e.count for e in self.report.undetermined if HIDDEN in e.reason)

    def faults(self) -> list[str]:
        """Everything that is wrong, in words."""
        out = []
        if self.moves != self.planted:
            out.append(f"missed {sorted(self.planted - self.moves, key=str)}, invented {sorted(self.moves - self.planted, key=str)}")
        out += self.leftovers
        for kind in ("leftovers", "undetermined", "conflicting", "unpatchable", "semantic"):
            out += [f"{kind}: {e.what}: {e.reason}" for e in getattr(self.report, kind) if HIDDEN not in e.reason]
        # A difference between numbers that are exact in BF16 anyway is neither a site nor an open question.
        if self.report.sites + self.hidden > len(self.planted):
            out.append(f"{self.report.sites} sites and {self.hidden} hidden ones for {len(self.planted)} moves")
        if self.report.stats["check"]["lowest_with_sites"] != 1.0 and not self.hidden:
            out.append(f"the sites do not reproduce the engine: {self.report.stats['check']}")
        if self.report.stats["chance_match_rate"] >= 1e-3:
            out.append(f"chance-match rate {self.report.stats['chance_match_rate']}")
        return out


def judge(program: Program, plan: Plan, inference: InferenceGraph, training: TrainingGraph) -> Judged:
    """Diff a rendered pair."""
    pair = prepare(inference, training, rules_dir())
    comparison = compare(align(pair))
    value_of = {node: value for value, node in writes(program, plan).items()}
    ops = pair.flow_t.ops

    def value(op: int) -> int | None:
        return value_of.get(ops[op].detail.get("node", -1))

    moves = {(f.verdict, value(f.producer), value(f.consumer)) for f in comparison.findings if f.verdict != "agree"}
    leftovers = [f"{side} op {i}: {why}" for (side, i), why in comparison.leftover.items()]
    return Judged(moves, set(truth(program, plan)), diff_pair(pair, rules_dir()), leftovers)


def sites(report: Report) -> set[Any]:
    """What must not depend on names, layouts and orders."""
    return {(g.name, s.kind, s.producer, s.consumer, s.training, s.inference, s.layers, s.count) for g in report.groups for s in g.sites}
