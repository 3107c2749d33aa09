"""Small made-up dumps of every format, all of the same responses, so that all must give the same gap."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gap.data import Policy, policy, rounded

Array = NDArray[np.float64]
PROMPT = 5


@dataclass
class Run:
    """Responses as an engine sampled them, and the trainer's log-probabilities."""

    prompts: list[list[int]]
    responses: list[list[int]]
    inference: list[Array]
    training: list[Array]
    policy: Policy

    def __len__(self) -> int:
        return len(self.responses)


def run(sequences: int = 6, tokens: int = 40, *, size: float = 0.02, temperature: float = 1.0, seed: int = 0) -> Run:
    """Responses of different lengths; log-probabilities are float32, as trainers write them."""
    made = policy(sequences, tokens, temperature=temperature, seed=seed)
    lengths = [tokens - i % 7 for i in range(sequences)]
    made = Policy([z[:n] for z, n in zip(made.logits, lengths, strict=True)], [i[:n] for i, n in zip(made.ids, lengths, strict=True)])
    inference = made.logprobs(temperature)
    prompts = [[100 + (i + j) % 50 for j in range(PROMPT + i % 3)] for i in range(sequences)]
    training = rounded(inference, size, seed=seed + 1)
    single = [[x.astype(np.float32).astype(np.float64) for x in side] for side in (inference, training)]
    return Run(prompts, [i.tolist() for i in made.ids], single[0], single[1], made)


def own(r: Run, *, training: bool = True, **extra: Any) -> list[dict[str, Any]]:
    """Rows of our own format."""
    rows = []
    for i in range(len(r)):
        row = {
            "prompt_token_ids": r.prompts[i],
            "response_token_ids": r.responses[i],
            "inference_logprobs": r.inference[i].tolist(),
            **extra,
        }
        rows.append(row | ({"training_logprobs": r.training[i].tolist()} if training else {}))
    return rows


def full(values: Sequence[float], prompt: Sequence[int], fill: float = 0.0) -> list[float]:
    """A response's list on the whole sequence."""
    return [fill] * len(prompt) + list(values)


def nemo(r: Run, step: int = 3, pad: int = 4) -> list[dict[str, Any]]:
    """As log_batched_dict_as_jsonl writes it: batches of one, padded to one length, prompts scored by the trainer only."""
    longest = max(len(p) + len(x) for p, x in zip(r.prompts, r.responses, strict=True)) + pad
    rows = []
    for i in range(len(r)):
        prompt, response = r.prompts[i], r.responses[i]
        rest = longest - len(prompt) - len(response)
        rows.append(
            {
                "content": ["some text"], "rewards": [1.0], "input_lengths": [len(prompt) + len(response)],
                "token_ids": [[*prompt, *response, *[0] * rest]],
                "token_loss_mask": [[*[0] * len(prompt), *[1] * len(response), *[0] * rest]],
                "sample_loss_mask": [1.0],
                "generation_logprobs": [full(r.inference[i], prompt) + [0.0] * rest],
                "prev_logprobs": [[0.0, *[-2.5] * (len(prompt) - 1), *r.training[i], *[-3.0] * rest]],
                "idx": i,
            }
        )  # fmt: skip
    return rows


def prime(r: Run, step: int = 7, entropy: Sequence[Array] | None = None) -> list[dict[str, Any]]:
    """As TokenExporter writes it."""
    return [
        {
            "schema_version": 1, "step": step, "export_step": step, "rank": 0, "micro_step": 0, "micro_sequence_idx": i,
            "token_ids": [*r.prompts[i], *r.responses[i]],
            "position_ids": list(range(len(r.prompts[i]) + len(r.responses[i]))),
            "loss_mask": [*[False] * len(r.prompts[i]), *[True] * len(r.responses[i])],
            "inference_logprobs": full(r.inference[i], r.prompts[i]),
            "trainer_logprobs": full(r.training[i], r.prompts[i], -4.0),
            "entropy": full(entropy[i] if entropy else -r.training[i], r.prompts[i], 1.0),
            "mismatch_kl": None,
        }
        for i in range(len(r))
    ]  # fmt: skip


