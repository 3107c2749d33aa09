"""Run on two gloo ranks in verl's own environment: verl's own engine, patched by `external_lib`, against the patch by hand.

Argument: a folder for the model and for what the ranks say. `GRAPHALIGN_PATCH` names the patch.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

from graphalign.errors import PatchError
from tests.rewrite.sharded_ranks import POLICIES, by_hand_sharded, inputs_for, run, same, say
from tests.rewrite.tiny import by_hand


class OnCPU(PlatformCUDA):  # type: ignore[misc]
    """verl knows accelerators only; its way to add another device."""

    device_name, device_module = "cpu", torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 0

    def set_device(self, device_index: int) -> None:
        pass


def configs(folder: Path, **engine: Any) -> dict[str, Any]:
    """What verl's workers make of `actor_rollout_ref`: its defaults, but for FSDP2 and attention that runs on a CPU."""
    options = {"strategy": "fsdp2", "use_torch_compile": False, "use_remove_padding": False} | engine
    return {
        "model_config": HFModelConfig(
            path=str(folder), load_tokenizer=False, external_lib="graphalign.integrations.verl", use_remove_padding=False,
            override_config={"attn_implementation": "sdpa"}, enable_gradient_checkpointing=True,
        ),
        "engine_config": FSDPEngineConfig(**options),
        "optimizer_config": FSDPOptimizerConfig(lr=1e-3, total_training_steps=4),
        "checkpoint_config": CheckpointConfig(),
    }  # fmt: skip


def main() -> None:
    dist.init_process_group("gloo")
    set_platform(OnCPU())
    torch.set_num_threads(1)
    given = configs(Path(sys.argv[1]) / "model")
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead

    class Hand(FSDPEngineWithLMHead):  # type: ignore[misc]
        """verl's engine without the hook; patched and sharded by hand."""

        def _build_module(self) -> Any:
            return inspect.unwrap(FSDPEngine._build_module)(self)

        def _build_fsdp_module(self, module: Any) -> Any:
            self._autocast_dtype = torch.bfloat16
            full = {k: v.clone() for k, v in module.state_dict().items()}
            made = by_hand_sharded(by_hand(module), POLICIES["verl, SkyRL"])
            from verl.utils.fsdp_utils import fsdp2_load_full_state_dict

            fsdp2_load_full_state_dict(made, full, self.device_mesh, None)
            return made

    class Stock(FSDPEngineWithLMHead):  # type: ignore[misc]
        def _build_module(self) -> Any:
            return inspect.unwrap(FSDPEngine._build_module)(self)

    made = {}
    for name, cls in (("patched", FSDPEngineWithLMHead), ("hand", Hand), ("stock", Stock)):
        made[name] = cls(**given)
        made[name]._build_model_optimizer()
    model, hand, stock = (made[name].module for name in ("patched", "hand", "stock"))
    found = {"verl shards with FSDP2": all(isinstance(layer, FSDPModule) for layer in model.model.layers)}
    found["FP32 master weights"] = all(p.dtype is torch.float32 for p in model.parameters())
    x = inputs_for()
    for autocast in (False, True):  # verl's forward_step runs under autocast
        want = run(hand, x, cast=autocast)
        found[f"patched, autocast {autocast}"] = same(run(model, x, cast=autocast), want)
        found[f"stock differs, autocast {autocast}"] = not torch.equal(run(stock, x, cast=autocast)[0], want[0])  # type: ignore[arg-type]
    for name in ("patched", "hand"):
        made[name].optimizer.step()
    found["after verl's optimiser"] = same(run(model, x, cast=True), run(hand, x, cast=True))
    try:
        made["fsdp1"] = FSDPEngineWithLMHead(**configs(Path(sys.argv[1]) / "model", strategy="fsdp"))
        made["fsdp1"]._build_model_optimizer()
        made["fsdp1"].module(**x)
    except PatchError as e:
        found["strategy fsdp is refused by name"] = "use_orig_params" in str(e) and "fsdp2" in str(e)
    except Exception as e:
        say(f"strategy fsdp: {type(e).__name__}: {e}"[:400])
    for what, holds in found.items():
        say(f"{'holds' if holds else 'FAILS'}: {what}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
