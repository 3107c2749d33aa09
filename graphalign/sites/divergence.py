"""Where the two sides part: differing anchors, and the first op of a region whose value the engine does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from graphalign.align.align import Alignment, Why
from graphalign.align.anchors import Difference, downstream
from graphalign.align.check import Check
from graphalign.align.dropped import Drawn
from graphalign.align.edges import Comparison
from graphalign.evaluate.aten import MATMULS, base
from graphalign.ir.dataflow import Op, Operand

MISPLACED = 0.01
"""Share of an operand's elements that must be far from the engine's."""


@dataclass(frozen=True)
class Parting:
    """A place where the sides part."""

    op: Op
    """Training op or anchor."""
    what: str
    reason: str


@dataclass(frozen=True)
class Divergence:
    """All partings, and what lies behind them."""

    semantic: tuple[Parting, ...]
    """The sides compute different functions here."""
    opaque: tuple[Parting, ...]
    """Nothing can be said here: it is behind an op of the engine that has no partner or could not be evaluated."""
    behind: frozenset[int]
    """Training ops behind a parting, within their region: none of their edges is a site."""
    inside: dict[int, str]
    """Training ops without a partner in a module that the engine runs as an opaque op, to that op."""


def find_partings(
    al: Alignment, comparison: Comparison, differences: list[Difference], unfolded: dict[str, str], permuted: frozenset[str] = frozenset()
) -> Divergence:
    """Sort out why anchor operands do not join.

    Args:
        al: the alignment.
        comparison: judged edges; its interior ops have no partner by construction.
        differences: matched anchors that differ.
        unfolded: modules that the engine runs as one op and that are no anchor on the training side, with the reason.
        permuted: weights that the engine holds with their rows in another order.
    """
    return _Finder(al, comparison, unfolded, permuted).run(differences)


def find_random(ops: Sequence[Op], refs: Mapping[int, Operand], drawn: tuple[Drawn, ...], found: Divergence) -> Divergence:
    """The same with the places where the trainer draws random numbers. What is behind a dropout can be compared all the same.

    Args:
        ops: of the training side.
        refs: value id to the edges that its readers get.
        drawn: what was taken out of its graph.
        found: the divergence so far.
    """
    more = []
    for d in drawn:
        makes = [ops[r.producer] for r in refs.get(d.value, ())]
        around = (op for op in ops if op.kind in ("op", "anchor") and op.module and f"{d.node.module}.".startswith(f"{op.module}."))
        op = makes[0] if makes else max(around, key=lambda op: len(op.module), default=ops[-1])  # inside an anchor it has no op of its own
        more.append(Parting(replace(op, module=d.node.module, source=d.node.source), d.what, d.reason))
    return replace(found, semantic=(*found.semantic, *more))


def explained(al: Alignment, key: tuple[int, int], bad: set[tuple[int, int]]) -> bool:
    """Whether one of the edges `bad` is above an anchor's operand, within its region."""
    t = al.training
    wrong = {consumer for consumer, _ in bad}
    return key in bad or any(i in wrong for i in t.above(t.read_by(key[0], [key[1]]), t.is_op) if t.is_op(i))


def find_misplaced(al: Alignment, result: Check, found: Divergence, explained: Callable[[tuple[int, int]], bool]) -> Divergence:
    """Operands that hold the engine's elements, but with other signs or in another order; the value join is blind to both.

    Args:
        al: the alignment.
        result: the check, which is not blind.
        found: what was found before.
        explained: whether an entry of its own explains why an operand differs.
    """
    wrong = [
        k for k, share in result.far.items() if share > MISPLACED and k not in al.parted and k[0] not in found.behind and not explained(k)
    ]
    if not wrong:
        return found
    t, region = al.training, al.regions.region
    regions = {region[r.producer] for op, slot in wrong for r in t.ops[op].operands[slot] if r.producer in region}
    why = "operand {}: its elements are the engine's, but {:.0%} of them with another sign or in another place"
    partings = [Parting(t.ops[op], t.ops[op].target, why.format(slot, result.far[op, slot])) for op, slot in wrong]
    behind = found.behind | {i for i, r in region.items() if r in regions} | {op for op, _ in wrong}
    return replace(found, semantic=(*found.semantic, *partings), behind=frozenset(behind))


