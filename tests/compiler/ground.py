"""Both sides of a small module, really compiled: captures, what the compiled code returned, and what its GEMMs read.

The compiled function is the ground truth. `truth` holds every GEMM operand and result of one run on real inputs, taken
where the generated wrapper calls `extern_kernels.mm`, so each region can be replayed from the engine's own GEMM results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphalign.align.align import Alignment, Pair, align, prepare
from graphalign.align.check import Edit, check
from graphalign.align.edges import Comparison, Finding, compare
from graphalign.capture.recorder import record
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import Header, TrainingGraph
from graphalign.rules import rules_dir
from graphalign.sites.find import diff
from graphalign.sites.report import Report
from tests.capture.compiled import load_script

BF = torch.bfloat16
TOKENS, WIDTH, VOCABULARY, POSITIONS = 32, 64, 97, 128


@dataclass
class Call:
    """One GEMM of the compiled function: the parameter it used, what it read, what it gave."""

    parameter: str
    operand: torch.Tensor
    result: torch.Tensor


@dataclass
class Truth:
    """What the compiled function did."""

    calls: list[Call] = field(default_factory=list)
    output: torch.Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass
class Case:
    """Two captures of one module, their diff, and the truth."""

    inference: InferenceGraph
    training: TrainingGraph
    truth: Truth
    module: nn.Module
    """The eager module."""
    inputs: dict[str, torch.Tensor]
    pair: Pair
    alignment: Alignment
    comparison: Comparison
    sites: list[Finding]
    """Findings that the check confirmed."""
    report: Report

    def edges(self) -> set[str]:
        """The sites in words: `keep mul → add[0]`."""
        return {self.words(f) for f in self.sites}

    def words(self, f: Finding) -> str:
        """A finding in words."""
        t = self.pair.flow_t.ops
        return f"{f.verdict} {_word(t[f.producer].target)} → {_word(t[f.consumer].target)}[{f.slot}]"

    def loose_ends(self) -> dict[str, tuple[str, ...]]:
        """Everything the report could not turn into a site, by kind."""
        kinds = ("leftovers", "undetermined", "conflicting", "unpatchable", "semantic")
        return {k: tuple(e.what + ": " + e.reason for e in entries) for k in kinds if (entries := getattr(self.report, k))}

    def forwarded(self) -> set[str]:
        """Buffers whose loads some kernel serves from a register."""
        return {b for k in self.inference.graphs[0].kernels for n in k.nodes for b in n.forwarded}

    def reloaded(self) -> set[str]:
        """Buffers that a kernel both stores and reads back from memory."""
        return {b for k in self.inference.graphs[0].kernels for n in k.nodes for b in n.reloaded}

    def dtypes(self, *, live: bool = True) -> list[str | None]:
        """Formats of the buffers in memory."""
        return [b.dtype for b in self.inference.graphs[0].buffers if not (live and b.removed)]


def _word(target: str) -> str:
    parts = target.split(".")
    return parts[1] if parts[0] == "aten" else target


def real_inputs() -> dict[str, torch.Tensor]:
    """Token ids, and positions spread over the tables."""
    g = torch.Generator().manual_seed(3)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (1, TOKENS), generator=g),
        "position_ids": torch.randperm(POSITIONS, generator=g)[:TOKENS].sort().values.view(1, TOKENS),
    }


def shake(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter random content of order one, so that no rounding is hidden by a one or a zero."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            scale = p.shape[-1] ** -0.5 if p.dim() == 2 and "embed" not in str(p.shape) else 1.0
            p.copy_((torch.randn(p.shape, generator=g) * scale + (1.0 if p.dim() == 1 else 0.0)).to(p.dtype))
    return module.eval()


def build(eager: nn.Module, compiled: nn.Module | None = None, **options: Any) -> Case:
    """Capture `eager` with the recorder and `compiled` (the same module by default) with Inductor, and diff them.

    Args:
        eager: the trainer's module; `forward(input_ids)` or `forward(input_ids, position_ids)`.
        compiled: the engine's module: same parameter names and content, perhaps written differently.
        options: Inductor's options.
    """
    shake(eager)
    compiled = eager if compiled is None else compiled
    compiled.load_state_dict(eager.state_dict())
    names = eager.forward.__code__.co_varnames[1 : eager.forward.__code__.co_argcount]
    inputs = {n: x for n, x in real_inputs().items() if n in names}
    training = capture_eager(eager, inputs)
    inference, truth = capture_engine(compiled.eval(), inputs, **options)
    pair = prepare(inference, training, rules_dir())
    al = align(pair)
    comparison = compare(al)
    proposed = [f for f in comparison.findings if f.verdict in ("keep", "round")]
    checked = check(pair, [Edit(f.consumer, f.slot, f.verdict, f.inference[-1] if f.inference else "") for f in proposed])
    sites = [f for f in proposed if checked.confirmations[f.consumer, f.slot].ok]
    report = diff(inference, training)
    assert report.sites == len(sites)
    return Case(inference, training, truth, eager, inputs, pair, al, comparison, sites, report)


def capture_eager(module: nn.Module, inputs: dict[str, torch.Tensor]) -> TrainingGraph:
    """The module's eager forward, recorded."""
    with torch.no_grad(), record(module, inputs) as recorder:
        out = module(**inputs)
    r = recorder.finish([out])
    header = Header(
        versions={"torch": torch.__version__}, regime={}, model={"layers": 1, "max_position_embeddings": POSITIONS}, tokens=TOKENS
    )
    return TrainingGraph(header=header, inputs=r.inputs, nodes=r.nodes, outputs=r.outputs, sources=r.sources)


