"""The order of the folders and the manners of modules.

What is loaded with a module comes from its own layer or one below. Imports inside functions are left out of that: commands load stages
when they run, and stages that run a model load what builds one. No modules need each other in a circle, not even for a type or in a
function; none uses another's private names; and classes say in one place which attributes they have.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

import graphalign

PACKAGE = Path(graphalign.__file__).parent
LAYERS = (
    {"errors"}, {"ir", "rules"}, {"dataflow", "evaluate"}, {"align"}, {"sites"}, {"pictures", "patch", "console", "logprobs"},
    {"rewrite", "drift"}, {"proof"}, {"gap", "clusters", "source"}, {"dumps", "monitor", "integrations"}, {"render"},
    {"engines", "capture"}, {"pipeline"}, {"rules_check", "cli"},
)  # fmt: skip
"""Folders and modules of the package, from the bottom up; those of one layer may import each other."""
MODULES = {
    ".".join(("graphalign", *p.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): p for p in PACKAGE.rglob("*.py")
}


TREES = {m: ast.parse(p.read_text()) for m, p in MODULES.items()}
IN_ENGINES = ("graphalign.capture.engine_", "graphalign.engines.gpu.")
"""Modules that subclass what the engine and the compiler define, and set what these look for."""


def loaded(node: ast.AST, *, hidden: bool = False) -> Iterator[str]:
    """Modules of the package that are imported when a file is; `hidden`: also in functions, and for types only."""
    for child in ast.iter_child_nodes(node):
        if not hidden and (
            isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        ):
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            yield from (full if (full := f"{child.module}.{a.name}") in MODULES else child.module for a in child.names)
        elif isinstance(child, ast.Import):
            yield from (a.name for a in child.names)
        yield from loaded(child, hidden=hidden)


def imports(*, hidden: bool = False) -> nx.DiGraph:
    """From a module to those that it loads."""
    found = ((m, other) for m, tree in TREES.items() for other in loaded(tree, hidden=hidden))
    return nx.DiGraph((m, other) for m, other in found if other in MODULES and other != m)


def circles(graph: nx.DiGraph) -> list[list[str]]:
    return [sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1]


def test_no_modules_need_each_other_in_a_circle() -> None:
    """Inside a folder too, and where an import in a function or for a type would hide it. The package itself names what it exports."""
    graph = imports(hidden=True)
    graph.remove_node("graphalign")
    assert graph.number_of_edges() > imports().number_of_edges()
    assert circles(graph) == []


def test_a_hidden_circle_is_seen() -> None:
    a = ast.parse("def f():\n    from graphalign.errors import x\nif TYPE_CHECKING:\n    from graphalign.rules import y\n")
    assert list(loaded(a)) == []
    assert list(loaded(a, hidden=True)) == ["graphalign.errors", "graphalign.rules"]
    assert circles(nx.DiGraph([(1, 2), (2, 1), (2, 3)])) == [[1, 2]]


def test_a_folder_loads_what_is_below_it() -> None:
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    graph = imports()
    assert graph.number_of_edges() > 500
    part = {m: m.split(".")[1] for m in MODULES if m.count(".")}
    assert set(part.values()) - set(level) == {"__main__"}
    up = [f"{a} loads {b}" for a, b in graph.edges if a in part and b in part and level.get(part[a], len(LAYERS)) < level.get(part[b], -1)]
    assert up == []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private(tree: ast.AST) -> Iterator[str]:
    """Private names of other modules of the package that a file uses."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "graphalign":
            yield from (f"{node.module}.{a.name}" for a in node.names if is_private(a.name))
            modules |= {a.asname or a.name for a in node.names if f"{node.module}.{a.name}" in MODULES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield f"{node.value.id}.{node.attr}"


def test_no_module_uses_a_private_name_of_another() -> None:
    assert [f"{m}: {name}" for m, tree in TREES.items() for name in private(tree)] == []


def attributes(cls: ast.ClassDef) -> tuple[set[str], set[str]]:
    """What a class says it has (in its body, `__init__` or `__post_init__`), and what its other methods set."""
    said = {t.id for s in cls.body for t in targets(s) if isinstance(t, ast.Name)}
    later: set[str] = set()
    for f in (s for s in cls.body if isinstance(s, ast.FunctionDef)):
        found = {t.attr for n in ast.walk(f) for t in targets(n) if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"}
        (said if f.name in ("__init__", "__post_init__") else later).update(found)
    return said, later


def targets(node: ast.AST) -> list[ast.expr]:
    found = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []
    return [x for t in found for x in (t.elts if isinstance(t, ast.Tuple) else [t])]


def test_classes_say_in_one_place_which_attributes_they_have() -> None:
    classes = {(m, c.name): c for m, tree in TREES.items() for c in ast.walk(tree) if isinstance(c, ast.ClassDef)}
    by_name = {name: c for (_, name), c in classes.items() if sum(n == name for _, n in classes) == 1}

    def said(m: str, c: ast.ClassDef) -> set[str]:
        bases = [ast.unparse(b).rpartition(".")[2] for b in c.bases]
        known = attributes(c)[0]
        for b in bases:
            near = [x for (module, name), x in classes.items() if name == b and (module == m or b not in by_name)]
            for base in near or [x for x in [by_name.get(b)] if x]:
                known |= said(m, base) if base is not c else set()
        return known

    late = [f"{m}.{c.name}.{a}" for (m, _), c in classes.items() if not m.startswith(IN_ENGINES) for a in attributes(c)[1] - said(m, c)]
    assert late == []
