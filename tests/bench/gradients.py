"""Gradients through the patch, per parameter, against an FP64 straight-through evaluation of the same roundings.

python tests/bench/gradients.py
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

import graphalign
from graphalign.capture.inference import capture_inference
from graphalign.capture.training import capture_training
from graphalign.engines.examples import resolve_model
from graphalign.engines.trainer import build_trainer
from graphalign.patch.make import make_spec
from graphalign.proof.gradients import compare_gradients
from graphalign.sites.find import diff


def main() -> None:
    folder = resolve_model("example:qwen3")
    spec = make_spec(diff(capture_inference(folder, "out/bench/gradients.inf.json.gz"), capture_training(folder)))
    model = build_trainer(folder, layers=None, dtype="bfloat16", attention="sdpa").train()
    ids = torch.randint(0, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    with graphalign.apply(model, spec, trial=False):
        rows = compare_gradients(model, lambda m: m(input_ids=ids, labels=ids, use_cache=False).loss)
    table = Table(
        "parameter",
        "cosine",
        "norm / FP64's",
        "lost",
        title=f"gradients of the patched Qwen3 example, {len(rows)} parameters, lowest cosines",
    )
    for row in sorted(rows, key=lambda r: r.cosine)[:12]:
        table.add_row(row.name, f"{row.cosine:.6f}", f"{row.norm:.4f}", "yes" if row.lost else "")
    Console().print(table)


if __name__ == "__main__":
    main()
