"""The notebooks run from recorded captures, and say what their committed outputs say."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.render import needs

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = ("01_new_architecture", "02_after_a_vllm_bump", "03_render_a_diff", "04_the_patch_as_source")
SECONDS = 300


def outputs(notebook: nbformat.NotebookNode) -> list[str]:
    """Printed text per cell; a picture counts as `svg`, because its coordinates vary with fonts and Graphviz."""
    found = []
    for cell in notebook.cells:
        for o in cell.get("outputs", ()):
            found.append(o.text if o.output_type == "stream" else "svg" if "image/svg+xml" in o.data else o.data["text/plain"])
    return found


@needs.drawing
@pytest.mark.parametrize("name", [*NAMES[:3], pytest.param(NAMES[3], marks=pytest.mark.slow)])
def test_a_notebook_runs_and_says_the_same(name: str) -> None:
    committed = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    fresh = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    NotebookClient(fresh, timeout=SECONDS, coalesce_streams=True, resources={"metadata": {"path": str(FOLDER)}}).execute()
    if os.environ.get("GRAPHALIGN_WRITE_NOTEBOOKS"):
        for cell in fresh.cells:
            cell.metadata.pop("execution", None)  # times would differ on every run
        nbformat.write(fresh, FOLDER / f"{name}.ipynb")
        committed = fresh
    assert outputs(committed), "outputs are committed: run the test with GRAPHALIGN_WRITE_NOTEBOOKS=1"
    assert outputs(fresh) == outputs(committed)


def test_there_are_no_others() -> None:
    assert sorted(p.stem for p in FOLDER.glob("*.ipynb")) == list(NAMES)
