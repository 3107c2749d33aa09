"""From a captured inference graph to its dataflow: ops, and edges with the roundings that really happen.

Where a value is rounded (seen on torch 2.13, C++ and Triton backends):
- `to_dtype(x, bf16, use_compute_types=True)` does nothing, `use_compute_types=False` rounds;
- a store into a BF16 buffer rounds for whoever loads it from memory, and not for a load that code generation served
  from a register (`Node.forwarded`, observed while the kernel was generated);
- an expression inlined into another kernel is not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphalign.dataflow.externs import describe
from graphalign.dataflow.held import Held, merged
from graphalign.dataflow.opaque import OpaqueOp
from graphalign.dataflow.partial import sums_a_part
from graphalign.dataflow.ranks import combine
from graphalign.errors import CaptureFileError, UnsupportedOpError
from graphalign.evaluate import aten
from graphalign.evaluate.copies import copied
from graphalign.ir.args import buffers_of, references
from graphalign.ir.dataflow import LOW_PRECISION, Dataflow, Operand, Ref
from graphalign.ir.inference import TAIL, Graph, Node

TRANSPARENT = frozenset({"neg", "identity", "to_dtype", "load", "store", "getitem", "masked"})
"""Targets that make no new value (a sign change commutes with rounding to nearest even)."""
ADDED = "add"
"""The sum in a GEMM call with another summand than a bias, in `Tracer.ids`."""
INDEX_OPS = frozenset({"get_index", "index_expr", "constant", "set_indirect", "check_bounds"})


@dataclass
class _Slot:
    """What an op of a loop body evaluates to, as far as edges go."""

    refs: Operand = ()
    indexing: bool = True
    """Depends on loop indices, constants, run-time inputs and tables only."""
    part: bool = False
    """One rank's part of a sum."""
    made: str = ""
    """The op of the body that computed it from run-time inputs or tables (rotary angles): a table, once something reads it."""


