"""The training side captured in another environment: `--trainer-python`."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from graphalign.capture.elsewhere import capture_training_with
from graphalign.capture.training import capture_training
from graphalign.engines.examples import resolve_model
from graphalign.errors import BadInputError, CaptureFailedError

SHARED = Path(sysconfig.get_paths()["purelib"])
NEEDED = ("pydantic", "pydantic_core", "networkx", "rich", "yaml", "graphalign")
"""What a trainer's environment need not have."""


def environment(folder: Path, *, without: Sequence[str] = (), empty: bool = False) -> Path:
    """An environment of its own with the packages of this one but for some, and without graphalign."""
    venv.create(folder, symlinks=True, with_pip=False)
    if not empty:
        packages = folder / "packages"
        packages.mkdir()
        for entry in SHARED.iterdir():
            if entry.suffix != ".pth" and not any(entry.name == n or entry.name.startswith((f"{n}-", f"{n}.")) for n in without):
                (packages / entry.name).symlink_to(entry)
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "shared.pth").write_text(str(packages))
    return folder


@pytest.fixture(autouse=True)
def _no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.mark.slow
def test_the_same_capture_as_in_this_environment(tmp_path: Path) -> None:
    python = environment(tmp_path / "env", without=NEEDED)
    missing = subprocess.run([python / "bin" / "python", "-c", "import pydantic"], capture_output=True, text=True, check=False)
    assert "No module named 'pydantic'" in missing.stderr
    arguments = {"model": resolve_model("example:qwen3"), "layers": 2}
    stages: list[str] = []
    there = capture_training_with(python, arguments, progress=stages.append)
    here = capture_training(**arguments)
    assert stages == ["building qwen3", "recording 8 tokens"]
    blank = {"timings": {}}
    assert there.model_copy(update={"header": there.header.model_copy(update=blank)}) == here.model_copy(
        update={"header": here.header.model_copy(update=blank)}
    )


@pytest.mark.slow
def test_a_factory_is_called_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys, torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)\n"
        "    def forward(self, input_ids):\n"
        "        return self.head(self.embed(input_ids))\n"
        "def build():\n"
        f"    assert sys.prefix == {str(tmp_path / 'env')!r}, sys.prefix\n"
        "    return Net()\n"
        "def broken():\n"
        "    raise RuntimeError('no GPU')\n"
    )
    monkeypatch.chdir(tmp_path)
    python = environment(tmp_path / "env") / "bin" / "python"
    assert capture_training_with(python, {"model": None, "factory": "mine:build"}).header.model["architecture"] == "Net"
    with pytest.raises(CaptureFailedError, match="factory 'mine:broken' raised RuntimeError: no GPU"):
        capture_training_with(python, {"model": None, "factory": "mine:broken"})
    with pytest.raises(BadInputError, match="factory module 'mine' has no 'none'"):
        capture_training_with(python, {"model": None, "factory": "mine:none"})


def test_an_environment_without_torch_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"lacks torch, which the capture needs") as e:
        capture_training_with(environment(tmp_path / "env", empty=True), {"model": "x"})
    assert "install torch there" in str(e.value)


def test_what_is_no_interpreter(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="is not a Python interpreter"):
        capture_training_with(tmp_path, {"model": "x"})


def test_a_process_that_dies_is_no_capture(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\nprint('about to die'); raise SystemExit(3)\n")
    fake.chmod(0o755)
    with pytest.raises(CaptureFailedError, match="ended with status 3") as e:
        capture_training_with(fake, {"model": "x"})
    assert "about to die" in str(e.value)
