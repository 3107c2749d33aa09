"""The engine script's recorder on small compiled functions, without an engine."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import graphalign.capture

PATH = Path(graphalign.capture.__file__).with_name("engine_script.py")


def load_script() -> ModuleType:
    """The script as a module, the way no one runs it: by path."""
    spec = importlib.util.spec_from_file_location("graphalign_engine_script", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def capture_compiled(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """(the one graph that compiling and calling `fn` gives, bodies, recorder with the call's `result`)."""
    import torch

    script = load_script()
    torch._dynamo.reset()
    recorder = script.Recorder()
    recorder.install()
    try:
        with torch.no_grad(), torch._inductor.config.patch({"force_disable_caches": True, **options}):
            recorder.result = torch.compile(fn)(*args)
    finally:
        recorder.uninstall()
    assert len(recorder.graphs) == 1
    return recorder.graphs[0], recorder.bodies, recorder
