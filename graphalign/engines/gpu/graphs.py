"""From lowered pieces to the graphs of a capture: one per piece, in execution order, wired by the values they pass on."""

from __future__ import annotations

import copy
from typing import Any

import torch

from graphalign.capture import engine_script as script
from graphalign.engines.gpu.pieces import Lowering, Piece, Range, graph_name, renaming

VALUE = "value:"
"""Prefix of an input's `source` that is another piece's output."""


def assemble(lowering: Lowering, world: script.World, note: Any) -> list[dict[str, Any]]:
    """All pieces as graphs in the file's format; a compiled piece once for each compile range, fewest tokens first."""
    ranges = sorted(lowering.ranges) or [(0, 0)]
    return [_graph(p, r, lowering, world, note) for p in lowering.pieces for r in (ranges[:1] if p.splitting else ranges)]


def _graph(piece: Piece, of: Range, lowering: Lowering, world: script.World, note: Any) -> dict[str, Any]:
    if piece.splitting:
        prefixes = [found["prefix"] for p in lowering.pieces for found in p.lowered.values()]
        plain = _eager(piece, prefixes[0] if prefixes else "")
    elif of in (piece.alike or piece).lowered:
        plain = _compiled(piece, of, note)
    else:
        failure = (piece.alike or piece).failures.get(of) or "it was not compiled"
        note(f"piece {piece.number} could not be lowered, its inside is unknown: {failure}")
        plain = _unlowered(piece)
    if len(lowering.ranges) > 1 and not piece.splitting:
        plain |= {"name": graph_name(piece.number, of, lowering.tokens), "range": list(of)}
    _wire(plain, piece, lowering, world)
    for kernel in plain["kernels"]:
        for node in kernel["nodes"]:
            node["name"] = f"p{piece.number}.{node['name']}"
    last = any(o in lowering.results for o in piece.outputs)
    plain["outputs"] = [e["tensor"]["b"] for e in plain["exports"] if e["name"] in lowering.results] if last else []
    return plain


# -- compiled pieces ------------------------------------------------------------------------------------------------------


def _compiled(piece: Piece, of: Range, note: Any) -> dict[str, Any]:
    model = piece.alike or piece
    lowered = model.lowered[of]
    plain: dict[str, Any] = copy.deepcopy(lowered["graph"])
    plain["name"] = f"piece{piece.number}"
    at = {name: i for i, name in enumerate(model.placeholders)}
    for entry in plain["inputs"]:
        entry["position"] = at.get(lowered["placeholder"].get(entry["name"], ""))
    results = lowered["outputs"]
    if len(results) != len(piece.outputs):
        note(f"piece {piece.number} has {len(piece.outputs)} outputs, its lowered form {len(results)}")
    plain["exports"] = [
        {"name": name, "tensor": copy.deepcopy(value)}
        for name, value in zip(piece.outputs, results, strict=False)
        if name is not None and isinstance(value, dict) and "b" in value
    ]
    if piece is not model:
        _rename_modules(plain, renaming(model, piece) or {}, lowered["prefix"])
    return plain


def _rename_modules(plain: dict[str, Any], names: dict[str, str], prefix: str) -> None:
    """Give an equal piece its own module paths."""
    absolute = {".".join(x for x in (prefix, a) if x): ".".join(x for x in (prefix, b) if x) for a, b in names.items()}
    for kernel in plain["kernels"]:
        for node in kernel["nodes"]:
            if node.get("module"):
                node["module"] = absolute.get(node["module"], node["module"])


# -- eager pieces ---------------------------------------------------------------------------------------------------------


def _blank(piece: Piece) -> dict[str, Any]:
    inputs = []
    values = {n.name: n.meta.get("example_value") for n in piece.graph.graph.nodes if n.op == "placeholder"}
    for i, name in enumerate(piece.placeholders):
        inputs.append({"name": name, "role": "tensor", "source": "", "position": i, **_geometry(values.get(name))})
    return {"name": f"piece{piece.number}", "inputs": inputs, "buffers": [], "kernels": [], "symbols": {}, "tokens": "", "exports": []}


