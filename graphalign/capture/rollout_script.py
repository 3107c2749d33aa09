"""Runs beside `engine_script` in the engine's process: captures the engine, then lets the same engine generate and score.

Like that file it needs only the standard library, torch and vLLM.
"""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any

import engine_script as engine  # type: ignore[import-not-found]  # the process runs in this file's folder

STEP = 0.2
"""Seconds between progress messages."""


def request_seed(seed: int, prompt: int, sample: int) -> int:
    """One seed per request: vLLM gives every request its own generator, so that batching does not change what is drawn."""
    return (seed * 1_000_003 + prompt * 1009 + sample) & 0x7FFFFFFF


def finish(llm: Any, stage: str, done: int, total: int) -> dict[str, Any]:
    """Step the engine until nothing is left; request id to its final output."""
    outputs: dict[str, Any] = {}
    said = 0.0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                outputs[output.request_id] = output
        if time.perf_counter() - said > STEP:
            said = time.perf_counter()
            engine.say(stage=stage, fraction=(done + len(outputs)) / max(total, 1))
    return outputs


def sampled(output: Any) -> tuple[list[int], list[float], str]:
    """Token ids, their log-probabilities as the engine reports them, and why it stopped."""
    completion = output.outputs[0]
    tokens = [int(t) for t in completion.token_ids]
    table = completion.logprobs
    if table is None or len(table) != len(tokens):
        raise engine.Refused("the engine returned no log-probabilities of the tokens that it sampled", hint="report the vLLM version")
    values = []
    for i, token in enumerate(tokens):
        if token not in table[i]:
            raise engine.Refused(f"the engine reports no log-probability for the token it sampled (token {i} is {token})")
        values.append(number(float(table[i][token].logprob), i, len(output.prompt_token_ids or ())))
    return tokens, values, str(completion.finish_reason)


def scored(output: Any, prompt: int, tokens: list[int]) -> list[float]:
    """Prompt log-probabilities of the last `len(tokens)` tokens of a prompt."""
    table = output.prompt_logprobs
    if table is None or len(table) != prompt + len(tokens):
        raise engine.Refused("the engine returned no prompt log-probabilities", hint="report the vLLM version")
    return [number(float(table[prompt + i][t].logprob), i, prompt) for i, t in enumerate(tokens)]


def number(x: float, token: int, prompt: int) -> float:
    """A log-probability, refused if it is NaN or infinite."""
    if math.isfinite(x):
        return x
    raise engine.Refused(
        f"the engine's log-probability of a token is {x}",
        where=f"token {token} of the response to a prompt of {prompt} tokens",
        hint=engine.beside("engine_numbers").OVERFLOW,
    )


def roll(llm: Any, request: dict[str, Any]) -> None:
    """Generate from every prompt with every seed, score what came out as prompts, and write it all."""
    from vllm import SamplingParams

    wanted = request["rollouts"]
    prompts, seeds, samples = wanted["prompts"], wanted["seeds"], wanted["samples"]
    config = engine.engine_config(llm)
    mode = str(getattr(config.model_config, "logprobs_mode", "raw_logprobs"))
    sequences: list[dict[str, Any]] = []
    seconds = {"generate": 0.0, "prefill": 0.0}
    total = len(prompts) * samples * len(seeds)
    for number, seed in enumerate(seeds):
        started = time.perf_counter()
        of: dict[str, tuple[int, int]] = {}
        for p, tokens in enumerate(prompts):
            for n in range(samples):
                parameters = SamplingParams(
                    temperature=1.0, top_p=1.0, top_k=0, max_tokens=wanted["max_tokens"], logprobs=0, detokenize=False,
                    seed=request_seed(seed, p, n), ignore_eos=wanted["ignore_eos"],
                )  # fmt: skip
                name = f"g{seed}.{p}.{n}"
                llm.llm_engine.add_request(name, {"prompt_token_ids": list(tokens)}, parameters)
                of[name] = p, n
        outputs = finish(llm, "generate", number * len(prompts) * samples, total)
        seconds["generate"] += time.perf_counter() - started
        by_number = {k.rsplit("-", 1)[0] if k not in of else k: v for k, v in outputs.items()}  # 0.32 may append a suffix to ids
        for name, (p, n) in of.items():
            tokens, values, why = sampled(by_number[name])
            sequences.append({"seed": seed, "prompt": p, "sample": n, "tokens": tokens, "sampled": values, "finish": why})
    started = time.perf_counter()
    for i, s in enumerate(sequences):  # one at a time: the trainer, too, sees one sequence at a time
        if not s["tokens"]:
            s["prefill"] = []
            continue
        ids = [*prompts[s["prompt"]], *s["tokens"]]
        parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        llm.llm_engine.add_request(f"p{i}", {"prompt_token_ids": ids}, parameters)
        (output,) = finish(llm, "score in prefill", i, len(sequences)).values()
        s["prefill"] = scored(output, len(prompts[s["prompt"]]), s["tokens"])
    seconds["prefill"] = time.perf_counter() - started
    engine.write(wanted["out"], {
        "format": "graphalign.rollouts", "version": 1,
        "versions": engine.read_versions(), "logprobs_mode": mode, "temperature": 1.0,
        "block_size": int(config.cache_config.block_size), "max_num_seqs": int(config.scheduler_config.max_num_seqs),
        "seconds": {k: round(v, 3) for k, v in seconds.items()},
        "prompts": prompts, "sequences": sequences,
    })  # fmt: skip


if __name__ == "__main__":
    code = engine.main(sys.argv[1], roll)
    sys.stdout.flush()
    sys.stderr.flush()
    # see engine_script: vLLM's threads can hang at exit
    os._exit(code)
