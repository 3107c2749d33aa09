"""What lies behind one operand of the training graph, to evaluate that part again with other edits."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from graphalign.errors import UnsupportedOpError
from graphalign.evaluate import run_training
from graphalign.evaluate.run_training import Edits
from graphalign.ir.dataflow import Op

HORIZON = 2
"""An edit's effect is followed across this many residual sums."""


class Behind:
    """The nodes that depend on a consumer, within the horizon, and the anchor operands that they reach.

    Args:
        base: a finished evaluation.
        edits: those of the evaluation to come.
        consumer: the training op from which on it differs.
        sums: residual sums, which end the horizon.
    """

    def __init__(self, base: run_training.Run, edits: Edits, consumer: int, sums: frozenset[int]) -> None:
        self.base, self.edits, self.consumer = base, edits, consumer
        self.nodes: list[int] = []
        """Depending nodes, ascending."""
        self.affected: dict[int, int] = {}
        """Values that they compute, numbered."""
        self.reached: list[tuple[int, int]] = []
        """Anchor operands that the graph says are affected."""
        tracer, ops = base.tracer, base.tracer.ops
        readers = tracer.readers()
        first = ops[consumer].detail.get("node", 0)
        queue, queued = [first], {first}
        crossed = 0
        while queue:
            n = heapq.heappop(queue)
            op = tracer.op_of_node.get(n)
            if op is not None and ops[op].kind == "anchor":
                self.reached += self._changed_slots(ops[op]) if n == first else self._affected_slots(ops[op], n)
                self.nodes.append(n)
                continue
            if op is not None and op in sums:
                crossed += 1
                if crossed > HORIZON:
                    break
            self.nodes.append(n)
            for o in base.capture.nodes[n].outputs:
                if o is not None:
                    self.affected.setdefault(o.id, len(self.affected))
                    for reader in readers.get(o.id, ()):
                        if reader not in queued:
                            queued.add(reader)
                            heapq.heappush(queue, reader)
        self.position = {n: k for k, n in enumerate(self.nodes)}

    def _changed_slots(self, op: Op) -> list[tuple[int, int]]:
        slots = [(op.id, s) for s in range(len(op.operands))]
        return [at for at in slots if self.base.edits.touches(at) != self.edits.touches(at)]

    def _affected_slots(self, op: Op, n: int) -> list[tuple[int, int]]:
        return [(op.id, slot) for slot, v in self.base.tracer.slots(n) if v in self.affected]

    def evaluate(self) -> Redo:
        """Evaluate these nodes again, with the other edits."""
        return Redo.start(self)

    # -- equal surroundings -----------------------------------------------------------------------------------------------

    def place_of(self, reached: tuple[int, int]) -> tuple[int, int]:
        """A reached operand, relative to the nodes."""
        return self.position[self.base.tracer.ops[reached[0]].detail["node"]], reached[1]

    def signature(self, slot: int) -> object:
        """All that the evaluation depends on: ops, their edits, and the identities of what they read from outside.

        Two of these that are equal give equal results, in whichever layers they are.

        Args:
            slot: the consumer's operand whose edit differs.
        """
        base, tracer = self.base, self.base.tracer
        parts: list[object] = []
        for n in self.nodes:
            node = base.capture.nodes[n]
            op = tracer.op_of_node.get(n)
            parts.append((tracer.signature(n), op is None, tuple(None if o is None else o.dtype for o in node.outputs)))
            read: list[tuple[tuple[int, int] | None, int]]
            if op is None:
                read = [(None, v) for v in tracer.operand_values(n)]
            elif tracer.ops[op].kind == "anchor":
                read = [((op, s), v) for s, v in tracer.slots(n)]  # weights are not compared
                parts.append((tracer.ops[op].target, len(tracer.ops[op].operands)))
            else:
                read = [(None if s is None else (op, s), v) for s, v in tracer.op_slots(n)]
            for at, v in read:
                edit = at and (at in self.edits.keep, self.edits.round.get(at), at == (self.consumer, slot))
                parts.append((edit, self.affected[v]) if v in self.affected else (edit, *self._outside(v)))
        return tuple(parts)

    def _outside(self, v: int) -> tuple[int, int]:
        """A value that stays as it is: its identity as it is read, and as it was before it was rounded."""
        try:
            return self.base.value(v).id, self.base.unrounded(v).id
        except UnsupportedOpError:
            return -1 - v, -1 - v  # like no other
        except KeyError:  # its op was not evaluated
            return -1 - v, -1 - v


class Redo(run_training.Run):
    """Re-evaluates only what depends on one consumer, over a finished run."""

    @classmethod
    def start(cls, behind: Behind) -> Redo:
        """Evaluate the nodes again."""
        base = behind.base
        self = cls(base.capture, base.tracer, base.arithmetic, base.snapped, None, behind.edits, native=base.native, memo=None)
        self.env = _Overlay(base.env, behind.affected)
        self.values = dict(base.values)
        for n in behind.nodes:
            op = base.tracer.op_of_node.get(n)
            if op is None:
                continue
            if base.tracer.ops[op].kind == "anchor":
                self._record_operands(base.tracer.ops[op], n)
            else:
                self._compute(base.tracer.ops[op], n, [o.id for o in base.capture.nodes[n].outputs if o is not None])
        return self


class _Overlay(dict[int, Any]):
    """Values of a finished run, without those that depend on a changed op."""

    def __init__(self, base: Mapping[int, Any], affected: Mapping[int, int]) -> None:
        super().__init__()
        self.base, self.affected = base, affected

    def __contains__(self, v: object) -> bool:
        return super().__contains__(v) or (v in self.base and v not in self.affected)

    def __missing__(self, v: int) -> Any:
        if v in self.affected:
            raise KeyError(v)
        return self.base[v]
