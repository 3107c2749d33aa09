"""GRPO with real vLLM rollouts on a CPU, a patched trainer, and the gap watched at every step.

    python notebooks/grpo_with_gap_monitor.py [--steps 3] [--patch patch.yaml] [--out FILE.json]

A tiny Qwen3 with random weights, made on the spot: nothing is downloaded. `graphalign find` makes the patch if none is given. That takes
about three minutes on two cores. On a GPU leave out `use_cpu` and `reload`, and the rest is the same.

Needs `pip install trl==1.16.0 datasets==5.2.0`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # TRL's colocate mode needs the engine in this process
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

import graphalign
from graphalign.engines.callback import GapCallback
from graphalign.engines.examples import resolve_model
from graphalign.gap.statistics import PairedDifference, compare, summarise
from graphalign.monitor import sequences

VOCABULARY = 1024


def build_model(folder: Path) -> Path:
    """`example:qwen3` with larger weights, so that its distributions are far from uniform, and a tokenizer of 1024 words."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model("example:qwen3"), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" not in name:
                p.mul_(3)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t1"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", unk_token="t1", eos_token="t2").save_pretrained(folder)
    return folder


def find_patch(model: Path, out: Path) -> Path:
    """What `graphalign find` leaves."""
    subprocess.run([sys.executable, "-m", "graphalign", "find", str(model), "--out", str(out)], check=True)
    return out / "patch.yaml"


class Monitored(GRPOTrainer):
    """A GRPOTrainer that shows every rollout to a monitor. All it takes is the first half of the method."""

    monitor: graphalign.GapMonitor
    stock: Any
    """The model without the patch, for the comparisons that this example prints; it has the weights of the step before."""
    compared: list[PairedDifference]
    stale: float
    """Mean |d| if the engine's weights were one step old."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        # Both are of the weights before the optimiser's step: vLLM's own, and the trainer's of the same tokens.
        rollout, train, mask = out["sampling_per_token_logps"], out["old_per_token_logps"], out["completion_mask"]
        found = self.monitor.step(rollout, train, mask, step=self.state.global_step)

        self.stale = summarise(*sequences(rollout, self._score_stock(out), mask)).mean_abs_d.value
        self.stock.load_state_dict(self.model.state_dict())
        (q, p), (_, s) = sequences(rollout, train, mask), sequences(rollout, self._score_stock(out), mask)
        self.compared.append(compare(q, s, p))
        print(
            f"step {self.state.global_step}: {found}\n"
            f"        k3, patched over stock trainer, minus 1: {self.compared[-1].k3_relative}\n"
            f"        mean |d| to the weights of the step before: {self.stale:.3g}",
            flush=True,
        )
        return out

    def _score_stock(self, out: dict[str, Any]) -> torch.Tensor:
        ids, mask = (torch.cat([out[f"prompt_{x}"], out[f"completion_{x}"]], 1) for x in ("ids", "mask"))
        with torch.no_grad():
            logps, _, _ = self._get_per_token_logps_and_entropies(self.stock, ids, mask, out["completion_ids"].shape[1])
        return logps


def reload(trainer: GRPOTrainer) -> None:
    """Send the trainer's weights to the engine.

    In place of TRL's own way, which writes into the engine's parameters: on a CPU those are gone, packed for oneDNN and AMX (vLLM 0.32, TRL
    1.16: AttributeError: 'Parameter' object has no attribute 'weight_loader'). vLLM's reload packs them anew.
    """
    engine = trainer.vllm_generation
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": engine._iter_named_params()})
    engine.llm.reset_prefix_cache()


def odd(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: the share of odd tokens."""
    return [sum(t % 2 for t in ids) / len(ids) for ids in completion_ids]


def train(folder: Path, patch: Path, steps: int) -> Monitored:
    """Train a patched model for some steps."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    stock = copy.deepcopy(model)
    graphalign.apply(model, patch)  # before the trainer wraps the model
    prompts = [" ".join(f"t{(7 * i + 13 * j) % 1000 + 3}" for j in range(12)) for i in range(16)]
    args = GRPOConfig(
        output_dir=str(folder / "run"), use_cpu=True, bf16=False, gradient_checkpointing=False, seed=0, report_to=[], save_strategy="no",
        use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.1, vllm_max_model_length=256, temperature=1.0,
        max_completion_length=64, num_generations=8, per_device_train_batch_size=16, max_steps=steps, learning_rate=1e-3, logging_steps=1,
    )  # fmt: skip
    trainer = Monitored(model=model, reward_funcs=odd, args=args, train_dataset=Dataset.from_dict({"prompt": prompts}))
    trainer.vllm_generation.sync_weights = lambda: reload(trainer)
    add_fused_lm_head(stock)  # as the trainer does with its own model
    trainer.monitor, trainer.stock, trainer.compared = graphalign.GapMonitor(), stock, []
    GapCallback(trainer.monitor).attach(trainer)
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--patch", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = build_model(Path(temporary) / "qwen3")
        trainer = train(folder, options.patch or find_patch(folder, Path(temporary) / "find"), options.steps)
    if options.out:
        result = {
            "steps": [[step, found.model_dump()] for step, found in trainer.monitor.history],
            "compared": [found.model_dump() for found in trainer.compared],
            "stale": trainer.stale,
            "logged": trainer.state.log_history,
        }
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