class _Finder:
    def __init__(self, al: Alignment, comparison: Comparison, unfolded: dict[str, str], permuted: frozenset[str]) -> None:
        self.permuted = permuted
        self.al, self.comparison, self.unfolded = al, comparison, unfolded
        self.t, self.i = al.training, al.inference
        self.lost = {op.id for op in self.i.ops if op.kind == "anchor" and not al.reverse.get(op.id)}
        """Anchors of the engine without a partner: what they return is unknown to the training side."""

    def run(self, differences: list[Difference]) -> Divergence:
        semantic = [Parting(self.t.ops[d.op], f"{_kind(self.t.ops[d.op])} {d.parameter}", d.reason) for d in differences]
        opaque: list[Parting] = []
        behind = downstream(self.al, {d.op for d in differences})
        for (anchor, slot), why in self.al.parted.items():
            if anchor in self.al.regions.tail and self.t.ops[anchor].kind == "output":
                continue
            if self.t.ops[anchor].target == "logprobs" and not self.al.partners.get(anchor):
                continue  # an inference capture without the tail
            if why is Why.SCALED_OUTSIDE:
                opaque.append(Parting(self.t.ops[anchor], self.t.ops[anchor].target, why))
                continue
            culprit, reason = self._first(anchor, slot, why)
            if reason is None or culprit.id in behind:
                continue
            if (unknown := self._unknown(anchor, slot, culprit)) is not None:
                opaque.append(Parting(culprit, culprit.target, unknown))
            else:
                semantic.append(Parting(culprit, culprit.target, reason))
        behind |= downstream(self.al, {p.op.id for p in (*semantic, *opaque)})
        return Divergence(tuple(semantic), tuple(opaque), frozenset(behind), self._inside())

    def _inside(self) -> dict[int, str]:
        owners = {str(layer): self.i.ops[i].target for i in self.lost if (layer := self.i.ops[i].detail.get("layer"))}
        found: dict[int, str] = {}
        for op in self.t.ops:
            if op.kind in ("op", "anchor") and not self.al.partners.get(op.id):
                name = next((target for owner, target in owners.items() if _within(op, owner)), None)
                if name is not None:
                    found[op.id] = name
        return found

    def _unknown(self, anchor: int, slot: int, culprit: Op) -> str | None:
        """Why a value cannot be expected to join: what the engine's operand depends on, if that is not known."""
        for name in sorted(
            {str(self.t.ops[r.producer].key[1]) for o in culprit.operands for r in o if self.t.ops[r.producer].target == "gemm"}
        ):
            if name in self.permuted:
                return f"the engine holds the rows of {name} in an order that the capture does not record: no value of it can join"
        given = [op.name for op in self.i.ops if op.kind == "input" and op.dtype.startswith(("float", "bfloat"))]
        if given and (unread := self._unread(culprit)) is not None:
            return (
                f"it reads {unread}, which the engine's compiled graph does not read; what the graph is given from outside "
                f"({', '.join(given[:3])}) may be computed with it"
            )
        partners = self.al.partners.get(anchor, ())
        if not partners:
            inside = next((f"the engine runs {m} as one op, and {why}" for m, why in self.unfolded.items() if _within(culprit, m)), None)
            if inside or not self.lost:
                return inside
            if base(culprit.target) in MATMULS and any(self.i.ops[i].target == "attention" for i in self.lost):
                return (
                    "the trainer computes attention op by op, outside any attention function that the recorder knows; the engine has one op"
                )
            names = sorted({self.i.ops[i].target for i in self.lost})
            return f"no inference op matches this anchor; the engine has ops whose inside is not known: {', '.join(names[:3])}"
        for i in partners:
            for x in self.i.above(self.i.read_by(i, range(slot, min(slot + 1, len(self.i.ops[i].operands)))), self.i.is_op):
                y = self.i.ops[x]
                if x in self.lost:
                    return f"the engine's value comes from {y.target} ({y.name}), which has no partner: an opaque op"
                if (why := self.al.unsupported.get(("inference", x))) is not None:
                    return f"the engine's value comes from {y.name}, which could not be evaluated: {why.splitlines()[0]}"
        return None

    def _first(self, anchor: int, slot: int, why: Why) -> tuple[Op, str | None]:
        """The first training op above an anchor's operand whose operands are aligned and whose own value is not."""
        op = self.t.ops[anchor]
        if why is Why.NO_ANCHOR:
            return op, f"{op.target} has no counterpart in the inference graph"
        above = self._above(self.t.read_by(anchor, [slot]))
        routing = self.t.read_by(anchor) if op.target == "composite" else []
        for i in sorted(above | self._above(routing)):  # experts are chosen by one operand and weighed by another
            x = self.t.ops[i]
            if (unread := self._unread(x)) is not None:
                return x, f"it reads {unread}, which the engine's graph does not read"
        for i in sorted(above):
            x = self.t.ops[i]
            if self._placed(i):
                continue
            if ("training", i) in self.al.unsupported:
                return x, None
            if all(self.t.ops[r.producer].kind != "op" or self._placed(r.producer) for o in x.operands for r in o):
                last = [self.t.ops[r.producer] for o in x.operands for r in o if r.producer in self.al.partners]
                tail = f"; last joined: {', '.join(f'{label(y)} {y.name}' for y in last[:3])}" if last else ""
                return x, f"its operands are aligned and its value is not on the inference side{tail}{self._table(x)}"
        if why is Why.NOT_EVALUATED:
            return op, None
        return op, f"operand {slot}: {why}"

    def _above(self, starts: list[int]) -> set[int]:
        """Training ops on the way up from some, these included, up to anchors and aligned residual sums."""
        aligned_sums = self.al.regions.sums & self.al.partners.keys()
        return set(filter(self.t.is_op, self.t.above(starts, lambda i: self.t.is_op(i) and i not in aligned_sums)))

    def _unread(self, op: Op) -> str | None:
        """A parameter that an op reads and the engine's graph does not."""
        read = [self.t.ops[r.producer] for o in op.operands for r in o]
        return next((p.target for p in read if p.kind == "parameter" and p.id not in self.al.partners), None)

    def _placed(self, i: int) -> bool:
        return i in self.al.partners or ("training", i) in self.comparison.interior

    def _table(self, op: Op) -> str:
        bad = {m.op: m for m in self.al.tables if not m.name}
        hit = [bad[r.producer] for o in op.operands for r in o if r.producer in bad]
        return f"; the table it reads differs from the engine's by up to {hit[0].worst:.1f} units in the last place" if hit else ""


def _kind(op: Op) -> str:
    return "attention" if "parameters" in op.detail else op.target  # latent attention is a composite


def _within(op: Op, module: str) -> bool:
    return op.module == module or op.module.startswith(module + ".")


def label(op: Op) -> str:
    """An op in a word or two."""
    if "step" in op.detail:
        return str(op.detail["step"].name)
    return op.target if op.kind in ("op", "anchor") else f"{op.kind} {op.target}"
