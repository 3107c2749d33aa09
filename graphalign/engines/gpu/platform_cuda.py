"""What makes vLLM's CPU build believe that it is its CUDA build. Must run before anything else imports vllm.

Seen to work on vLLM 0.32.0: `current_platform` is resolved lazily from `vllm.platforms._current_platform`.
"""

from __future__ import annotations

import sys
import types
from typing import Any

EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
"""CUDA extensions that the CPU wheel lacks."""

OPS = {
    "silu_and_mul": "(Tensor! out, Tensor x) -> ()",
    "mul_and_silu": "(Tensor! out, Tensor x) -> ()",
    "gelu_and_mul": "(Tensor! out, Tensor x) -> ()",
    "gelu_tanh_and_mul": "(Tensor! out, Tensor x) -> ()",
    "gelu_new": "(Tensor! out, Tensor x) -> ()",
    "gelu_fast": "(Tensor! out, Tensor x) -> ()",
    "gelu_quick": "(Tensor! out, Tensor x) -> ()",
    "rms_norm": "(Tensor! out, Tensor x, Tensor? weight, float eps) -> ()",
    "fused_add_rms_norm": "(Tensor! x, Tensor! res, Tensor? weight, float eps) -> ()",
    "vocab_parallel_embedding": "(Tensor! out, Tensor input_ids, Tensor weight, int org_vocab_start_index, int org_vocab_end_index, "
    "int num_org_vocab_padding, int added_vocab_start_index, int added_vocab_end_index) -> ()",
}
"""Ops of the CUDA extension that layers look up when they are built, whether or not they are used, or that stay in the graph."""


class Stub:
    """A CUDA op that isn't here: answers "no" when vLLM asks whether something is supported, and is noted when it is called."""

    called: set[str] = set()

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any, **__: Any) -> bool:
        Stub.called.add(self.__name__)
        return False

    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")


def install(target: dict[str, Any], tensor_parallel: int, note: Any) -> list[str]:
    """Set vLLM's platform.

    Args:
        target: see `targets.Target`.
        tensor_parallel: number of devices the engine thinks it has.
        note: called with what could not be reproduced.

    Returns:
        What was replaced, in words.
    """
    for name in EXTENSIONS:
        sys.modules.setdefault(name, types.ModuleType(name))
    import vllm.platforms as platforms
    from vllm.platforms.cuda import CudaPlatformBase, _get_backend_priorities
    from vllm.platforms.interface import DeviceCapability

    capability = DeviceCapability(*target["capability"])

    class Platform(CudaPlatformBase):
        """vLLM's CUDA platform with the answers that NVML would give."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return capability

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return str(target["name"])

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return int(target["memory"] * 2**30)

        @classmethod
        def is_fully_connected(cls, ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return max(tensor_parallel, 1)

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return int(target["processors"])

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

        @classmethod
        def set_device(cls, device: Any) -> None:
            return None

        @classmethod
        def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
            """vLLM's first choice for this device; whether the backend's kernels accept the layer can't be asked without them."""
            if selected_backend is None:
                order = _get_backend_priorities(
                    attn_selector_config.use_mla, capability, num_heads, attn_selector_config.kv_cache_dtype,
                    attn_selector_config.use_non_causal, attn_selector_config.head_size, attn_selector_config.use_mm_prefix,
                )  # fmt: skip
                skipped = []
                for candidate in order:
                    try:
                        candidate.get_class()
                    except ImportError as e:
                        skipped.append(f"{candidate.name} ({e})")
                        continue
                    selected_backend = candidate
                    break
                if skipped:
                    chosen = selected_backend.name if selected_backend is not None else "none"
                    note(f"attention backend {chosen} stands for vLLM's first choice, not importable here: {'; '.join(skipped)}")
            if selected_backend is None:
                raise ValueError("none of vLLM's attention backends for this device can be imported")
            path = selected_backend.get_path()
            return str(path)

    platforms._current_platform = Platform()
    # vLLM switches Triton off in builds called `cpu` (vllm.triton_utils.importing).
    original = platforms.vllm_version_matches_substr
    platforms.vllm_version_matches_substr = lambda substr: substr != "cpu" and original(substr)
    stub_ops()
    import vllm.model_executor.models.registry as registry

    registry._run_in_subprocess = lambda fn: fn()  # done there for fear of initialising CUDA; takes 10 s
    return [
        "vLLM's platform is a CudaPlatformBase that answers for the target's driver (NVML)",
        f"{len(EXTENSIONS)} CUDA extension modules are empty; ops of torch.ops._C that the CPU build lacks answer no",
        "vLLM's version does not count as a CPU build, so that Triton stays on",
        "the attention backend is vLLM's first choice for the device that can be imported, without asking its kernels",
    ]


_LIBRARIES: list[Any] = []


def stub_ops() -> None:
    """Define the ops that layers look up, and answer for all others of the extension."""
    import torch
    import vllm._custom_ops  # noqa: F401  (asks itself which ops exist, and must hear the truth)

    fragment = torch.library.Library("_C", "FRAGMENT")
    _LIBRARIES.append(fragment)
    for name, schema in OPS.items():
        if not hasattr(torch.ops._C, name):
            fragment.define(name + schema)
    for space in ("_C", "_moe_C"):
        cls = type(getattr(torch.ops, space))
        original = cls.__getattr__

        def lookup(self: Any, name: str, original: Any = original, space: str = space) -> Any:
            try:
                return original(self, name)
            except AttributeError:
                if self.name == space and not name.startswith("__"):
                    return Stub(f"{space}::{name}")
                raise

        cls.__getattr__ = lookup
