"""The rounding map of a simulated GPU, checked against the kernels themselves.

Every different piece's generated Triton kernels run in Triton's interpreter on CPU tensors. What they write must equal an FP32
emulation of the captured loop IR that rounds where the map says and nowhere else, and must not equal the negated map's:
every result rounded, or every load that the map serves from a register read from memory instead, and the other way round.

Equal means bitwise, but for the order of summation: the emulation sums in FP64, the kernels in FP32, which now and then flips a
last bit. The code here shares the reading of loop bodies with the alignment, and nothing about where roundings are; the kernels
share nothing with either.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from graphalign.align.positions import choose_positions
from graphalign.dataflow.opaque import OpaqueOp, load_opaque_ops
from graphalign.dataflow.ranges import exact_size, split_ranges
from graphalign.dataflow.trace_inference import Tracer
from graphalign.errors import CaptureFailedError, KernelMismatchError
from graphalign.evaluate import run_inference
from graphalign.evaluate.interpret import Interpreter
from graphalign.evaluate.interpret import parameter as parameter_at
from graphalign.evaluate.memory import Memory
from graphalign.evaluate.storage import Lazy, Storage
from graphalign.evaluate.values import Arithmetic, Val, draw, round_to, seed_of
from graphalign.ir.args import references
from graphalign.ir.dataflow import LOW_PRECISION
from graphalign.ir.indexing import evaluate as index_value
from graphalign.ir.inference import VALUE, Body, Graph, InferenceGraph, Input, Node

SCRIPT = Path(__file__).parents[1] / "engines" / "gpu" / "interpret.py"
TOKENS = 5
SEED = 7
TOLERANCE = 2e-3
"""Share of elements that may differ in their last bit, for the order of summation."""
WHOLE = 1 << 24
"""Elements up to which a parameter is handed over whole; of larger ones only the rows that are looked up."""

Map = Literal["map", "negated", "swapped"]


@dataclass
class KernelCheck:
    """One kernel of one piece, compared."""

    piece: str
    kernel: str
    buffers: tuple[str, ...]
    differ: dict[Map, float]
    """Share of elements that differ from the emulation under each map."""
    choice: dict[Map, bool] = field(default_factory=dict)
    """Whether the emulation under that map gives other elements than under the captured one at all."""
    elements: int = 0

    @property
    def ok(self) -> bool:
        """Agrees with the map, and with no other that says something else."""
        agrees = self.differ["map"] <= TOLERANCE
        return agrees and all(self.differ[m] > max(2 * TOLERANCE, 4 * self.differ["map"]) for m, real in self.choice.items() if real)


@dataclass
class KernelReport:
    """All kernels of a capture."""

    kernels: list[KernelCheck] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """(piece or kernel, why it was not checked)."""

    @property
    def ok(self) -> bool:
        return all(k.ok for k in self.kernels)


def check_kernels(capture: InferenceGraph, sources: Path, rules: Path, *, python: str | None = None, timeout: float = 900) -> KernelReport:
    """Check the rounding map of a simulated capture.

    Args:
        capture: as made with `keep_kernels=sources`.
        sources: folder of the generated code, `pieceN.py`.
        rules: folder of rules.
        python: interpreter with torch and Triton; this one if None.
        timeout: seconds.

    Raises:
        KernelMismatchError: a kernel does not do what the map says.
        CaptureFailedError: the interpreter could not be run.
    """
    report = KernelReport()
    for _, one in split_ranges(capture):
        _check(one, sources, rules, python or sys.executable, timeout, report)
    _refuse(report)
    return report


def _check(capture: InferenceGraph, sources: Path, rules: Path, python: str, timeout: float, report: KernelReport) -> None:
    """Check what was compiled for one range of token counts."""
    if exact_size(capture) == 1:  # which is not evaluated anywhere
        report.skipped += [(g.name, "it was compiled for exactly one token") for g in capture.graphs if g.range is not None]
        return
    graphs = {g: graph for g, graph in enumerate(capture.graphs) if (sources / f"{graph.name}.py").is_file()}
    tokens = exact_size(capture) or TOKENS
    known = load_opaque_ops(rules)
    runs = _emulate(capture, known, set(graphs), tokens)
    with tempfile.TemporaryDirectory(prefix="graphalign-") as folder:
        work = Path(folder)
        arrays: dict[str, np.ndarray] = {}
        job = {"data": str(work / "data.npz"), "out": str(work / "out.npz"), "pieces": []}
        for g, graph in graphs.items():
            if missing := _unknown(graph, runs["map"], g, known):
                report.skipped.append((graph.name, f"the result of {missing} is not known"))
                continue
            job["pieces"].append(_piece(graph, runs["map"], g, sources / f"{graph.name}.py", arrays, tokens, known))  # type: ignore[attr-defined]
        np.savez(work / "data.npz", **arrays)  # type: ignore[arg-type]
        (work / "job.json").write_text(json.dumps(job))
        _interpret(work / "job.json", python, timeout)
        with np.load(work / "out.npz", allow_pickle=False) as results:
            for entry in json.loads(results["report"].tobytes()):
                if "unsupported" in entry:
                    report.skipped.append((entry["name"], entry["unsupported"]))
                    continue
                g = next(i for i, graph in graphs.items() if graph.name == entry["name"])
                _compare(entry, g, graphs[g], runs, results, report)


def _refuse(report: KernelReport) -> None:
    bad = [k for k in report.kernels if not k.ok]
    if not report.kernels:
        why = "; ".join(f"{name}: {reason}" for name, reason in report.skipped[:3])
        raise CaptureFailedError("not one generated kernel could be checked", where=why, hint="report this with the kernels")
    if bad:
        lines = [f"{k.piece} {k.kernel}: {k.differ['map']:.2%} of {', '.join(k.buffers)} differ" for k in bad[:5]]
        raise KernelMismatchError(
            f"{len(bad)} of {len(report.kernels)} generated kernels do not round where the captured map says",
            where="\n".join(lines),
            hint="report this with the capture: its sites cannot be trusted",
        )


def _interpret(job: Path, python: str, timeout: float) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment["TRITON_INTERPRET"] = "1"
    try:
        command = [python, str(SCRIPT), str(job)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise CaptureFailedError(f"the kernels were not interpreted within {timeout:g} s", hint="capture fewer layers") from None
    if done.returncode != 0:
        raise CaptureFailedError("the generated kernels could not be interpreted", where=(done.stderr or done.stdout)[-1200:])


# -- emulation --------------------------------------------------------------------------------------------------------------


@dataclass
class _Single(Interpreter):
    """Computes in FP32, op by op; `negated` rounds every result to BF16 as eager code would."""

    which: Map = "map"

    def keep(self, name: str, data: torch.Tensor, constant: bool = False) -> torch.Tensor:
        if data.is_floating_point():
            data = round_to(data, "bfloat16") if self.which == "negated" else data.float().double()
        return super().keep(name, data, constant)


class _Apart(Memory):
    """Buffers of graphs that are each given inputs of their own."""

    def source(self, name: str) -> Any:
        i = self.inputs.get(name)
        if i is not None and i.source.startswith(VALUE) and name not in self.live:
            n = self.extent(self.buffers[name])
            data = self.arithmetic.round(draw(seed_of(SEED, i.source), torch.arange(n)), i.dtype or "float32")
            self.live[name] = Storage(("value", i.source, n), data, data)
        found = super().source(name)
        if i is not None and isinstance(found, Storage) and isinstance(found.id, tuple) and found.id[0] == "input":
            data = self.arithmetic.round(found.memory, i.dtype or "float32")  # a tensor of that dtype holds no more
            found = self.live[name] = Storage(("rounded", *found.id[1:]), data, data)
        return found


@dataclass
class Emulation(run_inference.Run):
    """A run of some graphs, each on inputs of its own, in FP32."""

    which: Map = "map"
    chosen: set[int] = field(default_factory=set)
    contents: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    """(graph, buffer or input) to what it holds at the end, or, for an input, at the start."""
    after: dict[tuple[int, str, str], torch.Tensor] = field(default_factory=dict)
    """(graph, call, argument) to what an opaque call has written there."""

    def make_memory(self) -> Memory:
        return _Apart(self.capture, self.arithmetic, self.tracer.copies, self.reads)

    def graph(self, g: int, graph: Graph) -> None:
        if g not in self.chosen:
            return
        memory = self.memory
        memory.exported = {}
        super().graph(g, graph)
        for i in graph.inputs:
            if i.role not in ("symbol", "layer") and i.name in memory.live:
                self.contents[g, i.name] = memory.contents(i.name) if i.name in memory.buffers else memory.live[i.name].memory
        for kernel in graph.kernels:
            for node in kernel.nodes:
                for name in node.outputs:
                    b = memory.buffers.get(name)
                    if b is not None and b.dtype and not b.removed:
                        self.contents[g, name] = memory.contents(name)

    def anchor(self, node: Node) -> None:
        super().anchor(node)
        for name in _places(node, self.tracer.rules):
            self.after[self.memory.g, node.name, name] = self.memory.contents(str(dict(node.args)[name]["b"]))

    def interpret(self, body: Body, binding: dict[str, str], node: Node) -> tuple[dict[str, Val | str], list[Any]]:
        if self.which == "swapped":
            node = node.model_copy(update={"forwarded": node.reloaded, "reloaded": node.forwarded})
        return _Single(self.memory, body, binding, node, self.tracer.constant, self.replace, self.picks, self.which).run()


def _emulate(capture: InferenceGraph, rules: dict[str, OpaqueOp], chosen: set[int], tokens: int) -> dict[Map, Emulation]:
    tracer = Tracer(capture, rules)
    tracer.run()
    positions = choose_positions(capture, tracer, tokens, 1)
    smallest = min((p.shape[0] for p in capture.parameters if len(p.shape) == 2 and "embed" in p.name), default=64)
    ids = tuple((5 + 11 * t) % smallest for t in range(tokens))
    out: dict[Map, Emulation] = {}
    for which in ("map", "negated", "swapped"):
        arithmetic = Arithmetic(SEED, positions, ids, rounds=True)
        run = Emulation(capture, tracer, arithmetic, which=which, chosen=chosen)
        run.run()
        out[which] = run
    return out


# -- the job ------------------------------------------------------------------------------------------------------------------


def _calls(graph: Graph) -> list[Node]:
    return [n for k in graph.kernels for n in k.nodes if n.kind == "extern" and n.op != "inductor.multi_output"]


def _written(node: Node, rules: dict[str, OpaqueOp]) -> tuple[str, int | None]:
    """The buffer that holds a call's result, and which argument that is if it is no `out=`; no buffer for a mere effect."""
    rule = rules.get(node.op)
    if rule is not None and rule.kind == "effect":
        return "", None
    names = [name for name, _ in node.args]
    if rule is not None and rule.kind in ("attention", "embedding") and rule.out in names:
        return str(dict(node.args)[rule.out].get("b")), names.index(rule.out)
    return next(iter(node.outputs), ""), None


