"""Stages replaced by stand-ins: these tests are about exit codes and messages, not about captures."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

import graphalign.cli.find
import graphalign.render.dot  # noqa: F401  (before its imports are replaced)
from graphalign import console
from graphalign.cli.app import app
from graphalign.ir.inference import Header, InferenceGraph
from graphalign.ir.training import Header as TrainingHeader
from graphalign.ir.training import TrainingGraph


class Report(BaseModel):
    """The fields of the real report that the command line reads."""

    groups: list[str] = []
    leftovers: list[str] = []
    semantic: list[str] = []
    uncompared: list[str] = []


INFERENCE = InferenceGraph(
    header=Header(versions={}, target={}, compile={}, model={}), parameters=(), tables=(), attention=(), bodies={}, graphs=()
)
TRAINING = TrainingGraph(header=TrainingHeader(versions={}, regime={}, model={}, tokens=8), inputs=(), nodes=(), outputs=(), sources=())


@dataclass
class Stage:
    """What the stand-ins return or raise, and what they were called with."""

    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    fail: dict[str, BaseException] = field(default_factory=dict)
    report: Report = field(default_factory=Report)
    inference: InferenceGraph = INFERENCE
    training: TrainingGraph = TRAINING

    def call(self, name: str, result: Any, /, **arguments: Any) -> Any:
        self.calls[name] = arguments
        if progress := arguments.get("progress"):
            progress("a stage", None)
            progress("a stage", 0.5)
            progress("another stage", None)
        if error := self.fail.get(name):
            raise error
        return result

    def run(self, *arguments: str | Path) -> SimpleNamespace:
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    s = Stage()

    def put(module: str, **functions: Any) -> None:
        stand_in = ModuleType(module)
        stand_in.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, module, stand_in)

    def capture_inference(model_dir: Path, out: Path, **kw: Any) -> InferenceGraph:
        return s.call("inference", s.inference, model_dir=model_dir, out=out, **kw)

    put("graphalign.engines.examples", resolve_model=lambda name: s.call("resolve", Path("/models") / name, name=name))
    put("graphalign.capture.inference", capture_inference=capture_inference)
    put("graphalign.capture.training", capture_training=lambda model_dir, **kw: s.call("training", s.training, model_dir=model_dir, **kw))
    put(
        "graphalign.pipeline.diff",
        diff=lambda inference, training, **kw: s.call("diff", s.report, inference=inference, training=training, **kw),
    )
    put("graphalign.render.page", render_page=lambda report: "PAGE")
    monkeypatch.setattr("graphalign.dataflow.ranges.tokens_to_record", lambda capture: None)
    put("graphalign.sites.expected", verdict=lambda report, rules: "EXPECTED")
    put("graphalign.render.sites_table", render_table=lambda report, console: console.print("TABLE"))
    put("graphalign.sites.why", explain=lambda report, node: s.call("why", f"{node} is aligned", node=node))
    put("graphalign.sites.report", Report=Report)
    monkeypatch.setattr(console.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("COLUMNS", "200")
    return s
