"""The order of the folders: what is loaded with a module comes from its own layer or one below, and no two modules load each other.

Imports inside functions are left out: commands load stages when they run, and stages that run a model load what builds one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

import graphalign

PACKAGE = Path(graphalign.__file__).parent
LAYERS = (
    {"errors"}, {"ir", "rules"}, {"dataflow", "evaluate"}, {"align"}, {"sites"}, {"patch", "console", "logprobs"}, {"rewrite", "drift"},
    {"proof"}, {"gap", "clusters", "source"}, {"dumps", "monitor", "integrations"}, {"render"},
    {"engines", "capture"}, {"pipeline"}, {"rules_check", "cli"},
)  # fmt: skip
"""Folders and modules of the package, from the bottom up; those of one layer may import each other."""
MODULES = {
    ".".join(("graphalign", *p.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): p for p in PACKAGE.rglob("*.py")
}


def loaded(node: ast.AST) -> Iterator[str]:
    """Modules of the package that are imported when a file is."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        ):
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            yield from (full if (full := f"{child.module}.{a.name}") in MODULES else child.module for a in child.names)
        elif isinstance(child, ast.Import):
            yield from (a.name for a in child.names)
        yield from loaded(child)


def imports() -> nx.DiGraph:
    """From a module to those that it loads."""
    found = ((m, other) for m, p in MODULES.items() for other in loaded(ast.parse(p.read_text())))
    return nx.DiGraph((m, other) for m, other in found if other in MODULES and other != m)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert list(nx.simple_cycles(imports())) == []


def test_a_folder_loads_what_is_below_it() -> None:
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    graph = imports()
    assert graph.number_of_edges() > 500
    part = {m: m.split(".")[1] for m in MODULES if m.count(".")}
    assert set(part.values()) - set(level) == {"__main__"}
    up = [f"{a} loads {b}" for a, b in graph.edges if a in part and b in part and level.get(part[a], len(LAYERS)) < level.get(part[b], -1)]
    assert up == []
