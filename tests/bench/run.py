"""Where the time of `graphalign find` goes: seconds per stage of both captures and of everything after them.

    python tests/bench/run.py [MODEL ...] [--simulate MODEL ...] [--repeat N] [--out DIR]

Captures run once; what follows runs `--repeat` times and its median is shown, with the peak memory of the process. At the end, what
the diff costs for models of 9 to 72 layers (`depth.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

PAPER = ("example:deepseek-r1-distill-qwen-1.5b", "example:qwen3-1.7b", "example:qwen3-4b-base", "example:qwen3-8b-base")
"""The models of the paper, at full width and depth; the bar is 60 s and 4 GiB each."""


class Timer:
    """A progress function that sums wall-clock seconds per stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage, self._since = "start", time.perf_counter()

    def __call__(self, stage: str, fraction: float | None = None) -> None:
        now = time.perf_counter()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def stop(self) -> dict[str, float]:
        self("")
        return {k: v for k, v in self.seconds.items() if k}


def measure(model: str, out: Path, repeat: int) -> dict[str, dict[str, float]]:
    """Seconds per stage of each job for one model."""
    from graphalign.capture.inference import capture_inference
    from graphalign.capture.training import capture_training
    from graphalign.engines.examples import resolve_model
    from graphalign.pipeline.diff import diff
    from graphalign.rules import rules_dir

    folder = resolve_model(model)
    timer = Timer()
    inference = capture_inference(folder, out / f"{model.replace(':', '-').replace('/', '-')}.json.gz", progress=timer)
    jobs = {"inference capture": timer.stop()}
    timer = Timer()
    training = capture_training(folder, progress=timer)
    jobs["training capture"] = timer.stop()
    runs = []
    for _ in range(repeat):
        timer = Timer()
        diff(inference, training, rules=rules_dir(), progress=timer)
        runs.append(timer.stop())
    jobs["after capture"] = {stage: statistics.median(run.get(stage, 0.0) for run in runs) for stage in runs[0]}
    return jobs


def simulate(model: str, out: Path, target: str = "h100") -> dict[str, dict[str, float]]:
    """Seconds per stage of a simulated capture at full width and depth, and the peak memory of its process in GiB."""
    from graphalign.capture.inference import capture_inference
    from graphalign.engines.examples import resolve_model

    timer = Timer()
    found = capture_inference(resolve_model(model), out / f"{model.replace(':', '-')}.{target}.json.gz", target=target, progress=timer)
    seconds = timer.stop()
    print(f"{model} for {target}: {sum(seconds.values()):.1f} s, peak {found.header.timings['peak_gib']:.2f} GiB")
    return {f"inference capture, {target}": seconds}


def train(model: str, out: Path) -> dict[str, dict[str, float]]:
    """Seconds of a training capture at full width and depth, in a process of its own, whose peak memory is printed.

    The resident set counts a shared page once for every address at which it was read.
    """
    command = [
        sys.executable,
        "-m",
        "graphalign",
        "capture",
        "training",
        model,
        "-o",
        str(out / f"{model.replace(':', '-')}.train.json.gz"),
    ]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    print(f"{model}, training: {seconds:.1f} s, peak resident set {usage.ru_maxrss / 2**20:.2f} GiB")
    return {"training capture, own process": {"all": seconds}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["example:qwen3"])
    parser.add_argument("--simulate", nargs="*", default=list(PAPER), help="capture these for an H100 that isn't here, and their trainers")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--no-depth", action="store_true", help="leave out the models of 9 to 72 layers")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = {model: measure(model, options.out, options.repeat) for model in options.models}
    results |= {model: simulate(model, options.out) | train(model, options.out) for model in options.simulate}
    table = Table("model", "job", "stage", "seconds", title=f"graphalign find on {platform.machine()}, {platform.python_version()}")
    for model, jobs in results.items():
        for job, stages in jobs.items():
            for stage, seconds in stages.items():
                table.add_row(model, job, stage, f"{seconds:.2f}")
            table.add_row(model, f"[bold]{job}", "[bold]sum", f"[bold]{sum(stages.values()):.2f}", end_section=True)
    Console().print(table)
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB (the engine's is not in it)")
    (options.out / "bench.json").write_text(json.dumps(results, indent=1))
    if not options.no_depth:
        subprocess.run([sys.executable, str(Path(__file__).with_name("depth.py")), "--out", str(options.out / "depth")], check=True)


if __name__ == "__main__":
    main()
