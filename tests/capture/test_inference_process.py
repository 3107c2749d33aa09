"""The engine's process: refused, killed, hanging; nothing of it may be left behind. A stand-in plays the script."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import graphalign.capture.inference as inference
from graphalign.errors import BadInputError, CaptureFailedError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json, os, signal, subprocess, sys, time\n" + textwrap.dedent(code))
    monkeypatch.setattr(inference, "SCRIPT", script)


def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_refusal_is_passed_on_with_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    code = """
        print("the engine says why")
        print('@graphalign {"error": "ValueError: no such architecture", "where": "vLLM"}')
        sys.exit(3)
        """
    play(monkeypatch, tmp_path, code)
    with pytest.raises(CaptureFailedError, match="no such architecture") as failure:
        inference.capture_inference(model, tmp_path / "out.json")
    assert failure.value.exit_code == 4
    assert "the engine says why" in failure.value.where
    assert failure.value.hint
    assert not (tmp_path / "out.json").exists()


def test_a_killed_engine_is_told_from_a_failed_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    play(monkeypatch, tmp_path, "print('last words', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(CaptureFailedError, match="killed by SIGKILL") as failure:
        inference.capture_inference(model, tmp_path / "out.json")
    assert "last words" in failure.value.where


def test_a_hanging_engine_is_ended_with_all_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    code = f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
        time.sleep(600)
        """
    play(monkeypatch, tmp_path, code)
    started = time.monotonic()
    with pytest.raises(CaptureFailedError, match="did not finish within 2 s"):
        inference.capture_inference(model, tmp_path / "out.json", timeout=2)
    assert time.monotonic() - started < 15
    assert all(gone(int(p)) for p in (tmp_path / "pids").read_text().split())


def test_children_left_by_a_finished_engine_are_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    code = f"""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open({str(tmp_path / "pids")!r}, "w").write(str(child.pid))
        """
    play(monkeypatch, tmp_path, code)
    with pytest.raises(CaptureFailedError, match="no usable capture"):
        inference.capture_inference(model, tmp_path / "out.json", timeout=60)
    assert gone(int((tmp_path / "pids").read_text()))


def test_the_engine_dies_with_its_parent(tmp_path: Path, model: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    code = f"""
import pathlib, graphalign.capture.inference as i
i.SCRIPT = pathlib.Path({str(script)!r})
i.capture_inference({str(model)!r}, {str(tmp_path / "out.json")!r})
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        for _ in range(600):
            if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
                break
            time.sleep(0.05)
        pid = int((tmp_path / "pid").read_text())
    finally:
        parent.kill()
        parent.wait()
    assert gone(pid)


def test_progress_is_reported_and_may_raise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    play(monkeypatch, tmp_path, """print('@graphalign {"stage": "load", "fraction": 0.3}', flush=True); time.sleep(600)""")

    def stop(stage: str, fraction: float) -> None:
        assert (stage, fraction) == ("load", 0.3)
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        inference.capture_inference(model, tmp_path / "out.json", progress=stop)
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("python", ["/nowhere/python", os.devnull])
def test_a_wrong_interpreter_is_bad_input(tmp_path: Path, model: Path, python: str) -> None:
    with pytest.raises(BadInputError, match="not a Python interpreter"):
        inference.capture_inference(model, tmp_path / "out.json", python=python)


def test_an_interpreter_without_vllm_is_named(tmp_path: Path, model: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    (bare / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    (bare / "python").chmod(0o755)
    with pytest.raises(CaptureFailedError, match=r"has no vLLM|No module named"):
        inference.capture_inference(model, tmp_path / "out.json", python=tmp_path)


def test_a_model_must_have_a_config_and_weights_if_real(tmp_path: Path, model: Path) -> None:
    with pytest.raises(BadInputError, match=r"holds no config\.json"):
        inference.capture_inference(tmp_path, tmp_path / "out.json")
    with pytest.raises(BadInputError, match="holds no weight files"):
        inference.capture_inference(model, tmp_path / "out.json", weights="real")
    with pytest.raises(BadInputError, match="0 layers"):
        inference.capture_inference(model, tmp_path / "out.json", layers=0)


def test_the_log_of_a_failed_engine_is_kept_and_its_causes_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    """vLLM's summary says "please check the logs"; the cause is a traceback far above it, in a subprocess."""
    lines = [
        "(EngineCore pid=7) ERROR 12-01 03:00:00 [registry.py:1] ModuleNotFoundError: No module named 'torchvision'",
        *(f"line {n}" for n in range(100)),
        "RuntimeError: Error raised in subprocess:",
        "ValueError: Model architectures ['X'] failed to be inspected. Please check the logs for more details.",
    ]
    play(monkeypatch, tmp_path, f"print({chr(10).join(lines)!r})\nsys.exit(3)")
    with pytest.raises(CaptureFailedError) as failure:
        inference.capture_inference(model, tmp_path / "out" / "inf.json.gz")
    assert failure.value.where.splitlines()[0] == "cause: ModuleNotFoundError: No module named 'torchvision'"
    assert "Error raised in subprocess:" not in "".join(x for x in failure.value.where.splitlines() if x.startswith("cause"))
    assert "needs torchvision" in failure.value.hint
    kept = tmp_path / "out" / "graphalign-engine.log"
    assert f"the engine's whole log: {kept}" in failure.value.hint
    assert kept.read_text().splitlines() == lines
