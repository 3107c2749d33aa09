"""Tiny models whose rotary embedding depends on a range, and the engine's side of them as it was recorded (vLLM 0.32.0).

The captures are what `graphalign find MODEL --engine-arg max_model_len=N` left of these models, with random weights: `longrope` (512
positions, so the table's long half), `longrope_short` (128), `longrope_h100` (512, a simulated H100), `mrope` (512; positions in three
rows) and `dynamic` (2048 positions, and a table of 512 rows).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from graphalign.capture.training import record_forward
from graphalign.ir.files import read_json
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph

COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
SWITCH = 128
"""Positions up to which the LongRoPE model uses its short factors."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": SWITCH,
    "short_factor": [1, 1, 1, 1, 1, 1.1, 1.1, 1.1, 1.1, 1.2, 1.2, 1.2, 1.2, 1.3, 1.3, 1.4],
    "long_factor": [1, 1.5, 2, 3, 4, 5, 6, 7, *[8] * 8],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {"max_position_embeddings": 1024, "original_max_position_embeddings": SWITCH, "pad_token_id": 0, "rope_parameters": LONGROPE},
    ),
    "mrope": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}),
    "dynamic": ("llama", {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}),
}


@functools.cache
def engine(name: str) -> InferenceGraph:
    """The engine's side, as recorded."""
    return read_json(Path(__file__).parent / "captures" / f"{name}.inf.json.gz", InferenceGraph, kind="inference capture")


def model(name: str) -> Any:
    """The trainer's model; its values do not matter."""
    import transformers

    kind, more = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **{**COMMON, **more})
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


@functools.cache
def trainer(name: str, reach: int | None = None) -> TrainingGraph:
    """The trainer's side, recorded at so many positions; all that the model has without."""
    return record_forward(model(name), reach=reach)
