"""What capturing adds to the engine's start: the same start of vLLM's CPU engine with and without the recorder.

    python tests/bench/engine_start.py [MODEL] [--repeat N] [--layers N]

Every start is a process of its own with empty caches, and both kinds take turns. Medians are shown; CPU time is the figure to
trust on a machine that does other things too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PLAIN = """
import json, os, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import engine_script as script
sys.path.pop(0)
request = json.load(open(sys.argv[2]))
script.prepare_environment(request)
import vllm
real = vllm.LLM
vllm.LLM = lambda **given: real(**{**given, "load_format": "dummy" if request["weights"] == "dummy" else "auto"})
script.start_engine(request)
os._exit(0)
"""
"""The start that a capture makes, with vLLM's own loader and nothing recorded."""


def start(script: Path, request: dict[str, Any], *, record: bool) -> tuple[float, float]:
    """Wall-clock and CPU seconds of one engine process, start to end."""
    with tempfile.TemporaryDirectory(prefix="graphalign-bench-") as folder:
        work = Path(folder)
        request = {**request, "out": str(work / "capture.json.gz")}
        (work / "request.json").write_text(json.dumps(request))
        caches = {name: str(work / name) for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        command = [sys.executable, str(script)] if record else [sys.executable, "-c", PLAIN, str(script)]
        began = time.perf_counter()
        with (work / "log.txt").open("w+") as log:
            process = subprocess.Popen(
                [*command, str(work / "request.json")], stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **caches}
            )
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - began
            if status:
                log.seek(0)
                raise SystemExit(f"the engine did not start:\n{log.read()[-3000:]}")
    return wall, usage.ru_utime + usage.ru_stime


def main() -> None:
    from graphalign.capture.inference import SCRIPT
    from graphalign.engines.examples import resolve_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="example:qwen3")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    model = resolve_model(options.model)
    weights = "real" if list(model.glob("*.safetensors")) else "dummy"
    request = {"model": str(model), "name": model.name, "layers": options.layers, "weights": weights, "engine_args": {}, "values": None}
    request |= {"rollouts": None, "keep_kernels": None}
    seen: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(options.repeat):
        for record in (False, True):
            seen[record].append(start(SCRIPT, request, record=record))
            print(
                f"{'with' if record else 'without'} capture: {seen[record][-1][0]:.1f} s, CPU {seen[record][-1][1]:.1f} s", file=sys.stderr
            )
    table = Table("engine start", "wall s", "CPU s", title=f"{options.model}, cold caches, median of {options.repeat}")
    medians = {record: [statistics.median(x) for x in zip(*runs, strict=True)] for record, runs in seen.items()}
    for record, (wall, cpu) in medians.items():
        table.add_row("with capture" if record else "without", f"{wall:.1f}", f"{cpu:.1f}")
    table.add_row("more", *(f"{medians[True][k] / medians[False][k] - 1:+.1%}" for k in (0, 1)))
    Console().print(table)


if __name__ == "__main__":
    main()
