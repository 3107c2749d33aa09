"""Evaluating the inference graph: kernels in order, loop bodies interpreted over index tensors.

A body is evaluated once per distinct inputs: equal layers cost a dictionary look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphalign.dataflow.trace_inference import ADDED, Tracer
from graphalign.errors import UnsupportedOpError
from graphalign.evaluate import aten
from graphalign.evaluate.interpret import Interpreter
from graphalign.evaluate.memory import Memory
from graphalign.evaluate.outputs import handed_on, output_of
from graphalign.evaluate.picks import Pick
from graphalign.evaluate.run_training import Arranged, canonical
from graphalign.evaluate.storage import Storage
from graphalign.evaluate.values import Arithmetic, Val
from graphalign.ir.args import buffers_of
from graphalign.ir.dataflow import Op
from graphalign.ir.indexing import evaluate as index_value
from graphalign.ir.inference import Body, Graph, InferenceGraph, Node

Replace = Callable[[Val], Val]


@dataclass
class Run:
    """One evaluation. After `run()`, `values` holds every op's result before any store, by op index."""

    capture: InferenceGraph
    tracer: Tracer
    arithmetic: Arithmetic
    replace: Replace | None = None
    values: dict[int, Val] = field(default_factory=dict)
    operands: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Operands of anchors and outputs: (op, slot) to a flat or shaped tensor in the buffer's layout."""
    arranged: Arranged = field(default_factory=dict)
    """For operands that were sorted, see `canonical`."""
    unsupported: dict[int, str] = field(default_factory=dict)
    picks: dict[int, Pick] = field(default_factory=dict)
    """Identity of a value to why what picked it took one side only."""
    reads: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] | None = None
    """See `Memory`."""
    only: set[tuple[int, str]] | None = None
    """Evaluate these loop nodes (graph, name) only; everything else stays unknown."""
    _nodes: dict[Any, dict[str, Val | str]] = field(default_factory=dict)
    _stored: dict[Any, list[tuple[str, torch.Tensor, torch.Tensor, str, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = self.make_memory()
        self.results: dict[str, list[torch.Tensor]] = {}
        """What calls of the current graph returned, by buffer."""

    def make_memory(self) -> Memory:
        """The buffers, before anything is written."""
        return Memory(self.capture, self.arithmetic, self.tracer.copies, self.reads)

    def run(self) -> Run:
        """Evaluate all graphs in order."""
        for g, graph in enumerate(self.capture.graphs):
            self.graph(g, graph)
        memory = self.memory
        for op in self.tracer.ops:
            if op.kind == "table" and op.key[0] in memory.tables and (missing := memory.unrecorded.get(memory.table_key(op.key[0]))):
                some = ", ".join(str(n) for n in sorted(missing)[:3])
                self.unsupported[op.id] = f"it is read at rows that the capture does not hold ({some}{', …' if len(missing) > 3 else ''})"
        return self

    def graph(self, g: int, graph: Graph) -> None:
        self.memory.enter(g, graph)
        self.results = {}
        for kernel in graph.kernels:
            for node in kernel.nodes:
                if self.only is not None and (g, node.name) not in self.only:
                    continue
                if node.kind == "loop":
                    self._loop(node)
                else:
                    self.anchor(node)
        for e in graph.exports:
            self.memory.export(e)
        if self.only is not None:
            return
        for op in self.tracer.ops:
            if op.kind == "output" and op.key[0] == g:
                self.operands[op.id, 0] = self.memory.contents(op.key[1])
            elif op.target == "logprobs" and op.detail["graph"] == g:
                self.operands[op.id, 0] = self.memory.contents(op.detail["buffer"])

    # -- anchors --------------------------------------------------------------------------------------------------------

    def anchor(self, node: Node) -> None:
        args = dict(node.args)
        if node.op == "inductor.multi_output":
            self._pick(node, args)
            return
        if (self.memory.g, node.name) in self.tracer.partial.handed_on:
            self._hand_on(node, args)
            return
        op_id = self.tracer.ids.get((self.memory.g, node.name, ""))
        if op_id is None:
            return
        op = self.tracer.ops[op_id]
        if op.kind == "op":
            self._aten(op, node, args)
            return
        rule = self.tracer.rules.get(node.op)
        names = (
            [rule.input] if rule and rule.kind == "gemm" else list(rule.operands) if rule and rule.operands else [n for n, _ in node.args]
        )
        slot = 0
        for n in names:
            arg = args.get(n)
            if not buffers_of(arg):
                continue
            if slot < len(op.operands):
                self.operands[op.id, slot] = self.memory.argument(arg)
                slot += 1
        canonical(self.operands, op, self.arithmetic.tokens, self.arranged)
        written = [b for n in ([rule.out] if rule and rule.out else node.mutates) for b in buffers_of(args.get(n))] or list(node.outputs)
        for o in written:
            root, _ = self.memory.root(o)
            b = self.memory.buffers.get(root)
            if b is None or b.dtype is None or not b.size:
                continue
            val = output_of(self.memory, op, b)
            self.values[op.id] = val
            if (added := self.tracer.ids.get((self.memory.g, node.name, ADDED))) is not None and rule is not None:
                total = self.arithmetic.settle(val.data + self.memory.argument(args[rule.bias]).reshape(val.data.shape))
                self.values[added] = total if self.replace is None else self.replace(total)
                self.memory.place(o, self.values[added].data)
                continue
            self.memory.live[root] = Storage(("anchor", val.id), val.data.reshape(-1), val.data.reshape(-1))

    def _hand_on(self, node: Node, args: dict[str, Any]) -> None:
        """A call that combines the ranks of the engine."""
        producer = self.tracer.ops[self.tracer.partial.handed_on[self.memory.g, node.name][0].producer]
        data = handed_on(self.memory, self.tracer.rules[node.op], args, producer)
        if data is not None:
            for o in node.outputs:
                self.results[o] = [data]
                self.memory.place(o, data)

    def _pick(self, node: Node, args: dict[str, Any]) -> None:
        """One output of an extern call with several."""
        sources = buffers_of(args.get("self"))
        path = args.get("indices") or []
        results = self.results.get(sources[0]) if sources else None
        if results is None or (path and not 0 <= path[0] < len(results)):
            return
        for o in node.outputs:
            self.memory.place(o, results[path[0] if path else 0])

    def _aten(self, op: Op, node: Node, args: dict[str, Any]) -> None:
        """An ATen kernel called as it is, on what its operands hold in memory."""
        try:
            given = {k: self._decode(a) for k, a in args.items()}
            if any(isinstance(x, torch.Tensor) and x.is_floating_point() and bool(x.isnan().any()) for x in given.values()):
                raise UnsupportedOpError("an operand could not be evaluated")
            with torch.no_grad():
                result = aten.resolve(node.op)(**{k: x for k, x in given.items() if x is not None})
        except (UnsupportedOpError, RuntimeError, TypeError, ValueError, IndexError) as e:
            self.unsupported[op.id] = f"{node.op} could not be evaluated: {str(e).splitlines()[0]}"
            return
        results = [x for x in (result if isinstance(result, tuple | list) else [result]) if isinstance(x, torch.Tensor)]
        first = results[0].double() if results[0].is_floating_point() else results[0]
        self.values[op.id] = self.arithmetic.settle(first)
        for o in node.outputs:
            self.results[o] = results
            if not isinstance(result, tuple | list):
                self.memory.place(o, results[0])

    def _decode(self, a: Any) -> Any:
        """An argument of an ATen kernel."""
        if isinstance(a, dict):
            if "b" in a or "size" in a:
                x = self.memory.argument(a)
                b = self.memory.buffers.get(str(a.get("b"))) if "size" not in a else None
                return x if b is None else x.view([self.memory.size(s) for s in b.size])
            if "f" in a:
                return float(a["f"])
            if "e" in a:
                return int(index_value(a["e"], self.memory.env))
            if "dtype" in a:
                dtype = getattr(torch, str(a["dtype"]), None)
                return torch.float64 if isinstance(dtype, torch.dtype) and dtype.is_floating_point else dtype
            return None
        return [self._decode(x) for x in a] if isinstance(a, list | tuple) else a

    # -- loops ----------------------------------------------------------------------------------------------------------

    def _loop(self, node: Node) -> None:
        if any((self.memory.g, b) in self.tracer.copies for b in node.outputs):
            return
        body = self.capture.bodies[node.body or ""]
        binding = {f"b{i}": b for i, b in enumerate(node.buffers)}
        inputs = []
        for role, name in binding.items():
            root, offset = self.memory.root(name)
            source = self.memory.source(name) if name in self.memory.inputs or root in self.memory.live else None
            inputs.append(
                (
                    role,
                    source.id if source else None,
                    offset,
                    name in node.forwarded,
                    (self.memory.buffers[name].dtype if name in self.memory.buffers else ""),
                )
            )
        key = (node.body, self.memory.symbols, tuple(inputs)) if self.arithmetic.share else (self.memory.g, node.name)
        if key not in self._nodes:
            self._nodes[key], self._stored[key] = self.interpret(body, binding, node)
        for name, val in self._nodes[key].items():
            op = self.tracer.ids.get((self.memory.g, node.name, name))
            if op is None or op < 0:
                continue
            if isinstance(val, str):
                self.unsupported[op] = val
            else:
                self.values[op] = val
        for role, index, data, mode, identity in self._stored[key]:
            # known content makes equal layers equal, whatever led to it
            content = (node.body, "value", identity) if identity else (node.body, "inputs", self.memory.number(key))
            self.memory.store(binding[role], role, index, data, mode, content)

    def interpret(self, body: Body, binding: dict[str, str], node: Node) -> tuple[dict[str, Val | str], list[Any]]:
        return Interpreter(self.memory, body, binding, node, self.tracer.constant, self.replace, self.picks).run()


def computed_tables(capture: InferenceGraph, tracer: Tracer, arithmetic: Arithmetic) -> dict[str, torch.Tensor]:
    """The tables that the engine's kernels compute from positions (rotary cosines in some models).

    Returns:
        Name of the table's op to its float64 content, in the kernel's own layout. Empty if there are none.
    """
    if not tracer.computed:
        return {}
    run = Run(capture, tracer, arithmetic, only=set(tracer.computed.values())).run()
    return {tracer.ops[i].name: run.values[i].data for i in tracer.computed if i in run.values}
