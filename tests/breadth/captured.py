"""Recorded captures of tiny models of many architectures: random weights, vLLM 0.32.0 on CPU, Transformers 5.19.0."""

from __future__ import annotations

import functools
from pathlib import Path

from graphalign.ir.files import read_json
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph
from graphalign.pipeline.diff import diff
from graphalign.sites.report import Report

CAPTURES = Path(__file__).parent / "captures"


@functools.cache
def captures(name: str) -> tuple[InferenceGraph, TrainingGraph]:
    """Both sides of one model; `gemma2_eager` is Gemma 2's engine against a trainer with eager attention."""
    inference = CAPTURES / f"{name.removesuffix('_eager')}.inf.json.gz"
    training = CAPTURES / f"{name}.train.json.gz"
    return read_json(inference, InferenceGraph, kind="inference capture"), read_json(training, TrainingGraph, kind="training capture")


@functools.cache
def report(name: str) -> Report:
    """The diff of one model."""
    return diff(*captures(name))


def counts(found: Report) -> dict[str, int]:
    """Group to its number of edges."""
    return {g.name: sum(s.count for s in g.sites) for g in found.groups}


LISTS = ("leftovers", "undetermined", "conflicting", "unpatchable", "semantic")


def entries(found: Report) -> dict[str, int]:
    """Lists that are not empty, with their number of nodes or edges."""
    return {k: sum(e.count for e in listed) for k in LISTS if (listed := getattr(found, k))}