def open_instruct(r: Run) -> list[dict[str, Any]]:
    return [
        {
            "step": 1, "sample_idx": i, "prompt_idx": i, "prompt_tokens": r.prompts[i], "response_tokens": r.responses[i], "reward": 1.0,
            "advantage": 0.0, "finish_reason": "stop", "dataset": "gsm8k", "ground_truth": None, "request_info": {"tool_calleds": False},
            "logprobs": r.inference[i].tolist(),
        }
        for i in range(len(r))
    ]  # fmt: skip


def torchtitan(r: Run) -> list[dict[str, Any]]:
    turns = [
        {"turn_id": 0, "max_policy_version": 2, "prompt_token_ids": p, "completion_token_ids": x, "completion_logprobs": q.tolist()}
        for p, x, q in zip(r.prompts, r.responses, r.inference, strict=True)
    ]
    return [{"group_id": 0, "rollout_id": 1, "reward": 1.0, "reward_breakdown": {}, "turns": turns}]


def slime_rollout(r: Run) -> dict[str, Any]:
    samples = [
        {
            "group_index": 0, "index": i, "prompt": "text", "tokens": [*r.prompts[i], *r.responses[i]], "response": "text",
            "response_length": len(r.responses[i]), "loss_mask": None, "rollout_log_probs": r.inference[i].tolist(), "remove_sample": False,
            "status": "completed",
        }
        for i in range(len(r))
    ]  # fmt: skip
    return {"rollout_id": 12, "samples": samples}


def slime_train(r: Run) -> dict[str, Any]:
    import torch

    samples = [
        {
            "data_parallel_rank": 0, "sample_index": i, "tokens": torch.tensor([*r.prompts[i], *r.responses[i]]),
            "response_lengths": len(r.responses[i]), "loss_masks": torch.ones(len(r.responses[i]), dtype=torch.int),
            "rollout_log_probs": torch.tensor(r.inference[i], dtype=torch.float32),
            "log_probs": torch.tensor(r.training[i], dtype=torch.float32),
        }
        for i in range(len(r))
    ]  # fmt: skip
    return {"format_version": 2, "rollout_id": 12, "rank": 0, "samples": samples, "dp_shards": []}


def slime_columns(r: Run) -> dict[str, Any]:
    samples = slime_train(r)["samples"]
    columns = {k: [s[k] for s in samples] for k in samples[0]}
    return {"rollout_id": 12, "rank": 0, "rollout_data": columns | {"global_batch_sizes": [6]}}


def miles_loss(r: Run) -> dict[str, Any]:
    import torch

    def tensor(x: Array) -> Any:
        return torch.tensor(x, dtype=torch.float32)

    samples = [
        {
            "index": i, "total_length": len(r.prompts[i]) + len(r.responses[i]), "response_length": len(r.responses[i]),
            "train_log_probs": tensor(r.training[i] - 0.5), "old_log_probs": tensor(r.training[i]),
            "local_loss_mask": torch.ones(len(r.responses[i])), "rollout_log_probs": tensor(r.inference[i]),
        }
        for i in range(len(r))
    ]  # fmt: skip
    return {"rank": 0, "call": 0, "samples": samples, "finite": {"ppo_kl": True}}


def completions(r: Run, *, ids: bool = True) -> list[dict[str, Any]]:
    """Answers of /v1/completions."""
    return [
        {
            "id": f"cmpl-{i}", "object": "text_completion", "model": "m",
            "choices": [
                {
                    "index": 0, "text": "text", "finish_reason": "stop", "prompt_token_ids": r.prompts[i],
                    "token_ids": r.responses[i] if ids else None,
                    "logprobs": {"token_logprobs": r.inference[i].tolist(), "tokens": ["x"] * len(r.responses[i]), "top_logprobs": []},
                }
            ],
        }
        for i in range(len(r))
    ]  # fmt: skip


