"""Recorded captures of other engine versions and settings, and their diffs, computed once per process."""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from graphalign.drift.snapshot import Snapshot, of_inference, of_report
from graphalign.ir.files import read_json
from graphalign.ir.inference import InferenceGraph
from graphalign.pipeline.diff import diff
from graphalign.rules import rules_dir
from graphalign.sites.report import Report
from tests.breadth import captured as breadth
from tests.fixtures import recorded

CAPTURES = Path(__file__).parent / "captures"


def path(name: str) -> Path:
    """`qwen3` is the default of the current version; `qwen3.casts`, `qwen3.v0.31.0` are recorded here."""
    return CAPTURES / f"{name}.inf.json.gz" if "." in name else recorded.paths(name)[0]


@functools.cache
def capture(name: str) -> InferenceGraph:
    return read_json(path(name), InferenceGraph, kind="inference capture")


def structure(name: str) -> Snapshot:
    return of_inference(capture(name), name, rules_dir())


@functools.cache
def report(name: str) -> Report:
    if "." not in name:
        return recorded.report(name)
    stem = name.split(".")[0]
    return diff(capture(name), (recorded.captures if recorded.paths(stem)[1].exists() else breadth.captures)(stem)[1])


def sites(name: str) -> Snapshot:
    return of_report(report(name), name)


@functools.cache
def undeclared() -> Report:
    """`qwen3.rotary` with rules in which nothing is declared about the inside of the kernel but words."""
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "rules"
        shutil.copytree(rules_dir(), rules)
        custom = rules / "ops" / "custom.yaml"
        custom.write_text(custom.read_text().partition("  computes:")[0])
        return diff(capture("qwen3.rotary"), recorded.captures("qwen3")[1], rules=rules)


def renamed(graph: InferenceGraph) -> InferenceGraph:
    """The same capture with other buffer names, kernel and op numbers, symbols, and its lists in another order."""
    plain = graph.model_dump(mode="json")

    def number(text: str) -> str:
        text = re.sub(r"\b(buf|op)(\d+)", lambda m: f"{m[1]}{int(m[2]) * 3 + 1000}", text)
        text = re.sub(r"\b((?:cpp|triton)_\w+?)_(\d+)\b", lambda m: f"{m[1]}_{int(m[2]) + 500}", text)
        return re.sub(r"\bs(\d+)\b", lambda m: f"s{int(m[1]) + 7}", text)

    def walk(x: Any) -> Any:
        if isinstance(x, str):
            return number(x)
        if isinstance(x, list):
            return [walk(y) for y in x]
        return {number(k): walk(v) for k, v in x.items()} if isinstance(x, dict) else x

    plain["graphs"] = walk(plain["graphs"])
    plain["bodies"] = {k: {**v, "sizes": walk(v["sizes"]), "indexing": walk(v["indexing"]), "var_ranges": walk(v["var_ranges"])}
                       for k, v in reversed(plain["bodies"].items())}  # fmt: skip
    for name in ("parameters", "tables", "attention"):
        plain[name] = plain[name][::-1]
    for g in plain["graphs"]:
        g["buffers"] = g["buffers"][::-1]
    plain["header"]["timings"] = {}
    return InferenceGraph.model_validate(plain)
