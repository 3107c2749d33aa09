"""Who reads which value of a trace, and what the spec demands of every read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import networkx as nx
import torch

from graphalign.errors import PatchError
from graphalign.evaluate.parts import SEPARATOR
from graphalign.patch.spec import PatchSpec
from graphalign.rewrite.units import concrete
from graphalign.source.watch import Op, Seen, Trace

STEPS: dict[tuple[str, str, int], int] = {
    ("native_layer_norm", "mean", 0): 0,
    ("native_layer_norm", "weighted", 1): 1,
    ("native_layer_norm", "shifted", 1): 2,
}
"""(op, step, operand of the step) to the op's operand, of those that a generated file can take apart."""
LOW = frozenset({torch.bfloat16, torch.float16})
Read = tuple[int, int]
"""(event of the op, operand)"""


class Flow:
    """Values of a trace as a graph: an edge from the operand of a transparent op to its result.

    Attributes:
        unrounded, rounded: reads that `keep` and `round` edits name.
        wide: ops that must compute in FP32 and do not in the stock model.
        roots: ops whose result is FP32 in the generated code until something rounds it.
        norms: names of the `nn.LayerNorm` modules.
        apart: LayerNorms whose mean reads the input unrounded, and whose other steps read it rounded.
    """

    def __init__(self, trace: Trace, spec: PatchSpec) -> None:
        self.events, self.dtype, self.dims, self.norms = trace.events, trace.dtype, trace.dims, trace.norms
        self.apart: set[int] = set()
        self.ops = {i: e for i, e in enumerate(self.events) if isinstance(e, Op)}
        self.maker: dict[int, int] = {}
        self.readers: dict[int, list[Read]] = defaultdict(list)
        self.onward: dict[int, list[Read]] = defaultdict(list)
        self.seen: dict[int, list[int]] = defaultdict(list)
        self.evaluations: dict[int, list[int]] = defaultdict(list)
        self.graph = nx.DiGraph()
        for i, e in enumerate(self.events):
            if isinstance(e, Seen):
                if e.value >= 0:
                    self.seen[e.value].append(i)
                    self.evaluations[e.span].append(i)
                continue
            for u in e.outs:
                self.maker.setdefault(u, i)
                self.graph.add_node(u)
            for s, u in enumerate(e.ins):
                self.graph.add_node(u)
                (self.onward if e.transparent else self.readers)[u].append((i, s))
                if e.transparent:
                    self.graph.add_edges_from((u, v) for v in e.outs if v != u)
                if e.op == "copy" and s == 1 and self.low(e.outs[0]):
                    self.readers[u].append(
                        (i, s)
                    )  # a write into a tensor of the low format rounds, behind what widens the value (`expand`)
        self.sites: dict[Read, str] = {}
        """Reads that edits name, to the site."""
        self.unrounded, self.rounded = self._demands(spec)
        self._refuse_in_place()
        made = {r for read in self.unrounded for r in self.roots_of(self.operand(read))}
        self.wide = {i for i in made | {i for i, _ in self.unrounded} if self.low(self.ops[i].outs[0])}
        self.roots = self.wide | made
        self._widened: dict[int, set[int]] | None = None
        self._served: dict[int, set[str]] = defaultdict(set)

    def _demands(self, spec: PatchSpec) -> tuple[set[Read], set[Read]]:
        at = {(e.module, e.function, e.op, e.ordinal): i for i, e in self.ops.items()}
        keep: set[Read] = set()
        round_: set[Read] = set()
        for group in spec.groups:
            for edit in group.edits:
                k = edit.consumer
                for layer, _ in edit.pairs():
                    op, _, step = k.op.partition(SEPARATOR)
                    key = (concrete(k.module, layer), k.function, op, k.ordinal)
                    operand = edit.operand
                    if step and key in at:
                        found = STEPS.get((op, step, operand))
                        if key[0] not in self.norms or found is None or edit.kind != "keep":
                            raise PatchError(
                                f"an edit of {group.name} is a step inside {op}, and no expression of a modeling file runs it",
                                where=f"{self.ops[at[key]].text}; in {key[0]}",
                                hint="use `graphalign.apply`, which takes the op apart",
                            )
                        operand = found
                        if operand == 0:
                            self.apart.add(at[key])
                    if key not in at:
                        raise PatchError(
                            f"no expression runs the op that an edit of {group.name} names: {k.op}#{k.ordinal} of {k.function}",
                            where=f"{key[0]}: {k.text}", hint="regenerate the patch with this version of Transformers",
                        )  # fmt: skip
                    i = at[key]
                    if operand >= len(self.ops[i].ins):
                        raise PatchError(f"{k.op}#{k.ordinal} of {k.function} has no operand {operand}", where=f"{key[0]}: {k.text}")
                    (keep if edit.kind == "keep" else round_).add((i, operand))
                    self.sites[i, operand] = edit.site
        return keep, round_

    def _refuse_in_place(self) -> None:
        for i, e in self.ops.items():
            if e.op != "copy" and not e.transparent and e.outs and e.outs[0] in e.ins and self.low(e.outs[0]):
                after = any(r in self.unrounded for r in self.below(e.outs[0], i))
                if after or any((i, s) in self.unrounded for s in range(len(e.ins))):
                    raise PatchError(
                        f"{e.op} in {e.function} writes its result, which stays unrounded, into a tensor of the low format",
                        where=f"{e.text}; in {e.module}", hint="use `graphalign.apply`, which writes it out of place",
                    )  # fmt: skip

    def served(self, op: int) -> set[str]:
        """Sites for which an op computes in FP32: what it reads unrounded, and who reads its result so."""
        if not self._served:
            for read in self.unrounded:
                for i in {read[0], *self.roots_of(self.operand(read))}:
                    self._served[i].add(self.sites[read])
        return self._served[op] - {""}

    def low(self, value: int) -> bool:
        """Whether a value is below FP32 in the stock model."""
        return self.dtype[value] in LOW

    def operand(self, read: Read) -> int:
        """The value that is read."""
        return self.ops[read[0]].ins[read[1]]

    def chain(self, value: int) -> set[int]:
        """A value and what it is the same as, back to the op that made it."""
        return {value, *nx.ancestors(self.graph, value)}

    def uncast(self, value: int, stay: set[int]) -> int:
        """The value of which one is a cast that does nothing, or is gone, in the generated code; `stay`: casts that remain, events."""
        while (m := self.maker.get(value)) is not None and m not in stay and self.ops[m].op in ("_to_copy", "to"):
            value = self.ops[m].ins[0]
        return value

    def roots_of(self, value: int) -> set[int]:
        """The ops that made a value."""
        return {i for v in self.chain(value) if (i := self.maker.get(v)) is not None and not self.ops[i].transparent}

    def below(self, value: int, after: int) -> Iterator[Read]:
        """Reads of a value, through transparent ops, after an event."""
        yield from (r for r in self.readers[value] if r[0] > after)
        later = {v for i, _ in self.onward[value] if i > after for v in self.ops[i].outs if v != value}
        for v in later | {w for u in later for w in nx.descendants(self.graph, u)}:
            yield from self.readers[v]

    def read_unrounded(self, value: int, after: int, before: int | None = None) -> bool:
        """Whether somebody reads the value unrounded between two events."""
        return any(r in self.unrounded for r in self.below(value, after) if before is None or r[0] < before)

    def widened(self) -> dict[int, set[int]]:
        """Value to the roots whose FP32 result it is, or comes from."""
        if self._widened is None:
            self._widened = defaultdict(set)
            for root in self.roots:
                for u in self.ops[root].outs:
                    for v in {u} | nx.descendants(self.graph, u):
                        self._widened[v].add(root)
        return self._widened

    def add_roots(self, found: set[int]) -> None:
        """More ops whose result is FP32 now."""
        self.roots |= found
        self._widened = None

    def rounds(self, i: int) -> bool:
        """Whether an event is a cast from FP32 to a lower format."""
        e = self.ops.get(i)
        return e is not None and e.op in ("_to_copy", "to") and self.low(e.outs[0]) and self.dtype[e.ins[0]] == torch.float32

    def needs_rounded(self, read: Read) -> bool:
        """Whether a read takes a rounded value, in the stock model and in the patched one."""
        return read not in self.unrounded and any(self.low(v) for v in self.chain(self.operand(read)))