def _places(node: Node, rules: dict[str, OpaqueOp]) -> list[str]:
    """The arguments that an op of unknown inside writes, if it returns nothing."""
    rule = rules.get(node.op)
    if rule is None or rule.kind != "opaque":
        return []
    args = dict(node.args)
    return [n for n in node.mutates if isinstance(args.get(n), dict) and "b" in args[n]]


def _returned(graph: Graph, node: Node, rules: dict[str, OpaqueOp]) -> str:
    """The buffer that a call which returns its result defines, empty for any other call."""
    rule = rules.get(node.op)
    if rule is None or rule.kind not in ("reduce", "gather"):
        return ""
    picked = [n for k in graph.kernels for n in k.nodes if n.op == "inductor.multi_output" and _self(n) in node.outputs]
    return next((o for n in picked for o in n.outputs), next(iter(node.outputs), ""))


def _self(node: Node) -> str:
    return next(iter(references(dict(node.args).get("self"), "b")), "")


def _unknown(graph: Graph, run: Emulation, g: int, rules: dict[str, OpaqueOp]) -> str:
    """An extern call whose result cannot be handed over, empty if there is none."""
    written = ((n.op, _returned(graph, n, rules) or _written(n, rules)[0]) for n in _calls(graph) if not _places(n, rules))
    return next((op for op, buffer in written if buffer and not _is_known(run.contents.get((g, buffer)))), "")


