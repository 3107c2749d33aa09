"""Runs in the trainer's environment: captures the training side with its torch and Transformers, and graphalign's code from here.

That environment needs neither graphalign nor what graphalign needs beside torch: what it lacks of it comes from the environment that asked,
and nothing else does, so that nothing else can change how the model is built.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

PURE = ("networkx", "rich", "markdown_it", "mdurl", "pygments", "typing_inspection", "annotated_types")
BINARY = ("pydantic", "pydantic_core", "yaml", "_yaml", "typing_extensions")
"""Those of an interpreter of the same version only."""


class Borrowed(MetaPathFinder):
    """Finds packages of some names in another environment."""

    def __init__(self, names: Sequence[str], places: list[str]) -> None:
        self.names, self.places = frozenset(names), places

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, self.places) if name in self.names else None


def say(message: dict[str, Any]) -> None:
    print("@graphalign " + json.dumps(message), flush=True)


def main(file: str) -> None:
    request = json.loads(Path(file).read_text())
    here = str(Path(__file__).parent)
    sys.path[:] = [p for p in sys.path if p != here]  # this folder's files are no top-level modules
    sys.meta_path.insert(0, Borrowed(["graphalign"], [request["package"]]))
    same = request["python"] == list(sys.version_info[:2])
    sys.meta_path.append(Borrowed([*PURE, *(BINARY if same else ())], request["places"]))
    try:
        from graphalign.capture.training import capture_training
        from graphalign.errors import BadInputError, GraphalignError
        from graphalign.ir.files import write_json
    except ImportError as e:
        say({"lacks": str(e.name or e), "error": str(e)})
        return
    try:
        graph = capture_training(progress=lambda line: say({"stage": line}), **request["arguments"])
        write_json(Path(request["out"]), graph)
    except GraphalignError as e:
        say({"error": e.what, "where": e.where, "hint": e.hint, "usage": isinstance(e, BadInputError)})


if __name__ == "__main__":
    main(sys.argv[1])
