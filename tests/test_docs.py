"""The documents: their links lead somewhere, and the commands in them are commands, with options that they take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

import graphalign
import graphalign.cli.clusters
import graphalign.cli.drift
import graphalign.cli.find
import graphalign.cli.gap
import graphalign.cli.patch
import graphalign.cli.render
import graphalign.cli.source
import graphalign.cli.targets
from graphalign.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(p.relative_to(ROOT)) for p in DOCUMENTS]


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        if target.startswith(("http:", "https:")):
            continue
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


def anchors(file: Path) -> set[str]:
    """As GitHub makes them of headings."""
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in re.findall(r"(?m)^#+ (.+)$", file.read_text())}


def commands(path: Path) -> list[str]:
    """Lines of code blocks that call graphalign, with what goes on in the next line."""
    blocks = re.findall(r"(?ms)^```(?:bash|sh|yaml|)\n(.*?)^```", path.read_text())
    lines = [x for b in blocks for x in b.replace("\\\n", " ").splitlines()]
    return [m.group(1) for x in lines if (m := re.match(r"^\s*(?:\$ |- run: )?(graphalign .*)$", x))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_commands_exist_and_take_their_options(path: Path) -> None:
    root = typer.main.get_command(app)
    wrong = []
    for line in commands(path):
        words = shlex.split(line.partition("  #")[0].replace("[", "").replace("]", ""))
        command = root
        for part in re.split(r" (?:&&|>|\|) ", " ".join(words)):
            given = part.split()
            if given[0] != "graphalign":
                continue
            command, rest = root, given[1:]
            while rest and rest[0] in getattr(command, "commands", {}):
                command, rest = command.commands[rest[0]], rest[1:]  # type: ignore[attr-defined]
            known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
            wrong += [f"{line}: {w}" for w in rest if w.startswith("-") and w.split("=")[0] not in known]
            if command is root and rest[:1] != ["--help"]:
                wrong.append(line)
    assert wrong == []


def test_the_package_exports_what_the_documents_use_and_no_more() -> None:
    text = "\n".join(p.read_text() for p in DOCUMENTS)
    used = set(re.findall(r"graphalign\.([A-Za-z]\w*)", "\n".join(re.findall(r"(?ms)^```python\n(.*?)^```", text))))
    modules = {p.stem for p in Path(graphalign.__file__).parent.iterdir()}
    assert used - modules <= set(graphalign.__all__)
    assert [name for name in graphalign.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_the_documents_show_commands() -> None:
    assert sum(len(commands(p)) for p in DOCUMENTS) > 40
    assert graphalign.cli.find.__doc__
