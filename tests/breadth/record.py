"""Captures the models of `models.yaml` and `more.yaml` anew, and prints what the diff says.

    python -m tests.breadth.record [NAME …] --out DIR

An engine start is a minute on two cores, so all of them take an hour and a half. A model that is in DIR already is not captured again. With
`--training-only` the engine's side is the one recorded in `captures/`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from graphalign.capture.inference import capture_inference
from graphalign.capture.training import capture_training
from graphalign.errors import GraphalignError
from graphalign.ir.files import read_json, write_json
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph
from graphalign.sites.find import diff
from tests.breadth import models
from tests.breadth.captured import CAPTURES, counts, entries


def training(name: str, folder: Path) -> TrainingGraph:
    """The trainer's side of a model, in the regime of its recipe."""
    recipe = models.recipe(name)
    chosen = {k: recipe[k] for k in ("attention", "dtype", "autocast", "logprobs") if recipe[k] is not None}
    return capture_training(folder, **chosen)


def capture(name: str, out: Path, training_only: bool) -> tuple[InferenceGraph, TrainingGraph]:
    """Both sides, read from `out` if they are there."""
    engine = name.removesuffix("_eager").removesuffix("_autocast")
    inference_file = (CAPTURES / f"{name.removesuffix('_eager')}.inf.json.gz") if training_only else out / f"{engine}.inf.json.gz"
    training_file = out / f"{name}.train.json.gz"
    with tempfile.TemporaryDirectory() as work:
        folder = models.save(name, Path(work))
        if not inference_file.exists():
            capture_inference(folder, inference_file, target="h100" if name.endswith("_h100") else "cpu")
        if not training_file.exists():
            write_json(training_file, training(name, folder))
    return (
        read_json(inference_file, InferenceGraph, kind="inference capture"),
        read_json(training_file, TrainingGraph, kind="training capture"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="all models if none is given")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--training-only", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or [*models.recipes(), *models.more()]:
        try:
            found = diff(*capture(name, options.out, options.training_only))
        except GraphalignError as e:
            print(f"{name}: {type(e).__name__}: {e}", flush=True)
            continue
        print(f"{name}: {counts(found)} {entries(found) or 'clean'}", flush=True)


if __name__ == "__main__":
    main()
