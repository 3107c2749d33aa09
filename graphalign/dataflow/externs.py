"""What an extern call that a rule describes is: its identity, its operands, and the parameters that are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphalign.dataflow.held import Held
from graphalign.dataflow.identity import owner_of
from graphalign.dataflow.opaque import OpaqueOp
from graphalign.evaluate.shards import part_of
from graphalign.ir.args import buffers_of
from graphalign.ir.dataflow import Operand
from graphalign.ir.inference import Node, Parameter
from graphalign.ir.paths import in_layer

Edges = Callable[[str], Operand]
"""The edges into an argument, by its name."""
Described = tuple[tuple[Any, ...], tuple[Operand, ...], dict[str, Any], list[Parameter]]
"""Key, operands, detail of the anchor; the parameters that it multiplies with."""


def describe(held: Held, node: Node, rule: OpaqueOp, args: dict[str, Any], edges: Edges) -> Described:
    """A GEMM, a composite or an attention, as its rule says."""
    if rule.kind == "gemm":
        return _gemm(held, node, rule, args, edges)
    if rule.kind == "composite":
        return _composite(held, node, rule, args, edges)
    operands = tuple(edges(a) for a in rule.operands)
    return ("attention", *held.number(held.anchors_above(operands))), operands, {"layer": _layer(held, args.get(rule.layer))}, []


def _gemm(held: Held, node: Node, rule: OpaqueOp, args: dict[str, Any], edges: Edges) -> Described:
    p, bias = held.parameter(args.get(rule.weight)), args.get(rule.bias)
    key = ("gemm", *held.number(tuple(s.checkpoint for s in p.segments) if p else ("unknown", node.name)))
    segments = p.segments if p else ()
    detail = {
        "segments": [(s.checkpoint, s.start, s.length) for s in segments],
        "orders": {s.checkpoint: s.rows() for s in segments if s.order},
        "parts": {s.checkpoint: part for s in segments if (part := part_of(s, 0)) is not None},
        "bias": bool(buffers_of(bias)) or (isinstance(bias, dict) and "param" in bias),
    }
    return key, (edges(rule.input),), detail, [p] if p else []


def _composite(held: Held, node: Node, rule: OpaqueOp, args: dict[str, Any], edges: Edges) -> Described:
    operands = tuple(edges(a) for a in rule.operands)
    weights = [p for a in rule.weights if (p := held.parameter(args.get(a))) is not None]
    layer = _layer(held, args.get(rule.layer)) if rule.layer else None
    owner = layer or owner_of([s.checkpoint for p in weights for s in p.segments])
    places: tuple[str, ...] = (owner, node.module, owner_of(_below(held, node.module)))
    if rule.routed:
        if layer:
            weights = [p for p in held.capture.parameters if p.name.startswith(f"{layer}.")]
        # a piece that stands for others has its own layer's name in it, and each its own router
        routers = (str(held.ops[r.producer].key[1]) for r in operands[-1] if held.ops[r.producer].target == "gemm")
        here = next(routers, "") or node.module
        owner = layer = in_layer(owner, here)
        places = tuple(in_layer(p, here) for p in (owner, *places[1:]))
    if rule.whole:  # by its parameters, because engines rename modules
        owner = places[2] or owner
        places = (owner, *places[1:])
    key = ("composite", *held.number((owner or node.name,)))
    detail = {
        "owner": owner,
        "layer": layer or owner,
        "module": layer or next((p.name.rpartition(".")[0] for p in weights), ""),
        "routing": tuple(rule.operands.index(r) for r in rule.routing if r in rule.operands),
        "places": places,
        "sums": rule.sums,
        "own": layer is not None and not rule.whole and not rule.routed,
        "whole": rule.whole,
        "latent": rule.latent,
        "routed": rule.routed,
    }
    return key, operands, detail, weights


def _below(held: Held, module: str) -> list[str]:
    """Checkpoint tensors of a module of the engine's."""
    return [s.checkpoint for p in held.capture.parameters if p.name.startswith(f"{module}.") for s in p.segments]


def _layer(held: Held, arg: Any) -> str | None:
    """The layer that an argument names, itself or through a graph input."""
    if isinstance(arg, str):
        return arg or None
    if not isinstance(arg, dict):
        return None
    if "b" in arg and arg["b"] in held.inputs:
        return held.inputs[arg["b"]].source
    return str(arg["layer"]) if "layer" in arg else None
