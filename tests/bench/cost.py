"""What a patch costs: forward + backward time and peak memory, patched / stock, as ratios within one run.

    python tests/bench/cost.py [--model example:smollm2] [--tokens 256] [--rounds 15]

Stock and patched steps alternate, so that a busy machine slows both. `qwen3-1.7b-layers` is a stack of four layers of
Qwen3-1.7B's shape with random weights. Peak memory is the resident set of a process of its own per variant.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-1.7b-layers": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "num_hidden_layers": 4, "vocab_size": 4096, "max_position_embeddings": 4096,
    }
}  # fmt: skip


def folder_of(model: str) -> Path:
    """The model's folder; stacks of layers are made on the spot, without weights."""
    if model in SHAPES:
        from transformers import Qwen3Config

        path = Path(tempfile.gettempdir()) / f"graphalign-bench-{model}"
        config = Qwen3Config(**SHAPES[model], tie_word_embeddings=True)
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(path)
        return path
    from graphalign.engines.examples import resolve_model

    return resolve_model(model)


def build(model: str) -> Any:
    from graphalign.engines.trainer import build_trainer

    return build_trainer(folder_of(model), layers=None, dtype="bfloat16", attention="sdpa").train()


def spec_of(model: str, groups: str) -> Any:
    """The patch of a model, from a capture of the real engine (once, kept beside the results)."""
    from graphalign.capture.inference import capture_inference
    from graphalign.capture.training import capture_training
    from graphalign.ir.files import read_json
    from graphalign.ir.inference import InferenceGraph
    from graphalign.patch.make import make_spec
    from graphalign.sites.find import diff

    name = model.replace(":", "-")
    kept = Path("out/bench") / f"{name}.inf.json.gz"
    folder = folder_of(model)
    inference = read_json(kept, InferenceGraph, kind="inference capture") if kept.exists() else capture_inference(folder, kept)
    report = diff(inference, capture_training(folder))
    return make_spec(report, only=[g for g in groups.split(",") if g])


def step(model: Any, ids: Any) -> float:
    """Seconds of one forward and backward."""
    started = time.perf_counter()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    seconds = time.perf_counter() - started
    for p in model.parameters():
        p.grad = None
    return seconds


def ratio(model_name: str, groups: str, tokens: int, rounds: int) -> dict[str, float]:
    """Median of patched / stock over alternating rounds."""
    import torch

    import graphalign

    torch.manual_seed(0)
    model, spec = build(model_name), spec_of(model_name, groups)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens))
    with graphalign.apply(model, spec, trial=False):
        step(model, ids)  # compile
    ratios, stock = [], []
    patched_model = build(model_name)
    patch = graphalign.apply(patched_model, spec, trial=False)
    for _ in range(2):
        step(model, ids), step(patched_model, ids)
    for i in range(rounds):
        first, second = (model, patched_model) if i % 2 == 0 else (patched_model, model)
        a, b = step(first, ids), step(second, ids)
        s, p = (a, b) if first is model else (b, a)
        ratios.append(p / s)
        stock.append(s)
    patch.undo()
    return {"time": statistics.median(ratios), "stock_seconds": statistics.median(stock)}


def memory(model_name: str, groups: str | None, tokens: int) -> float:
    """Peak resident MiB of a few steps, in this process."""
    import torch

    import graphalign

    model = build(model_name)
    if groups is not None:
        graphalign.apply(model, spec_of(model_name, groups))
    else:
        spec_of(model_name, "")  # the same imports and captures on both sides
    ids = torch.randint(0, model.config.vocab_size, (1, tokens))
    for _ in range(3):
        step(model, ids)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory", nargs=2, metavar=("MODEL", "GROUPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        model, groups = options.memory
        print(json.dumps(memory(model, None if groups == "stock" else groups.strip("-"), options.tokens)))
        return
    rows = []
    for model in options.model or ["example:smollm2", "qwen3-1.7b-layers"]:
        peak = {g: _memory_in_process(model, g, options.tokens) for g in ("stock", "rope", "-")}
        for groups, label in (("rope", "rope alone"), ("", "all groups")):
            r = ratio(model, groups, options.tokens, options.rounds)
            rows.append((model, label, r["time"], peak[groups or "-"] / peak["stock"], r["stock_seconds"]))
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "model",
        "patch",
        "time, patched / stock",
        "peak memory",
        "stock step, s",
        title=f"cost of a patch, forward + backward, 1 x {options.tokens} tokens",
    )
    for model, label, seconds, peak_ratio, stock in rows:
        table.add_row(model, label, f"{seconds:.3f}", f"{peak_ratio:.3f}", f"{stock:.3f}")
    Console().print(table)
    Path("out/bench").mkdir(parents=True, exist_ok=True)
    Path("out/bench/cost.json").write_text(json.dumps(rows, indent=1))


def _memory_in_process(model: str, groups: str, tokens: int) -> float:
    command = [sys.executable, __file__, "--tokens", str(tokens), "--memory", model, groups]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(result.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
