"""What `graphalign diff` costs for models of Qwen3-8B's width and 9, 18, 36 and 72 layers, on one core.

    python tests/bench/depth.py [LAYERS ...] [--target h100] [--repeat N] [--out DIR]

Neither side needs weights: the engine is captured for a GPU that need not be here, the trainer on dummy weights. Captures are kept
in DIR. Each diff runs in a process of its own, on one core and with one thread; of N runs the one that took least CPU time is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MODEL = "example:qwen3-8b-base"
LAYERS = (9, 18, 36, 72)


class Stages:
    """A progress function that notes wall-clock and CPU seconds per stage, and the process's peak memory after it."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {}
        self._stage, self._since = "import", (time.perf_counter(), 0.0)

    def __call__(self, stage: str, fraction: float | None = None) -> None:
        now = time.perf_counter(), time.process_time()
        entry = self.seen.setdefault(self._stage, [0.0, 0.0, 0.0])
        entry[0] += now[0] - self._since[0]
        entry[1] += now[1] - self._since[1]
        entry[2] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self._stage, self._since = stage, now


def capture(layers: int, target: str, out: Path) -> tuple[Path, Path]:
    """Both captures of the model with so many layers, made if they are not there."""
    from graphalign.capture.inference import capture_inference
    from graphalign.capture.training import capture_training
    from graphalign.engines.examples import resolve_model
    from graphalign.ir.files import write_json

    folder = out / f"qwen3-8b-base-{layers}"
    inference, training = folder / f"{target}.inf.json.gz", folder / "train.json.gz"
    if not (inference.is_file() and training.is_file()):
        config = json.loads((resolve_model(MODEL) / "config.json").read_text())
        config |= {"num_hidden_layers": layers, "max_window_layers": layers, "layer_types": ["full_attention"] * layers}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        capture_inference(folder, inference, target=target)
        write_json(training, capture_training(folder))
    return inference, training


def measure(inference: Path, training: Path, sites: Path) -> dict[str, list[float]]:
    """This process's cost of one diff: stage to wall-clock seconds, CPU seconds, peak MiB."""
    stages = Stages()
    import torch

    from graphalign.ir.files import read_json, write_json
    from graphalign.ir.inference import InferenceGraph
    from graphalign.ir.training import TrainingGraph
    from graphalign.pipeline.diff import diff

    torch.set_num_threads(1)
    stages("read")
    both = read_json(inference, InferenceGraph, kind="inference capture"), read_json(training, TrainingGraph, kind="training capture")
    stages("trace")
    report = diff(*both, progress=stages)
    stages("write")
    write_json(sites, report)
    stages("")
    return stages.seen


def run(inference: Path, training: Path, repeat: int) -> dict[str, list[float]]:
    """The cheapest of some runs, each in a new process on one core."""
    core = max(os.sched_getaffinity(0))
    command = [sys.executable, __file__, "--measure", str(inference), str(training), str(inference.with_name("sites.json"))]
    runs = []
    for _ in range(repeat):
        done = subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),  # nothing else runs beside it yet
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return min(runs, key=lambda seen: sum(cpu for _, cpu, _ in seen.values()))


def show(results: dict[int, dict[str, list[float]]], target: str) -> None:
    """A row per depth and stage, then what each depth costs beyond the one before."""
    table = Table("layers", "stage", "wall s", "CPU s", "peak MiB", title=f"graphalign diff, {MODEL} for {target}, one core")
    for layers, seen in results.items():
        for stage, (wall, cpu, peak) in seen.items():
            table.add_row(str(layers), stage, f"{wall:.2f}", f"{cpu:.2f}", f"{peak:.0f}")
        wall, cpu, peak = (sum(x[0] for x in seen.values()), sum(x[1] for x in seen.values()), max(x[2] for x in seen.values()))
        table.add_row(f"[bold]{layers}", "[bold]all", f"[bold]{wall:.2f}", f"[bold]{cpu:.2f}", f"[bold]{peak:.0f}", end_section=True)
    Console().print(table)
    before: tuple[int, dict[str, list[float]]] | None = None
    for layers, seen in results.items():
        if before is not None:
            more = {stage: x[1] - before[1].get(stage, [0.0, 0.0])[1] for stage, x in seen.items()}
            parts = ", ".join(f"{stage} {seconds:+.2f}" for stage, seconds in more.items())
            print(f"{before[0]} to {layers} layers: {sum(more.values()):+.2f} s of CPU time ({parts})")
        before = layers, seen


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(*(Path(p) for p in sys.argv[2:5]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", type=int, default=list(LAYERS))
    parser.add_argument("--target", default="h100")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/bench/depth"))
    options = parser.parse_args()
    results: dict[int, Any] = {}
    for layers in options.layers:
        inference, training = capture(layers, options.target, options.out)
        results[layers] = run(inference, training, options.repeat)
    show(results, options.target)
    (options.out / "depth.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
