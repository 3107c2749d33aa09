"""Variants of a patch to score beside it: the negated map, and everything in FP32."""

from __future__ import annotations

from typing import Literal

from graphalign.align.align import Alignment
from graphalign.align.edges import Comparison, Finding
from graphalign.ir.dataflow import Dataflow
from graphalign.patch.make import key_of
from graphalign.patch.spec import Edit, Group, PatchSpec
from graphalign.sites.ends import Ends, layer_of


def negated(spec: PatchSpec, al: Alignment, comparison: Comparison, ends: Ends) -> PatchSpec:
    """The opposite of the rounding map: where inference keeps a value, it is rounded (sites stay as the stock model has them,
    and what neither side rounds is rounded too)."""
    edits = [
        _edit(f, "round", "bfloat16", al.training, ends)
        for f in comparison.findings
        if _inner(f, al.training) and not f.training and f.inference == ()
    ]
    return spec.model_copy(update={"groups": (Group(name="negated", edits=tuple(edits)),)})


def everything_fp32(spec: PatchSpec, al: Alignment, comparison: Comparison, ends: Ends) -> PatchSpec:
    """Over-patched: no rounding between any two pointwise ops, wherever inference rounds."""
    edits = [_edit(f, "keep", f.training[-1], al.training, ends) for f in comparison.findings if _inner(f, al.training) and f.training]
    return spec.model_copy(update={"groups": (Group(name="everything_fp32", edits=tuple(edits)),)})


def _inner(f: Finding, flow: Dataflow) -> bool:
    return flow.ops[f.producer].kind == "op" and flow.ops[f.consumer].kind == "op"


def _edit(f: Finding, kind: Literal["keep", "round"], fmt: str, flow: Dataflow, ends: Ends) -> Edit:
    consumer, producer = layer_of(flow.ops[f.consumer].module), layer_of(flow.ops[f.producer].module)
    layers = "" if consumer is None else str(consumer)
    return Edit(kind=kind, format=fmt, producer=key_of(ends.end(f.producer)), consumer=key_of(ends.end(f.consumer, f.slot)),
                operand=f.slot, layers=layers, producer_layers="" if producer is None else str(producer))  # fmt: skip
