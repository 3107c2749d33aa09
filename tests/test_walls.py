"""Walls of the design: what may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphalign

PACKAGE = Path(graphalign.__file__).parent
OPEN = ("capture", "engines")
"""The folders that may import vLLM and Transformers."""
ENGINES = {"vllm", "transformers"}
SCRIPT = PACKAGE / "capture" / "engine_script.py"
BESIDE = {
    SCRIPT: set(),
    SCRIPT.with_name("engine_composites.py"): set(),
    SCRIPT.with_name("engine_arguments.py"): set(),
    SCRIPT.with_name("engine_numbers.py"): set(),
    PACKAGE / "ir" / "drawn.py": {"numpy"},
}
"""What runs in the engine's process, with what else it imports."""


def imports(nodes: Iterator[ast.AST]) -> Iterator[tuple[str, int]]:
    """(absolute module name, line) of every import statement, and of literal `import_module` and `__import__` calls."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield ("." * node.level + (node.module or ""), node.lineno)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__", "importorskip"):
                yield (node.args[0].value, node.lineno)


def import_time(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: all but function bodies and `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from import_time(child)


def top(module: str) -> str:
    return module.partition(".")[0]


def test_only_capture_and_engines_name_vllm_or_transformers() -> None:
    files = [p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] not in OPEN]
    assert len(files) > 10
    found = [
        f"{path.relative_to(PACKAGE)}:{line} imports {module}"
        for path in files
        for module, line in imports(ast.walk(ast.parse(path.read_text())))
        if top(module) in ENGINES
    ]
    assert found == []


def test_everything_after_capture_imports_without_vllm_and_transformers() -> None:
    names = [
        ".".join(("graphalign", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in OPEN
    ]
    code = f"""
import importlib, sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ENGINES!r}:
            raise ImportError(f"the wall: {{name}} is imported after capture")
sys.meta_path.insert(0, Wall())
for name in {names!r}:
    importlib.import_module(name)
behind = [n for n in sys.modules if n.startswith(("graphalign.capture.", "graphalign.engines."))]
assert not behind, f"capture is imported after capture: {{behind}}"
print(len({names!r}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == len(names)


def test_nothing_beside_the_engine_scripts_hides_a_module_of_the_standard_library() -> None:
    """The scripts' folder is the first place where the engine's process looks for every module."""
    assert not {p.stem for p in SCRIPT.parent.glob("*.py")} & sys.stdlib_module_names


@pytest.mark.parametrize("script", BESIDE, ids=lambda p: p.name)
def test_the_engine_scripts_need_only_the_standard_library_torch_and_vllm(script: Path) -> None:
    tree = ast.parse(script.read_text())
    allowed = {*sys.stdlib_module_names, "torch", "vllm", *BESIDE[script]}
    at_import = {(module, line) for module, line in imports(import_time(tree))}
    foreign = [f"line {line} imports {module}" for module, line in at_import if top(module) not in allowed]
    assert foreign == []
    lazily = [
        f"line {line} imports {module}"
        for module, line in imports(ast.walk(tree))
        if top(module) not in allowed | {"transformers", "sympy"}
    ]
    assert lazily == [], "the script runs in other environments, where graphalign is not installed"
