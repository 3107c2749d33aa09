"""Comparing what matched anchors are: attention parameters, and whether a GEMM adds a bias. A difference is semantic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphalign.align.align import Alignment, Pair
from graphalign.align.masks import OLD, compare_masks
from graphalign.ir.dataflow import Op
from graphalign.ir.inference import Attention

SCALE_TOLERANCE = 2.0**-20
"""Relative: one side may keep its scale in FP32."""


@dataclass(frozen=True)
class Difference:
    """One matched anchor that is not the same on both sides."""

    op: int
    """Training op."""
    parameter: str
    reason: str


@dataclass
class Anchors:
    """What matched anchors are."""

    differences: list[Difference] = field(default_factory=list)
    """In execution order."""
    unknown: dict[int, str] = field(default_factory=dict)
    """Attention of the trainer of which something was not compared: what, and why."""
    old: int = 0
    """Attentions of a capture that records no masks: windows are compared as configured."""


def compare_anchors(pair: Pair, al: Alignment) -> Anchors:
    """Compare what matched anchors are."""
    layers = {a.layer: a for a in pair.capture_i.attention}
    longest = pair.capture_t.header.model.get("max_position_embeddings") or pair.capture_i.header.model.get("max_position_embeddings")
    out = Anchors()
    for op in al.training.ops:
        if op.kind != "anchor":
            continue
        if (words := al.other_weight.get(op.id)) is not None:
            out.differences.append(Difference(op.id, "weight", words))
        for i in al.partners.get(op.id, ())[:1]:
            other = al.inference.ops[i]
            if op.target == "attention" or op.detail.get("parameters"):
                layer = layers.get(str(other.detail.get("layer")))
                if layer is None:
                    out.unknown[op.id] = "the engine's capture does not say what this layer does, so nothing of it was compared"
                    continue
                found, unknown = _attention(op, _shape(pair, op), layer, longest, al.rescaled.get(op.id, 1.0))
                out.differences += [Difference(op.id, name, why) for name, why in found]
                out.old += OLD in unknown
                if said := [x for x in unknown if x != OLD]:
                    out.unknown[op.id] = "; ".join(said)
            elif op.target == "gemm" and bool(op.detail.get("bias")) != bool(other.detail.get("bias")):
                here, there = ("adds a bias", "adds none") if op.detail.get("bias") else ("adds no bias", "adds one")
                out.differences.append(Difference(op.id, "bias", f"the trainer's {op.target} {here}, the engine's {there}"))
    return out


def _shape(pair: Pair, op: Op) -> tuple[int, ...]:
    first = pair.capture_t.nodes[op.detail["node"]].outputs[0]
    return first.shape if first is not None else ()


def _attention(op: Op, shape: tuple[int, ...], engine: Attention, longest: Any, factor: float) -> tuple[list[tuple[str, str]], list[str]]:
    """Parameters of an attention anchor that differ, with the reason; and what was not compared, and why.

    A window counts the token itself on both sides (Transformers' `sliding_window`, `Attention.window`); one that no sequence
    exceeds is none. A missing scale is 1/sqrt(head size). A plain `scaled_dot_product_attention` has neither soft-cap nor sinks.
    `factor` is what the trainer multiplied the query by beforehand.
    """
    given: dict[str, Any] = op.detail.get("parameters", {})
    recorded = "implementation" in given
    kernel = (given.get("visible") or {}).get("kernel") or {}
    if kernel:  # what FlashAttention was given, whatever its function was asked for
        given = {**given, "scaling": kernel["scale"], "softcap": kernel["softcap"], "dropout": kernel["dropout"], "ignored": ()}
        given["sinks"] = True if kernel["sinks"] else None
    scale = given.get("scaling") if recorded else given.get("scale")
    if scale is None and shape:
        scale = shape[-1] ** -0.5
    out: list[tuple[str, str]] = []
    unknown: list[str] = []
    scale = scale * factor if isinstance(scale, int | float) else None
    if scale is None:
        unknown.append("its scale: it is no single number")
    elif engine.scale and abs(scale - engine.scale) > SCALE_TOLERANCE * abs(engine.scale):
        out.append(("scale", f"the trainer's attention scale is {scale:.8g}, the engine's {engine.scale:.8g}"))

    def limit(window: Any) -> int | None:
        return window if isinstance(window, int) and window > 0 and not (isinstance(longest, int) and window >= longest) else None

    if given.get("odd"):
        unknown.append(f"what is done to its scores and weights besides masks and factors ({', '.join(given['odd'])})")
    masked = compare_masks(given.get("visible"), engine.model_copy(update={"window": limit(engine.window), "chunk": limit(engine.chunk)}))
    out += masked.differences
    configured = recorded and (masked.unknown == OLD or masked.edge) and limit(given.get("sliding_window")) != limit(engine.window)
    if configured:
        mine, theirs = limit(given.get("sliding_window")) or "unlimited", limit(engine.window) or "unlimited"
        out.append(("window", f"the trainer's attention window is {mine}, the engine's {theirs}"))
    elif masked.unknown:
        unknown.append(
            masked.unknown
            if masked.unknown == OLD
            else f"its window: {masked.unknown}"
            if masked.edge
            else f"which keys it reads (causality, window): {masked.unknown}"
        )
    dropped = given.get("dropout") or (given.get("visible") or {}).get("dropout")
    if dropped:
        out.append(("dropout", f"the trainer's attention drops {dropped:.3g} of its weights (training mode); the engine drops none"))
    ignored = set(given.get("ignored") or ())
    unused = f", which the trainer's {given['implementation']} attention ignores" if ignored else ""
    cap, other = float(given.get("softcap") or 0.0), float(engine.softcap or 0.0)
    if abs(cap - other) > SCALE_TOLERANCE * abs(other) and not given.get("odd"):
        why = unused if "softcap" in ignored else ""
        out.append(("soft-cap", f"the trainer's attention soft-cap is {cap or 'none'}, the engine's {other or 'none'}{why}"))
    sinks = given.get("sinks") is not None
    if sinks != engine.sinks and not given.get("odd"):
        why = unused if "sinks" in ignored else ""
        has = {True: "has sinks", False: "has no sinks"}
        out.append(("sinks", f"the trainer's attention {has[sinks]}, the engine's {has[engine.sinks]}{why}"))
    return out, unknown


def downstream(al: Alignment, starts: set[int]) -> set[int]:
    """Training ops behind some ops or anchors, up to the next anchors and residual sums, these included."""
    t = al.training
    first = (c for s in starts for c in t.graph.succ[s])
    return set(t.below(first, lambda i: t.is_op(i) and i not in al.regions.sums))