def _is_known(data: torch.Tensor | None) -> bool:
    return data is not None and not bool(data.isnan().any())


def _piece(graph: Graph, run: Emulation, g: int, source: Path, arrays: dict[str, np.ndarray], tokens: int,
           rules: dict[str, OpaqueOp]) -> dict[str, Any]:  # fmt: skip
    env = {**graph.symbols, graph.tokens: tokens}

    def size(texts: tuple[str, ...]) -> list[int]:
        return [int(index_value(t, env)) for t in texts]

    read = {b for k in graph.kernels for n in k.nodes if n.kind == "loop" for b in n.buffers}
    inputs = []
    for i in graph.inputs:
        if i.role in ("symbol", "layer"):
            inputs.append({"name": i.name, "value": env.get(i.source, env.get(i.name, 0))})
            continue
        entry: dict[str, Any] = {"name": i.name, "dtype": i.dtype, "size": size(i.size), "stride": size(i.stride), "value": None}
        if i.name in read:
            data, entry["rows"] = _input(i, run, g, entry["size"])
            entry["value"] = _put(arrays, f"{graph.name}.{i.name}", data, i.dtype)
        inputs.append(entry)
    externs: list[dict[str, Any]] = []
    for n in _calls(graph):
        if places := _places(n, rules):
            dtype = next((b.dtype for b in (*graph.buffers, *graph.passed()) if b.name == dict(n.args)[places[0]]["b"]), None)
            writes = {p: _put(arrays, f"{graph.name}.{n.name}.{p}", run.after[g, n.name, p], dtype) for p in places}
            externs.append({"dtype": dtype, "value": None, "position": None, "size": None, "writes": writes})
            continue
        o, position = _written(n, rules)
        returned = _returned(graph, n, rules)
        o = returned or o
        b = next((b for b in graph.buffers if b.name == o), None)
        value = _put(arrays, f"{graph.name}.{o}", run.contents[g, o], b.dtype) if b is not None else None
        externs.append({"dtype": b and b.dtype, "value": value, "position": position, "size": size(b.size) if b and returned else None})
    return {"name": graph.name, "source": str(source), "inputs": inputs, "externs": externs}


