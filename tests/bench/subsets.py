"""The fixed point of every subset of groups: what is patched is gone from the diff, what is not stays, and nothing else appears.

    python tests/bench/subsets.py            # all 32 subsets on qwen3; singles, complements and all on llama and qwen2

The engine is the recorded capture; the model is patched and captured anew for every subset. Exits with 1 on any other outcome.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import torch

import graphalign
from graphalign.capture.training import record_forward
from graphalign.engines.examples import resolve_model
from graphalign.engines.trainer import build_trainer
from graphalign.patch.make import make_spec
from graphalign.sites.find import diff
from graphalign.sites.report import Report

OTHER = ("leftovers", "undetermined", "conflicting", "unpatchable", "semantic")


def counts(report: Report) -> dict[str, int]:
    """Edges per group."""
    return {g.name: sum(s.count for s in g.sites) for g in report.groups}


def run(name: str, inference: Any, *, every: bool) -> int:
    """Number of subsets that did not leave exactly the other groups."""
    model = build_trainer(resolve_model(f"example:{name}"), layers=None, dtype="bfloat16", attention="sdpa")
    stock = diff(inference, record_forward(model))
    groups, edges = [g.name for g in stock.groups], counts(stock)
    sizes = range(1, len(groups) + 1) if every else (1, len(groups) - 1, len(groups))
    bad = done = 0
    started = time.monotonic()
    for size in sizes:
        for subset in itertools.combinations(groups, size):
            with graphalign.apply(model, make_spec(stock, only=subset), trial=False):
                left = diff(inference, record_forward(model))
            torch._dynamo.reset()
            wanted = {g: n for g, n in edges.items() if g not in subset}
            fine = counts(left) == wanted and not any(getattr(left, k) for k in OTHER)
            done, bad = done + 1, bad + (not fine)
            if not fine:
                print(f"{name} {', '.join(subset)}: {counts(left)} left, {wanted} expected", flush=True)
    print(f"{name}: {done} subsets, {bad} wrong, {time.monotonic() - started:.0f} s", flush=True)
    return bad


def main() -> None:
    from tests.fixtures.recorded import captures

    sys.exit(1 if sum(run(name, captures(name)[0], every=name == "qwen3") for name in ("qwen3", "llama", "qwen2")) else 0)


if __name__ == "__main__":
    main()
