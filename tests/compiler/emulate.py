"""Eager execution of a recorded graph with edited roundings, in real dtypes: what a patched trainer would compute.

Independent of `graphalign.evaluate`: every recorded op runs as the kernel the trainer runs. An op one of whose operands
is kept reads that operand in FP32, computes in FP32 and rounds its result when it stores it, as eager pointwise kernels do
inside anyway.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphalign.align.edges import Finding
from graphalign.ir.training import Node
from tests.compiler.ground import Case

GEMMS = ("aten.mm.default", "aten.addmm.default")
LOW = (torch.bfloat16, torch.float16)


@dataclass
class Emulation:
    """What each GEMM read, in execution order, and the output."""

    operands: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    output: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    wrong_gemms: list[str] = field(default_factory=list)
    """GEMMs whose eager result on the engine's operand is not bitwise the engine's result."""


def emulate(case: Case, edits: Iterable[Finding], *, kept: Iterable[tuple[int, int]] = ()) -> Emulation:
    """Run the training graph with edits; every GEMM's result is the engine's own, so regions are judged one by one.

    Args:
        case: the captures, real weights and inputs, and the engine's GEMM results.
        edits: `keep` and `round` findings to apply.
        kept: more operands to keep, as (op, slot) of the training dataflow.
    """
    keep = {(f.consumer, f.slot) for f in edits if f.verdict == "keep"} | set(kept)
    rounded = {(f.consumer, f.slot): f.inference[-1] for f in edits if f.verdict == "round" and f.inference}
    return _Emulator(case, keep, rounded).run()


class _Emulator:
    def __init__(self, case: Case, keep: set[tuple[int, int]], rounded: dict[tuple[int, int], str]) -> None:
        self.case, self.keep, self.rounded = case, keep, rounded
        self.stored: dict[int, torch.Tensor] = {}
        self.wide: dict[int, torch.Tensor] = {}
        """The same values as they were before the last rounding of their producers."""
        self.out = Emulation()
        self.calls = {c.parameter: c for c in case.truth.calls}
        self.ops = {op.detail["node"]: op for op in case.pair.flow_t.ops if "node" in op.detail}

    def run(self) -> Emulation:
        named = {**dict(self.case.module.named_parameters()), **dict(self.case.module.named_buffers()), **self.case.inputs}
        for i in self.case.training.inputs:
            x = named.get(i.name)
            if x is None:
                assert i.data is not None, i
                x = torch.frombuffer(bytearray(base64.b64decode(i.data)), dtype=getattr(torch, i.value.dtype)).view(i.value.shape)
            self.stored[i.value.id] = self.wide[i.value.id] = x.detach()
        with torch.no_grad():
            for n, node in enumerate(self.case.training.nodes):
                self._node(n, node)
        self.out.output = self.stored[self.case.training.outputs[0]]
        return self.out

    def _node(self, n: int, node: Node) -> None:
        refs = _refs([*node.args, *node.kwargs.values()])
        op = self.ops.get(n)
        if op is None:  # a cast, a view, a copy, or a constant
            self._put(node, _call(node, [self.stored[v] for v in refs]), _call(node, [self.wide[v] for v in refs], widen=True))
            return
        slots, slot = {}, 0
        for k, v in enumerate(refs):
            if slot < len(op.operands) and self.case.pair.training.edges(v) == op.operands[slot]:
                slots[k] = (op.id, slot)
                slot += 1
        if node.op in GEMMS:
            self._gemm(node, refs)
            return
        kept = any(s in self.keep for s in slots.values())
        args = [self.wide[v] if slots.get(k) in self.keep else self.stored[v] for k, v in enumerate(refs)]
        args = [a.to(getattr(torch, self.rounded[s])).to(a.dtype) if (s := slots.get(k)) in self.rounded else a for k, a in enumerate(args)]
        wide = _call(node, [_up(a) for a in args], widen=True)
        native = wide if kept else _call(node, args)
        self._put(node, native, wide)

    def _gemm(self, node: Node, refs: list[int]) -> None:
        tensors = [self.stored[v] for v in refs]
        owner = next(n for n, p in self.case.module.named_parameters() if any(t.data_ptr() == p.data_ptr() for t in tensors))
        x = tensors[0]
        self.out.operands.append((owner, x))
        call = self.calls[owner]
        eager = _call(node, [call.operand.view(x.shape), *tensors[1:]])
        if not torch.equal(eager, call.result.view(eager.shape)):
            self.out.wrong_gemms.append(owner)
        result = call.result.view(eager.shape)
        self._put(node, result, result)

    def _put(self, node: Node, native: Any, wide: Any) -> None:
        several = isinstance(native, tuple | list)
        natives, wides = (list(native), list(wide)) if several else ([native], [wide])
        for v, x, w in zip(node.outputs, natives, wides, strict=False):
            if v is not None:
                dtype = getattr(torch, v.dtype)
                self.stored[v.id] = x.to(dtype)
                self.wide[v.id] = _up(w)


def _up(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in LOW else x


def _refs(args: Any) -> list[int]:
    if isinstance(args, dict):
        return [args["v"]] if "v" in args else []
    return [v for a in args for v in _refs(a)] if isinstance(args, list | tuple) else []


def _call(node: Node, tensors: list[torch.Tensor], *, widen: bool = False) -> Any:
    """Run an op's own kernel; `widen`: casts to low precision go to FP32 instead."""
    _, name, overload = node.op.split(".")
    queue = iter(tensors)

    def decode(a: Any) -> Any:
        if isinstance(a, dict):
            if "v" in a:
                return next(queue)
            if "dtype" in a:
                dtype = getattr(torch, a["dtype"])
                return torch.float32 if widen and dtype in LOW else dtype
            return None
        return [decode(x) for x in a] if isinstance(a, list | tuple) else a

    args = [decode(a) for a in node.args]
    kwargs = {k: x for k, a in node.kwargs.items() if (x := decode(a)) is not None}
    name = name[:-1] if name.endswith("_") else name
    return getattr(getattr(torch.ops.aten, name), overload)(*args, **kwargs)


def agreement(case: Case, run: Emulation) -> dict[str, float]:
    """Share of bitwise equal elements, per GEMM operand, by the GEMM's parameter."""
    calls = {c.parameter: c.operand for c in case.truth.calls}
    assert {n for n, _ in run.operands} == set(calls)
    return {n: float((x.reshape(-1) == calls[n].reshape(-1)).float().mean()) for n, x in run.operands}


def negated(case: Case) -> set[tuple[int, int]]:
    """The map turned around: what the sites keep is rounded, and every other rounding between two ops is kept."""
    t = case.pair.flow_t.ops
    sites = {(f.consumer, f.slot) for f in case.sites}
    return {
        (f.consumer, f.slot)
        for f in case.comparison.findings
        if f.training and t[f.producer].kind == t[f.consumer].kind == "op" and (f.consumer, f.slot) not in sites
    }