def _input(i: Input, run: Emulation, g: int, size: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Content of an input, and which rows it is if it is too large to be whole."""
    if (known := run.contents.get((g, i.name))) is not None:
        return known, []
    parameter = next(p for p in run.capture.parameters if p.name == i.source)
    lazy = Lazy(("parameter", i.source), parameter, i.dtype or parameter.dtype)
    count, width = int(np.prod(size)), int(np.prod(size[1:]))
    if count <= WHOLE:
        return parameter_at(run.arithmetic, lazy, torch.arange(count)), []
    rows = sorted(set(run.arithmetic.token_ids))
    index = torch.tensor(rows)[:, None] * width + torch.arange(width)[None, :]
    return parameter_at(run.arithmetic, lazy, index), rows


def _put(arrays: dict[str, np.ndarray], key: str, data: torch.Tensor, dtype: str | None) -> str:
    kind = getattr(torch, dtype or "float32")
    t = data.contiguous().reshape(-1).to(kind)
    arrays[key] = t.view(torch.int16).numpy() if dtype in ("bfloat16", "float16") else t.numpy()
    return key


# -- comparing ----------------------------------------------------------------------------------------------------------------


def _compare(entry: dict[str, Any], g: int, graph: Graph, runs: dict[Map, Emulation], results: Any, report: KernelReport) -> None:
    buffers = {b.name: b for b in graph.buffers}
    last = {name: i for i, launch in enumerate(entry["launches"]) for name in launch["written"]}
    calls = [(node, p) for node in _calls(graph) for p in _places(node, runs["map"].tracer.rules)]
    overwritten = {str(dict(node.args)[p]["b"]): node.op for node, p in calls}
    for at, launch in enumerate(entry["launches"]):
        known = [n for n in launch["written"] if n in buffers and last[n] == at and (g, n) in runs["map"].contents]
        names = [n for n in known if n not in overwritten]
        for n in launch["written"]:
            if n not in names and last[n] == at:
                why = f"{n} is overwritten by {overwritten[n]}" if n in known else f"{n} is part of another buffer"
                report.skipped.append((f"{entry['name']} {launch['kernel']}", why))
        if not names:
            continue
        wrong: dict[Map, int] = {"map": 0, "negated": 0, "swapped": 0}
        other: dict[Map, bool] = {"negated": False, "swapped": False}
        total = 0
        for n in names:
            dtype = buffers[n].dtype or "float32"
            actual = _restore(results[launch["written"][n]], dtype)
            expected: dict[Map, torch.Tensor] = {m: r.contents[g, n].reshape(-1) for m, r in runs.items()}
            sure = ~expected["map"].isnan()  # rows of a table that the capture does not hold
            if not bool(sure.any()):
                report.skipped.append((f"{entry['name']} {launch['kernel']}", f"{n} depends on parts of a table that are not recorded"))
                continue
            actual, expected = actual[sure], {m: e[sure] for m, e in expected.items()}
            total += actual.numel()
            for m, e in expected.items():
                wrong[m] += int(_differs(actual, e, dtype).sum())
                if m != "map":
                    other[m] = other[m] or float(_differs(expected["map"], e, dtype).float().mean()) > 4 * TOLERANCE
        if not total:
            continue
        shares = {m: w / max(total, 1) for m, w in wrong.items()}
        report.kernels.append(KernelCheck(entry["name"], launch["kernel"], tuple(names), shares, other, total))


def _restore(a: np.ndarray, dtype: str) -> torch.Tensor:
    t = torch.from_numpy(a)
    return t.view(getattr(torch, dtype)).double() if dtype in ("bfloat16", "float16") else t.double()


def _differs(a: torch.Tensor, b: torch.Tensor, dtype: str) -> torch.Tensor:
    """Elements that differ: bitwise in a low-precision format, by more than 2⁻¹⁸ of their size in FP32."""
    if dtype in LOW_PRECISION:
        return a != b
    return (a - b).abs() > 2.0**-18 * torch.maximum(a.abs(), b.abs())