def capture_engine(module: nn.Module, inputs: dict[str, torch.Tensor], **options: Any) -> tuple[InferenceGraph, Truth]:
    """The module compiled by Inductor, captured by the engine script's recorder, and what the compiled code did."""
    script = load_script()
    torch._dynamo.reset()
    world = script.World()
    world.describe(module)
    world.index(module)
    for name, p in module.named_parameters():
        world.parameters[name]["segments"] = [{"checkpoint": name, "dim": 0, "start": 0, "length": p.shape[0], "index": []}]
    recorder = script.Recorder(world)
    recorder.install()
    # One compile thread: a pool of compiling processes costs more than these few kernels.
    settings = {"force_disable_caches": True, "compile_threads": 1, **options}
    try:
        with torch.no_grad(), torch._inductor.config.patch(settings), watch_gemms(module) as truth:
            truth.output = torch.compile(module)(**inputs).clone()
    finally:
        recorder.uninstall()
    assert len(recorder.graphs) == 1, recorder.notes
    data = {
        "header": {"versions": {"torch": torch.__version__}, "target": {"device": "cpu"}, "compile": options, "notes": recorder.notes,
                   "model": {"layers": 1, "max_position_embeddings": POSITIONS}},
        "parameters": list(world.parameters.values()),
        "tables": script.read_tables(world, recorder, POSITIONS),
        "attention": [],
        "bodies": recorder.bodies,
        "graphs": recorder.graphs,
    }  # fmt: skip
    return InferenceGraph.model_validate_json(json.dumps(data)), truth


@contextmanager
def watch_gemms(module: nn.Module) -> Iterator[Truth]:
    """Record every `extern_kernels.mm` that generated code calls (torch 2.13: looked up on each call)."""
    from torch._inductor.select_algorithm import extern_kernels

    truth = Truth()
    owner = {p.data_ptr(): n for n, p in module.named_parameters()}
    original = extern_kernels.mm

    def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        operand = a.clone()
        result = original(a, b, out=out)
        truth.calls.append(Call(owner[b.data_ptr()], operand, out.clone()))
        return result

    extern_kernels.mm = mm
    try:
        yield truth
    finally:
        extern_kernels.mm = original
