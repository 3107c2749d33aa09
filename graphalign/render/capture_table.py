"""Captures and sites files as text, one op per line, for `graphalign show` and for reviewing goldens as diffs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from graphalign.errors import CaptureFileError
from graphalign.ir.files import load_raw, read_json
from graphalign.ir.inference import Body, Graph, InferenceGraph, Node, Segment
from graphalign.ir.training import TrainingGraph


def render_file(path: Path, console: Console) -> None:
    """Print the text form of a file that `graphalign` wrote.

    Raises:
        CaptureFileError: it is none, or it is damaged.
    """
    if path.suffix in (".yaml", ".yml"):
        from graphalign.patch.spec import load
        from graphalign.rewrite.describe import describe

        _print_lines(console, describe(load(path)))
        return
    raw = load_raw(path, kind="capture or sites file")
    form = raw.get("format") if isinstance(raw, dict) else None
    if form == "graphalign.inference":
        _print_lines(console, inference_lines(read_json(path, InferenceGraph, kind="inference capture")))
    elif form == "graphalign.training":
        _print_lines(console, training_lines(read_json(path, TrainingGraph, kind="training capture")))
    elif form == "graphalign.clusters":
        from graphalign.clusters.report import Clusters
        from graphalign.render.clusters_table import render_clusters

        render_clusters(read_json(path, Clusters, kind="clusters file"), console)
    elif isinstance(raw, dict) and {"groups", "leftovers"} <= raw.keys():
        from graphalign.render.sites_table import render_table
        from graphalign.sites.report import Report

        render_table(read_json(path, Report, kind="sites file"), console)
    else:
        raise CaptureFileError(
            f"{path} is neither a capture nor a sites file",
            where=f"its `format` is {form!r}",
            hint="give a file that `graphalign capture`, `find` or `diff` wrote",
        )


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def inference_lines(graph: InferenceGraph) -> Iterator[str]:
    """The inference side: header, parameters, kernels in execution order, then each different loop body once."""
    simulated = " (simulated)" if graph.header.simulated else ""
    yield f"inference capture{simulated}, format {graph.version}"
    for title in ("versions", "target", "compile", "model"):
        yield f"{title}: {_pairs(getattr(graph.header, title))}"
    yield from (f"note: {note}" for note in graph.header.notes)
    for p in graph.parameters:
        parts = ", ".join(f"{s.checkpoint}[{s.start}:{s.start + s.length}] along {s.dim}{_shards(s)}" for s in p.segments)
        yield f"parameter {p.name}: {_tensor(p.dtype, p.shape)}" + (f" = {parts}" if parts else "") + ("" if p.learned else " (computed)")
    for a in graph.attention:
        yield f"attention {a.layer}: {_pairs(a.model_dump(exclude={'layer'}, exclude_defaults=True))}"
    for g in graph.graphs:
        yield from _graph_lines(g)
    for key, body in graph.bodies.items():
        yield from _body_lines(key, body)


def _shards(s: Segment) -> str:
    """Which part of a checkpoint tensor a piece is, if it is not the whole."""
    return "".join(f" (its {x.start}:{x.start + x.length} of {x.size} along {x.dim})" for x in s.shards)


def _graph_lines(graph: Graph) -> Iterator[str]:
    yield ""
    yield f"graph {graph.name}, tokens {graph.tokens or '?'}, symbols {_pairs(graph.symbols)}"
    for i in graph.inputs:
        yield f"  input {i.name}: {i.role} {i.source}" + (f" {_tensor(i.dtype, i.size)}" if i.dtype else "")
    buffers = {b.name: b for b in graph.buffers}
    for kernel in graph.kernels:
        yield f"  kernel {kernel.name} {kernel.kind} {kernel.generated}".rstrip()
        for node in kernel.nodes:
            yield f"    {_node(node)}"
            for name in node.outputs:
                if b := buffers.get(name):
                    where = f" in {b.view_of}" if b.view_of else ""
                    yield f"      {name}: {_tensor(b.dtype or '?', b.size)}{where}{' removed' if b.removed else ''}"
    yield f"  outputs {', '.join(graph.outputs)}"


def _node(node: Node) -> str:
    head = f"{', '.join(node.outputs) or '()'} = "
    if node.kind == "loop":
        head += f"loop {node.body}({', '.join(node.buffers)})"
    else:
        head += f"{node.op or node.kind}({', '.join(f'{k}={_arg(v)}' for k, v in node.args)})"
    for label, names in (("mutates", node.mutates), ("forwarded", node.forwarded), ("reloaded", node.reloaded)):
        if names:
            head += f" {label} {', '.join(names)}"
    return head + (f"  # {node.module}" if node.module else "")


def _body_lines(key: str, body: Body) -> Iterator[str]:
    yield ""
    reduction = f", reduction {', '.join(body.sizes[1])}" if body.sizes[1] else ""
    yield f"body {key}: {', '.join(f'{v} < {n}' for v, n in body.var_ranges)}{reduction}"
    yield from (f"  {name} = {expression}" for name, expression in body.indexing.items())
    yield from (f"  {_op(op)}" for op in body.ops)
    for name, ops in body.subblocks.items():
        yield f"  {name}:"
        yield from (f"    {_op(op)}" for op in ops)


def _op(op: tuple[Any, ...]) -> str:
    name, target, args, kwargs = op
    return f"%{name} = {target}({_call(args, kwargs)})"


def training_lines(graph: TrainingGraph) -> Iterator[str]:
    """The training side: header, inputs, one op per line with its module and source expression."""
    yield f"training capture, format {graph.version}, {graph.header.tokens} tokens"
    for title in ("versions", "regime", "model"):
        yield f"{title}: {_pairs(getattr(graph.header, title))}"
    yield from (f"note: {note}" for note in graph.header.notes)
    for i in graph.inputs:
        yield f"%{i.value.id}: {_tensor(i.value.dtype, i.value.shape)} = {i.kind} {i.name}"
    for node in graph.nodes:
        outputs = ", ".join("_" if v is None else f"%{v.id}: {_tensor(v.dtype, v.shape)}" for v in node.outputs)
        where = node.module
        if node.source is not None and node.source < len(graph.sources):
            s = graph.sources[node.source]
            where += f" {s.file}:{s.line} {' '.join(s.text.split())}"
        yield f"{outputs or '()'} = {node.op}({_call(node.args, node.kwargs)})" + (f"  # {where.strip()}" if where.strip() else "")
    yield f"outputs {', '.join(f'%{v}' for v in graph.outputs)}"


def _call(args: Iterable[Any], kwargs: dict[str, Any]) -> str:
    return ", ".join([*map(_arg, args), *(f"{k}={_arg(v)}" for k, v in kwargs.items())])


def _arg(arg: Any) -> str:
    """One encoded argument (`graphalign.ir.args`) as text."""
    if isinstance(arg, dict) and len(arg) == 1:
        ((kind, value),) = arg.items()
        return f"%{value}" if kind in ("v", "n") else f"<{value}>" if kind == "opaque" else str(value)
    if isinstance(arg, list | tuple):
        return f"[{', '.join(map(_arg, arg))}]"
    return repr(arg)


def _tensor(dtype: str, shape: Iterable[object]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in values.items())