@dataclass
class Tracer(Held):
    """Builds the dataflow of one capture."""

    def run(self) -> Dataflow:
        """Trace all graphs in order.

        Raises:
            CaptureFileError: a kernel reads a buffer that nothing wrote, or refers to a body that is not there.
        """
        for g, graph in enumerate(self.capture.graphs):
            self._graph(g, graph)
        self.notes += self.partial.settle(self.ops)
        flow = Dataflow("inference", tuple(self.ops), tuple(self.notes))
        flow.verify()
        return flow

    def _graph(self, g: int, graph: Graph) -> None:
        self.enter(g, graph)
        for kernel in graph.kernels:
            for node in kernel.nodes:
                if node.kind == "loop":
                    self._loop(g, kernel.generated or kernel.name, node)
                elif node.kind == "extern":
                    self._extern(g, kernel.generated or kernel.name, node)
                elif node.kind == "template":
                    self._opaque(g, kernel.generated or kernel.name, node, None)
        for name in graph.outputs:
            if name in self.buffers or name in self.inputs:
                refs = self.take(g, name)
                if refs and graph.name == TAIL:
                    end = {"graph": g, "buffer": name}
                    self.add(
                        name="logprobs", kind="anchor", target="logprobs", operands=(refs,), where=TAIL, key=("logprobs", 0), detail=end
                    )
                elif refs:
                    self.add(name=f"output.{name}", kind="output", target="output", operands=(refs,), where=graph.name, key=(g, name))
        for e in graph.exports:
            self.exported[e.name] = self.read(g, str(e.tensor.get("b")))
            if self.is_part(str(e.tensor.get("b"))):
                self.partial.exported.add(e.name)

    def _loop(self, g: int, kernel: str, node: Node) -> None:
        body = self.capture.bodies.get(node.body or "")
        if body is None:
            raise CaptureFileError(f"node {node.name} refers to a loop body that is not in the capture", where=f"graph {g}")
        binding = {f"b{i}": b for i, b in enumerate(node.buffers)}
        env: dict[str, _Slot] = {}
        subresults: dict[str, _Slot] = {}
        for name, ops in body.subblocks.items():
            sub: dict[str, _Slot] = dict(env)
            last = _Slot()
            for item in ops:
                last = self._op(g, kernel, node, binding, sub, subresults, f"{name}.", item) or last
            subresults[name] = last
        for item in body.ops:
            self._op(g, kernel, node, binding, env, subresults, "", item)
        known = {b: i for (graph, b), i in self.copies.items() if graph == g}
        if copy := copied(node, body, self.inputs, self.buffers, known):
            self.copies[g, copy[0]] = copy[1]

    def _op(self, g: int, kernel: str, node: Node, binding: dict[str, str], env: dict[str, _Slot],
            subresults: dict[str, _Slot], prefix: str, item: tuple[Any, ...]) -> _Slot | None:  # fmt: skip
        name, target, args, kwargs = item
        if target in ("output", "ops"):
            results = [env[n] for a in args for n in references(a, "n") if n in env]
            return results[0] if results else None
        if target in INDEX_OPS or target.startswith("set_indirect"):
            env[name] = _Slot()
            return env[name]
        operands = [[env.get(n, _Slot()) for n in references(a, "n")] for a in args]
        flat = [s for o in operands for s in o]
        if target == "load":
            buffer = _bound(args[0], binding)
            refs = self.register[buffer] if buffer in node.forwarded and buffer in self.register else self.read(g, buffer)
            refs = tuple(r.through(buffer) if buffer in self.buffers else r for r in refs)
            slot = _Slot(refs, all(self.ops[r.producer].kind in ("input", "table") for r in refs), self.is_part(buffer))
        elif target in ("store", "store_reduction"):
            buffer = _bound(args[0], binding)
            stored = self.buffers.get(buffer)
            floating = stored is None or (stored.dtype or "float").startswith(("float", "bfloat"))
            self.write(buffer, (self._edges(g, kernel, node, flat[-1]) if floating else flat[-1].refs) if flat else ())
            if flat and flat[-1].part:
                self.partial.buffers.add(buffer)
            return flat[-1] if flat else None
        elif target == "to_dtype":
            dtype = next((a["dtype"] for a in args if isinstance(a, dict) and "dtype" in a), "float32")
            rounds = kwargs.get("use_compute_types", True) is False and dtype in LOW_PRECISION
            slot = flat[0] if flat else _Slot()
            if rounds:
                slot = _Slot(tuple(r.rounded(dtype) for r in self._edges(g, kernel, node, slot)), slot.indexing, slot.part)
        elif target in ("neg", "identity", "getitem"):
            slot = flat[0]
            if target == "getitem" and flat and not flat[0].indexing:
                self.ids[g, node.name, prefix + name] = self.ids.get((g, node.name, prefix + _ref(args[0])), -1)
        elif target.startswith("masked_subblock"):
            inner = subresults.get(target, _Slot())
            mask_is_index = all(s.indexing for s in flat)
            slot = _Slot(inner.refs, inner.indexing and mask_is_index, inner.part, inner.made)
            if not mask_is_index:
                slot = self._compute(g, kernel, node, prefix + name, "masked", [*flat, inner])
        elif target == "where" and len(operands) == 3 and all(s.indexing for s in operands[0]):
            picked = [s for o in operands[1:] for s in o]
            if any(s.made for s in picked) and all(s.indexing for s in picked):
                slot = self._constant(g, node, prefix + name, picked)
            else:
                edges = tuple(r for s in picked for r in self._edges(g, kernel, node, s))
                slot = _Slot(merged((), edges), all(s.indexing for s in picked), any(s.part for s in picked))
        elif all(s.indexing for s in flat):
            slot = self._constant(g, node, prefix + name, flat)
        else:
            slot = self._compute(g, kernel, node, prefix + name, _target(target, args), flat)
        env[name] = slot
        return slot

    def _constant(self, g: int, node: Node, name: str, slots: list[_Slot]) -> _Slot:
        refs = merged((), tuple(r for s in slots for r in s.refs))
        if not refs:
            return _Slot()
        self.constant.add((g, node.name, name))
        return _Slot(refs, True, made=name)

    def _edges(self, g: int, kernel: str, node: Node, slot: _Slot) -> Operand:
        """What a reader of a slot gets; a value computed from tables and inputs becomes a table producer of its own."""
        if not slot.made:
            return slot.refs
        if (g, node.name, slot.made) not in self.ids:
            name = f"{node.name}.{slot.made}" + (f"@{g}" if g else "")
            op = self.add(name=name, kind="table", target=slot.made.rsplit(".", 1)[-1], module=node.module, source=node.source or None,
                          where=kernel, key=(name,))  # fmt: skip
            self.ids[g, node.name, slot.made] = op.id
            self.computed[op.id] = (g, node.name)
        return (Ref(self.ids[g, node.name, slot.made]),)

    def _compute(self, g: int, kernel: str, node: Node, name: str, target: str, slots: list[_Slot]) -> _Slot:
        parts = [s.part for s in slots]
        linear = (target in ("add", "sub") and all(parts)) or (target == "mul" and sum(parts) == 1)
        if any(parts) and not linear:
            self.partial.entered.update(r.producer for s in slots if s.part for r in s.refs)
        operands = [self._edges(g, kernel, node, s) for s in slots]
        op = self.add(name=f"{node.name}.{name}", kind="op", target=target, operands=tuple(o for o in operands if o),
                      module=node.module, source=node.source or None, where=kernel)  # fmt: skip
        self.ids[g, node.name, name] = op.id
        if all(operands):
            self.selects(op, target)
        return _Slot((Ref(op.id),), False, any(parts) and linear)

    def _extern(self, g: int, kernel: str, node: Node) -> None:
        args = dict(node.args)
        rule = self.rules.get(node.op)
        if node.op in ("inductor.multi_output", "MultiOutput", "operator.getitem"):
            refs = tuple(r for _, a in node.args for b in references(a, "b") for r in self.register.get(b) or self.read(g, b))
            for out in node.outputs:
                if refs:
                    self.write(out, refs)
                    if any(self.is_part(b) for _, a in node.args for b in references(a, "b")):
                        self.partial.buffers.add(out)
            return
        if rule is None and _evaluable(node.op):
            self._aten(g, node, args)
            return
        combines = rule is not None and rule.kind in ("reduce", "gather", "embedding")
        if combines and rule is not None:
            if combine(self, g, node, rule):
                return
            why = f"{node.op} combines ranks' parts of which the whole is not known here, so what it gives is unknown"
            self.notes += [why] if why not in self.notes else []
        if rule is None or rule.kind == "opaque" or combines:
            self._opaque(g, kernel, node, rule)
            return
        if rule.kind == "effect":
            return

        def edges(arg: str) -> Operand:
            return tuple(r for b in buffers_of(args.get(arg)) for r in self.take(g, b))

        key, operands, detail, weighing = describe(self, node, rule, args, edges)
        written = buffers_of(args[rule.out]) if rule.out in args else list(node.outputs)  # see `returns`
        added = self._added(rule, args, edges(rule.bias)) if rule.kind == "gemm" else ()
        if added:
            detail["bias"] = False
        dtype = "float32" if added else self.dtype_of(written)
        op = self.add(name=node.name, kind="anchor", target=rule.kind, operands=operands, dtype=dtype, module=node.module,
                      source=node.source or None, where=node.op, key=key, detail=detail)  # fmt: skip
        self.ids[g, node.name, ""] = op.id
        if added:
            op = self.add(name=f"{node.name}.add", kind="op", target="add", operands=((Ref(op.id),), added), module=node.module,
                          source=node.source or None, where=kernel)  # fmt: skip
            self.ids[g, node.name, ADDED] = op.id
        for o in written:
            self.write(o, (Ref(op.id),))
            if sums_a_part(weighing):
                self.partial.buffers.add(o)

    def _added(self, rule: OpaqueOp, args: dict[str, Any], bias: Operand) -> Operand:
        """What a GEMM call adds, if it is no bias: on a GPU Inductor makes `mm` and a sum one `addmm`, rounded once (torch 2.13)."""
        plain = args.get("alpha", 1) == 1 and args.get("beta", 1) == 1
        return bias if plain and self.parameter(args.get(rule.bias)) is None else ()

    def _aten(self, g: int, node: Node, args: dict[str, Any]) -> None:
        """An ATen kernel that Inductor calls as it is (`topk`): an op, evaluated as the trainer's are."""
        operands = tuple(refs for a in args.values() if (refs := tuple(r for b in buffers_of(a) for r in self.take(g, b))))
        op = self.add(name=node.name, kind="op", target=node.op, operands=operands, module=node.module, source=node.source or None,
                      where=node.op)  # fmt: skip
        self.ids[g, node.name, ""] = op.id
        self.selects(op)
        for o in node.outputs:
            self.write(o, (Ref(op.id),))

    def _opaque(self, g: int, kernel: str, node: Node, rule: OpaqueOp | None) -> None:
        ignored = set(rule.ignore) if rule else set()
        names = [n for n, _ in node.args if n not in ignored]
        operands = tuple(refs for n in names if (refs := tuple(r for b in buffers_of(dict(node.args)[n]) for r in self.take(g, b))))
        # some write an argument and return a result too (`vllm.moe_forward`, vLLM 0.32)
        written = [*(b for n in node.mutates for b in buffers_of(dict(node.args).get(n))), *node.outputs]
        key = ("opaque", *self.number((node.op, node.module)))
        layer = next((str(a["layer"]) for _, a in node.args if isinstance(a, dict) and "layer" in a), node.module)
        op = self.add(name=node.name, kind="anchor", target=node.op or node.kind, operands=operands, dtype=self.dtype_of(written),
                      module=node.module, source=node.source or None, where=node.op or kernel, key=key,
                      detail={"layer": layer})  # fmt: skip
        self.ids[g, node.name, ""] = op.id
        for o in written:
            self.write(o, (Ref(op.id),))


def _evaluable(op: str) -> bool:
    """Whether an extern call is an ATen op of the closed vocabulary that makes values and is no matrix product."""
    if aten.base(op) in aten.MATMULS | aten.ATTENTIONS or op.endswith(".out"):
        return False
    try:
        aten.resolve(op)
    except UnsupportedOpError:
        return False
    return True


def _bound(arg: Any, binding: dict[str, str]) -> str:
    """The buffer that a body's `{"b": "b3"}` stands for in this kernel."""
    role = str(arg["b"]) if isinstance(arg, dict) and "b" in arg else str(arg)
    return binding.get(role, role)


def _ref(arg: Any) -> str:
    return next(iter(references(arg, "n")), "")


def _target(target: str, args: Any) -> str:
    if target == "reduction":
        kind = next((a for a in args if isinstance(a, str)), "reduction")
        return f"reduction.{kind}"
    return target
