"""Rollouts: what the engine generated, with the log-probabilities it gave, while it sampled and when it scores the same tokens again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from graphalign.capture.inference import Progress, capture_inference
from graphalign.errors import GapInputError
from graphalign.ir.files import read_json
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.work import work_folder

RAW = "raw_logprobs"
"""vLLM's `logprobs_mode` that the gap is defined for: before temperature, penalties, top-k and top-p."""
MOST_TOKENS = 4096
"""Tokens of one step, unless a single sequence is longer."""
MOST_SEQUENCES = 16
"""Sequences that are decoded in one batch."""


class Response(BaseModel):
    """One generated response."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    prompt: int
    """Index of its prompt."""
    sample: int
    tokens: tuple[int, ...]
    sampled: tuple[float, ...]
    """Log-probability of every token when it was sampled (decode, in a batch), in nats."""
    prefill: tuple[float, ...]
    """The same tokens scored by the same engine as part of one prompt, alone."""
    finish: str
    """Why it ended: "stop" or "length"."""

    @model_validator(mode="after")
    def _same_length(self) -> Response:
        if not len(self.tokens) == len(self.sampled) == len(self.prefill):
            raise ValueError(f"{len(self.tokens)} tokens, {len(self.sampled)} and {len(self.prefill)} log-probabilities")
        return self


class Rollouts(BaseModel):
    """Everything one engine generated, as its process wrote it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["graphalign.rollouts"]
    version: Literal[1]
    versions: dict[str, str]
    logprobs_mode: str
    temperature: float
    block_size: int
    """Tokens per block of the KV cache."""
    max_num_seqs: int
    """Sequences that were decoded in one batch at most."""
    seconds: dict[str, float]
    """Wall-clock seconds of "generate" and "prefill"."""
    prompts: tuple[tuple[int, ...], ...]
    sequences: tuple[Response, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(s.seed for s in self.sequences))

    @property
    def tokens(self) -> int:
        return sum(len(s.tokens) for s in self.sequences)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, prompts' prefill included."""
        return self.tokens / max(self.seconds.get("generate", 0.0), 1e-9)


def generate(
    model: Path,
    capture: Path,
    out: Path,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int] = (1,),
    samples: int = 1,
    max_tokens: int = 256,
    ignore_eos: bool = False,
    values: Mapping[str, Any] | None = None,
    python: str | os.PathLike[str] | None = None,
    engine_args: Mapping[str, Any] | None = None,
    layers: int | None = None,
    timeout: float = 1800,
    progress: Progress | None = None,
) -> tuple[InferenceGraph, Rollouts]:
    """Start an engine, capture it, and generate with it at temperature 1 from every prompt and seed.

    Args:
        model: the model's folder, with weights.
        capture: file for the inference capture.
        out: file for the rollouts (compressed if it ends in .gz).
        prompts: token ids per prompt, none empty.
        seeds: every prompt is answered `samples` times for each.
        samples: responses per prompt and seed.
        max_tokens: most tokens per response.
        ignore_eos: go on after the end-of-sequence token.
        values, python, engine_args, layers, timeout, progress: see `capture_inference`.

    Raises:
        BadInputError, CaptureFailedError: see `capture_inference`.
        GapInputError: the engine does not report raw log-probabilities at temperature 1, or generated nothing at all.
    """
    longest = max([len(p) + max_tokens for p in prompts] + [len((values or {}).get("tokens", ()))])
    together = min(len(prompts) * samples, MOST_SEQUENCES)
    arguments = {
        "max_num_seqs": together,
        "max_model_len": longest + 1,
        "max_num_batched_tokens": max(512, longest + 1, min(together * max(len(p) for p in prompts), MOST_TOKENS)),
        # vLLM's CPU engine cannot take a seeded request's draw back, as it must after a part of a prompt ("CPU Generator does not use
        # offset", 0.32.0)
        "enable_chunked_prefill": False,
        **(engine_args or {}),
    }
    room = arguments["max_model_len"]
    if isinstance(room, int) and room < longest:
        raise GapInputError(
            f"max_model_len is {room}; the longest prompt and its response take {longest} tokens",
            where="--engine-arg max_model_len",
            hint="leave it out, or ask for fewer --max-tokens",
        )
    mode = arguments.setdefault("logprobs_mode", RAW)
    if mode != RAW:
        raise GapInputError(
            f"the engine is asked for {mode}, after temperature and filters; the gap is defined for {RAW}",
            where="--engine-arg logprobs_mode",
            hint="leave logprobs_mode out",
        )
    with work_folder(out.parent) as work:
        written = work / out.name
        graph = capture_inference(
            model, capture, python=python, engine_args=arguments, layers=layers, timeout=timeout, progress=progress, values=values,
            rollouts={"prompts": [list(p) for p in prompts], "seeds": list(seeds), "samples": samples, "max_tokens": max_tokens,
                      "ignore_eos": ignore_eos, "out": str(written)},
        )  # fmt: skip
        found = read_rollouts(written)
        os.replace(written, out)
    return graph, found


def read_rollouts(path: Path) -> Rollouts:
    """Read rollouts and check that their log-probabilities can be used.

    Raises:
        CaptureFileError: damaged.
        GapInputError: processed log-probabilities, another temperature, or nothing generated.
    """
    found = read_json(path, Rollouts, kind="rollouts file")
    if found.logprobs_mode != RAW:
        raise GapInputError(
            f"the engine reported {found.logprobs_mode}: after temperature and filters, not the model's own",
            where=str(path),
            hint=f"run it with logprobs_mode={RAW}",
        )
    if found.temperature != 1.0:
        raise GapInputError(f"the tokens were sampled at temperature {found.temperature:g}, not 1", where=str(path), hint="generate at 1")
    if not found.tokens:
        raise GapInputError(
            f"all {len(found.sequences)} responses are empty",
            where=str(path),
            hint="raise max_tokens, or look for a prompt that ends a turn",
        )
    return found
