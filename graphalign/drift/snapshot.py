"""What drift compares: a spec, a sites file or a capture, brought into one form in which names of this run do not occur.

File order, buffer names, kernel numbers and line numbers are left behind on the way, so none of them can look like drift.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from graphalign.dataflow import census
from graphalign.dataflow.ranges import range_words, split_ranges
from graphalign.errors import BadInputError, CaptureFileError
from graphalign.evaluate.parts import key_name
from graphalign.ir.files import load_raw, read_json
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph
from graphalign.patch.make import key_of
from graphalign.patch.spec import Key, PatchSpec, Skipped, load, parse_layers
from graphalign.sites.report import Entry, Evidence, Report, Site

Kind = Literal["spec", "sites", "inference", "training"]
WORDS: dict[Kind, str] = {"spec": "patch spec", "sites": "sites file", "inference": "inference capture", "training": "training capture"}
BUCKETS = ("semantic", "conflicting", "undetermined", "unpatchable", "leftovers")

ANCHORS = ("gemm", "attention", "composite")
_OP_NAME = re.compile(r"\w+\.\w+\.(default|out|\w*[Tt]ensor\w*)")

EdgeKey = tuple[str, ...]
"""Producer (module, function, op, ordinal), consumer (the same), operand: an edge's identity, without source text or layer."""
Layers = tuple[int | None, int | None]
"""Layer of the consumer and of the producer."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be done with one edge in one layer."""

    kind: str
    format: str
    group: str


@dataclass
class Snapshot:
    """One of the two things compared."""

    kind: Kind
    path: str
    versions: dict[str, str]
    target: dict[str, Any]
    regime: dict[str, Any]
    model: dict[str, Any]
    compile: dict[str, Any] = field(default_factory=dict)
    simulated: bool = False
    edges: dict[tuple[EdgeKey, Layers], Change] = field(default_factory=dict)
    keys: dict[EdgeKey, tuple[Key, Key]] = field(default_factory=dict)
    """The ends in words, for messages and to look edges up in the buckets."""
    evidence: dict[EdgeKey, frozenset[str]] = field(default_factory=dict)
    buckets: dict[tuple[str, str, str], tuple[Entry, ...]] = field(default_factory=dict)
    """(bucket, what, where without line numbers) to entries: everything that is neither a site nor in agreement."""
    ops: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """(side, target, module pattern) to the number of ops."""
    opaque: frozenset[str] = frozenset()
    """Ops of the inference side that cannot be seen into."""
    declared: frozenset[str] = frozenset()
    """Custom ops that are compared as their rules declare."""
    left_out: frozenset[str | int | None] = frozenset()
    """Groups, and layers of readers, that a spec leaves out by choice: nothing is known about them. None is outside the layers."""
    structure: census.Census | None = None
    """Of a capture of several compile ranges: the one that decides."""
    ranges: dict[str, census.Census] = field(default_factory=dict)
    """The other compile ranges, by token counts in words."""
    sources: dict[str, str] = field(default_factory=dict)

    def leaves_out(self, group: str, layers: Layers) -> bool:
        """Whether an edge that the other one has is missing here by choice."""
        return group in self.left_out or layers[0] in self.left_out


def read(path: str | Path, rules: Path) -> Snapshot:
    """Read any of the four kinds of file.

    Args:
        path: `patch.yaml`, `sites.json`, or a capture.
        rules: folder of rules (captures only).

    Raises:
        BadInputError: unreadable, damaged, or none of the four.
    """
    try:
        with Path(path).open("rb") as f:
            head = f.read(4096)
    except OSError as e:
        raise BadInputError(f"cannot read {path}: {e.strerror or e}", where=str(path), hint=_HINT) from None
    if head[:2] != b"\x1f\x8b" and not head.lstrip().startswith((b"{", b"[")):
        return of_spec(load(path), str(path))
    raw = load_raw(path, kind="spec, sites file or capture")
    form = raw.get("format") if isinstance(raw, dict) else None
    if form == "graphalign.sites":
        return of_report(read_json(path, Report, kind=WORDS["sites"]), str(path))
    if form == "graphalign.patch":
        return of_spec(load(path), str(path))
    if form == "graphalign.inference":
        return of_inference(read_json(path, InferenceGraph, kind=WORDS["inference"]), str(path), rules)
    if form == "graphalign.training":
        return of_training(read_json(path, TrainingGraph, kind=WORDS["training"]), str(path))
    raise CaptureFileError(f"{path} is no spec, sites file or capture", where=f"its `format` is {form!r}", hint=_HINT)


_HINT = "give two files of one kind: patch.yaml, sites.json, or captures"


def of_spec(spec: PatchSpec, path: str = "patch.yaml") -> Snapshot:
    """The edits of a spec."""
    out = Snapshot("spec", path, spec.versions, spec.target, spec.regime, spec.model, spec.compile, spec.simulated, sources=spec.sources)
    for group in spec.groups:
        for edit in group.edits:
            key = identity(edit.producer, edit.consumer, edit.operand)
            out.keys[key] = (edit.producer, edit.consumer)
            for layers in edit.pairs():
                out.edges[key, layers] = Change(edit.kind, edit.format, group.name)
    out.left_out = frozenset(_left_out(spec.skipped))
    return out


