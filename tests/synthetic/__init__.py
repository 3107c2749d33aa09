"""Random small models, rendered twice: as eager ATen nodes and as Inductor loop bodies, so that the true rounding map is known.

A `Program` is a list of values, each computed from earlier ones. A `Plan` says, for every edge, whether training rounds it
and how inference carries it: recomputed in the reader's kernel, through an FP32 or a BF16 buffer, or forwarded in a register.
`training(program, plan)` and `inference(program, plan)` write the captures; `truth(program, plan)` is the map.
"""

from __future__ import annotations

import random
from typing import Any

from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph
from tests.synthetic.eager import training, writes
from tests.synthetic.engine import Mixed, inference
from tests.synthetic.program import BF, FP, Plan, Program, distinct, random_plan, random_program, truth

__all__ = ["BF", "FP", "Mixed", "Plan", "Program", "inference", "random_pair", "training", "truth", "writes"]


def random_pair(seed: int, **options: Any) -> tuple[Program, Plan, InferenceGraph, TrainingGraph]:
    """A random program and plan, rendered; plans that cannot be rendered are drawn again."""
    rng = random.Random(seed)
    faithful = options.pop("faithful", False)
    while True:
        program = random_program(rng, **options)
        if not distinct(program):
            continue
        plan = random_plan(rng, program, faithful=faithful)
        try:
            return program, plan, inference(program, plan), training(program, plan)
        except Mixed:
            continue