def prefills(r: Run, values: Sequence[Array]) -> list[dict[str, Any]]:
    """Answers of /v1/completions to requests that only score their prompts."""
    out = []
    for i in range(len(r)):
        prompt = [*r.prompts[i], *r.responses[i]]
        scores: list[Any] = [None] + [{"9": {"logprob": -0.5}, str(t): {"logprob": -3.0, "rank": 4}} for t in r.prompts[i][1:]]
        scores += [{str(t): {"logprob": float(v), "rank": 1}} for t, v in zip(r.responses[i], values[i], strict=True)]
        choice = {"index": 0, "text": "t", "prompt_token_ids": prompt, "prompt_logprobs": scores, "token_ids": [1],
                  "logprobs": {"token_logprobs": [-0.1], "tokens": ["t"], "top_logprobs": [{"t": -0.1}]}}  # fmt: skip
        out.append({"id": f"cmpl-{i}", "choices": [choice]})
    return out


def chat(r: Run) -> list[dict[str, Any]]:
    """Answers of /v1/chat/completions with return_tokens_as_token_ids, as the batch runner writes them."""
    out = []
    for i in range(len(r)):
        content = [
            {"token": f"token_id:{t}", "logprob": float(v), "top_logprobs": []} for t, v in zip(r.responses[i], r.inference[i], strict=True)
        ]
        choice = {"index": 0, "message": {"role": "assistant", "content": "text"}, "logprobs": {"content": content}, "token_ids": None}
        body = {"id": "chatcmpl", "choices": [choice], "prompt_token_ids": r.prompts[i]}
        out.append({"custom_id": str(i), "response": {"status_code": 200, "body": body}})
    return out


def generate(r: Run) -> list[dict[str, Any]]:
    """Answers of /inference/v1/generate."""
    out = []
    for i in range(len(r)):
        content = [{"token_id": t, "logprob": float(v), "top_logprobs": []} for t, v in zip(r.responses[i], r.inference[i], strict=True)]
        out.append({"request_id": "r", "prompt_token_ids": r.prompts[i], "choices": [{"index": 0, "logprobs": {"content": content}}]})
    return out


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """JSON lines; gzip if the name says so."""
    data = "".join(json.dumps(x) + "\n" for x in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_torch(path: Path, content: Any) -> Path:
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def write_parquet(path: Path, r: Run) -> Path:
    """As save_dashboard_columns of miles writes it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "sample_index": i, "response_length": len(r.responses[i]), "total_length": len(r.prompts[i]) + len(r.responses[i]),
            "tokens": [*r.prompts[i], *r.responses[i]], "loss_mask": None, "rollout_log_probs": r.inference[i].tolist(),
        }
        for i in range(len(r))
    ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


Make = Callable[[Path, Run], Path]
BOTH: dict[str, tuple[str, Make]] = {
    "graphalign": ("", lambda p, r: write_lines(p / "own.jsonl", own(r))),
    "nemo-rl": ("3", lambda p, r: write_lines(p / "train_data_step3.jsonl", nemo(r))),
    "prime-rl": ("7", lambda p, r: write_lines(p / "token_exports" / "step_7" / "rank_0.jsonl.gz", prime(r))),
    "slime-train": ("12", lambda p, r: write_torch(p / "train_data" / "12.pt", slime_train(r))),
    "slime-train-1": ("12", lambda p, r: write_torch(p / "train_data" / "12_0.pt", slime_columns(r))),
    "miles-loss": ("", lambda p, r: write_torch(p / "policy_loss_debug" / "rank_0_call_0.pt", miles_loss(r))),
}
"""Formats with both columns: the step that must be found, and what writes one."""
ENGINE: dict[str, Make] = {
    "open-instruct": lambda p, r: write_lines(p / "run_rollouts_000000.jsonl", open_instruct(r)),
    "torchtitan": lambda p, r: write_lines(p / "rollout_samples.jsonl", torchtitan(r)),
    "slime-rollout": lambda p, r: write_torch(p / "rollout_data" / "12.pt", slime_rollout(r)),
    "miles-columns": lambda p, r: write_parquet(p / "dashboard_columns" / "rollout_12.parquet", r),
    "vllm-server": lambda p, r: write_lines(p / "completions.jsonl", completions(r)),
    "vllm-server chat": lambda p, r: write_lines(p / "chat.jsonl", chat(r)),
    "vllm-server generate": lambda p, r: write_lines(p / "generate.jsonl", generate(r)),
}
"""Formats with the engine's column only."""