def _left_out(skipped: tuple[Skipped, ...]) -> Iterator[str | int | None]:
    for s in skipped:
        what = s.left_out
        if what is not None and what.group:
            yield what.group
        elif what is not None and what.layers:
            try:
                yield from parse_layers(what.layers)
            except ValueError as e:
                hint = "make it again with `graphalign patch`"
                raise BadInputError(f"this patch spec leaves out what are no layers: {e}", hint=hint) from None
        elif what is not None:
            yield None


def of_report(report: Report, path: str = "sites.json") -> Snapshot:
    """The sites of a report, its evidence, its other findings and its ops."""
    model, sources = {k: v for k, v in report.model.items() if k != "sources"}, report.model.get("sources") or {}
    out = Snapshot("sites", path, report.versions, report.target, report.regime, model, report.compile, report.simulated, sources=sources)
    targets = {n.name: n.target for n in report.nodes if n.side == "inference"}
    for group in report.groups:
        for site in group.sites:
            _add_site(out, site, group.name, targets)
    grouped: dict[tuple[str, str, str], list[Entry]] = {}
    for bucket in BUCKETS:
        for e in getattr(report, bucket):
            grouped.setdefault((bucket, e.what, _placeless(e.where)), []).append(e)
    out.buckets = {k: tuple(v) for k, v in grouped.items()}
    for n in report.nodes:
        if n.status != "source":
            out.ops[n.side, n.target, census.module_of(n.where)] += 1
    # a loop in a kernel that is called by an op's name is how a rule declares that op
    loops = [n.where.split(" ") for n in report.nodes if n.side == "inference" and n.target not in ANCHORS and "." not in n.target]
    out.declared = frozenset(w for where in loops for w in where[:2] if _OP_NAME.fullmatch(w))
    # an anchor that a rule describes is called by the rule's kind: gemm, attention, composite
    out.opaque = frozenset(n.target for n in report.nodes if n.side == "inference" and n.status == "anchor" and "." in n.target)
    return out


def _add_site(out: Snapshot, site: Site, group: str, targets: dict[str, str]) -> None:
    fmt = (site.training or ("?",))[-1] if site.kind == "keep" else (site.inference or ("?",))[-1]
    for key, layers in edges_of(site):
        out.keys[key] = (key_of(site.producer), key_of(site.consumer))
        out.edges[key, layers] = Change(site.kind, fmt, group)
    out.evidence[key] = out.evidence.get(key, frozenset()) | {_shape(e, targets) for e in site.evidence}


def edges_of(site: Site) -> list[tuple[EdgeKey, Layers]]:
    """A site's edges, at least one."""
    key = identity(key_of(site.producer), key_of(site.consumer), site.consumer.operand or 0)
    consumers: list[int | None] = list(site.layers) or [None]
    producers: list[int | None] = list(site.producer_layers) or [None] * len(consumers)
    producers = producers if len(producers) == len(consumers) else [None] * len(consumers)
    return [(key, layers) for layers in zip(consumers, producers, strict=True)]


def of_inference(graph: InferenceGraph, path: str, rules: Path) -> Snapshot:
    """The structure of an inference capture."""
    h, (_, first), *others = graph.header, *split_ranges(graph)
    found = census.of_inference(first, rules)
    return Snapshot("inference", path, h.versions, h.target, {}, h.model, h.compile, h.simulated,
                    opaque=found.opaque, declared=found.declared, structure=found,
                    ranges={range_words(of): census.of_inference(one, rules) for of, one in others})  # fmt: skip


def of_training(graph: TrainingGraph, path: str) -> Snapshot:
    """The structure of a training capture."""
    h = graph.header
    model, files = {k: v for k, v in h.model.items() if k != "sources"}, h.model.get("sources") or {}
    return Snapshot("training", path, h.versions, {}, h.regime, model, structure=census.of_training(graph), sources=files)


def identity(producer: Key, consumer: Key, operand: int) -> EdgeKey:
    """What an edge is known by, in specs and in reports."""
    ends = [(k.module, k.function, key_name(k.op), str(k.ordinal)) for k in (producer, consumer)]
    return (*ends[0], *ends[1], str(operand))


def _shape(e: Evidence, targets: dict[str, str]) -> str:
    """Where the inference side shows it, without names: which ops, and whether the value stays in a register."""

    def op(name: str) -> str:
        return targets.get(name) or re.sub(r"^(op|buf)\d+\.?|(_\d+)+$", "", name) or "op"

    way = f"through {len(e.buffers)} buffer{'s' if len(e.buffers) > 1 else ''}" if e.buffers else "in a register"
    return f"{op(e.producer)} → {op(e.consumer)} {way}"


def _placeless(where: str) -> str:
    return re.sub(r"(\.py):\d+", r"\1", " ".join(where.split()))


def unsettled(old: Snapshot, new: Snapshot, edge: EdgeKey, layers: Layers) -> tuple[str, Entry] | None:
    """(bucket, entry) of `new` that leaves an edge of `old` open: its reader, or its producer, could not be judged there.

    Where the trainer's source file changed, its expressions may be written differently: then an entry in the same module is enough.
    """
    producer, consumer = old.keys[edge]
    for key, layer in ((consumer, layers[0]), (producer, layers[1])):
        rewritten = old.sources.get(key.file) != new.sources.get(key.file)
        place = f"{key.module} ({key.file} " + ("" if rewritten else f"{key.text})")
        for (bucket, _, where), entries in new.buckets.items():
            for e in entries if key.text and place in where else ():
                if layer is None or not e.layers or layer in e.layers:
                    return bucket, e
    return None