def _geometry(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {}
    return {"dtype": script.dtype_name(value.dtype), "size": [str(s) for s in value.shape], "stride": [str(s) for s in value.stride()]}


def _eager(piece: Piece, prefix: str) -> dict[str, Any]:
    """A splitting piece: its ops as extern calls, views as geometry.

    Args:
        prefix: path of the compiled module in the engine's model.
    """
    plain = _blank(piece)
    env: dict[Any, Any] = {}
    layers: dict[str, str] = {}

    def ref(x: Any) -> Any:
        if isinstance(x, torch.fx.Node):
            name = env.get(x, {"b": x.name}).get("b")
            return {"layer": layers[name]} if name in layers else env.get(x, {"b": x.name})
        layer = script.layer_name(x)
        return NotImplemented if layer is None else {"layer": layer}

    for node in piece.graph.graph.nodes:
        if node.op == "placeholder":
            layer = script.layer_name(node.meta.get("example_value"))
            if layer is not None:
                layers[node.name] = layer
        elif node.op in ("call_function", "call_method"):
            value = node.meta.get("example_value")
            base = node.args[0] if node.args and isinstance(node.args[0], torch.fx.Node) else None
            if base is not None and _is_view(value, base.meta.get("example_value")):
                geometry = _geometry(value)
                env[node] = {"b": env.get(base, {"b": base.name})["b"], **{k: geometry[k] for k in ("size", "stride")},
                             "offset": str(value.storage_offset())}  # fmt: skip
                continue
            plain["kernels"].append(_call(node, ref, prefix))
            if isinstance(value, torch.Tensor):
                plain["buffers"].append({"name": node.name, "layout": "FixedLayout", **_geometry(value)})
    returned = piece.graph.graph.output_node().args[0]
    returned = returned if isinstance(returned, tuple | list) else [returned]
    written = {a["b"] for k in plain["kernels"] for n in k["nodes"] for name, a in n["args"] if name in n["mutates"] and "b" in a}
    for outer, inner in zip(piece.inputs, piece.placeholders, strict=False):
        if inner in written:  # whoever reads this value afterwards reads what the call wrote
            plain["exports"].append({"name": outer, "tensor": {"b": inner}})
    for outer_name, node in zip(piece.outputs, returned, strict=False):
        if outer_name is not None and isinstance(node, torch.fx.Node):
            plain["exports"].append({"name": outer_name, "tensor": env.get(node, {"b": node.name})})
    return plain


def _is_view(value: Any, base: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(base, torch.Tensor):
        return False
    return bool(value.untyped_storage()._cdata == base.untyped_storage()._cdata)


def _call(node: Any, ref: Any, prefix: str) -> dict[str, Any]:
    schema = getattr(node.target, "_schema", None)
    target = node.target
    if schema is None and isinstance(target, torch._ops.OpOverloadPacket):
        overloads = target.overloads()
        if len(overloads) != 1:
            raise script.Refused(f"the graph calls {target} without saying which of {', '.join(overloads)}")
        target = getattr(target, overloads[0])
        schema = target._schema
    names = [a.name for a in schema.arguments] if schema else [f"in{i}" for i in range(len(node.args))]
    args = [[n, script.encode_plain(a, ref)] for n, a in zip(names, node.args, strict=False)]
    args += [[k, script.encode_plain(v, ref)] for k, v in node.kwargs.items()]
    for pair in args:
        if pair[0] == "layer_name" and isinstance(pair[1], str):
            pair[1] = {"layer": pair[1]}
    present = {n for n, v in args if v is not None}
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] if schema else []
    mutates = [name for name in written if name in present]
    stack = [p for path, _ in (node.meta.get("nn_module_stack") or {}).values() if (p := script.relative_path(path)) is not None]
    outputs = [node.name] if isinstance(node.meta.get("example_value"), torch.Tensor) else []
    call = {"name": node.name, "kind": "extern", "outputs": outputs, "op": str(target), "args": args, "mutates": mutates,
            "module": ".".join(x for x in (prefix, stack[-1]) if x) if stack else "", "origins": [node.name],
            "source": script.source_line(node.meta.get("stack_trace") or "")}  # fmt: skip
    return {"name": node.name, "kind": "eager", "generated": "", "nodes": [call]}


def _unlowered(piece: Piece) -> dict[str, Any]:
    """A piece whose inside is unknown: one opaque call from its inputs to its outputs."""
    plain = _blank(piece)
    returned = piece.graph.graph.output_node().args[0] if piece.graph is not None else []
    returned = returned if isinstance(returned, tuple | list) else [returned]
    outputs = []
    for i, (name, node) in enumerate(zip(piece.outputs, returned, strict=False)):
        value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
        if name is None or not isinstance(value, torch.Tensor):
            continue
        buffer = f"out{i}"
        plain["buffers"].append({"name": buffer, "layout": "FixedLayout", **_geometry(value)})
        plain["exports"].append({"name": name, "tensor": {"b": buffer}})
        outputs.append(buffer)
    call = {"name": "unlowered", "kind": "extern", "outputs": outputs, "op": f"graphalign.unlowered_piece_{piece.number}", "mutates": [],
            "args": [[f"in{i}", {"b": n["name"]}] for i, n in enumerate(plain["inputs"]) if n.get("dtype")]}  # fmt: skip
    plain["kernels"].append({"name": "unlowered", "kind": "unlowered", "generated": "", "nodes": [call]})
    return plain


# -- wiring -----------------------------------------------------------------------------------------------------------------


def _wire(plain: dict[str, Any], piece: Piece, lowering: Lowering, world: script.World) -> None:
    """Say where each input comes from: a parameter, a run-time tensor, a layer's name, or another piece."""
    for entry in plain["inputs"]:
        position = entry.pop("position", None)
        if position is None or position >= len(piece.inputs):
            continue
        outer = piece.inputs[position]
        if entry["role"] == "symbol":
            continue
        if outer not in lowering.sources:
            entry |= {"role": "tensor", "source": VALUE + outer}
            continue
        value = lowering.sources[outer]
        layer, found = script.layer_name(value), world.by_placeholder(outer)
        if layer is not None:
            entry |= {"role": "layer", "source": layer}
        elif isinstance(value, torch.SymInt | int):
            entry |= {"role": "symbol", "source": str(value)}
        elif found is not None:
            entry |= {"role": "parameter" if found[1] else "other", "source": found[0]}
        else:
            entry |= {"role": "tensor", "source": script.clean_placeholder(outer)}
    if not plain["symbols"]:
        symbols = [e["source"] for e in plain["inputs"] if e["role"] == "symbol" and not e["source"].isdecimal()]
        plain["symbols"] = dict.fromkeys(symbols, lowering.tokens)
        plain["tokens"] = next(iter(plain["symbols"]), "")
