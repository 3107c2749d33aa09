"""What stands in for a CUDA device inside torch and Triton: no memory, no kernels, only what the compiler asks about.

Seen to work on torch 2.13.0 (CPU build) with Triton 3.9.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from graphalign.capture.engine_script import Refused

GUARD = Path(__file__).with_name("guard.cpp")


def properties(target: dict[str, Any]) -> SimpleNamespace:
    """The fields of `cudaDeviceProp` that torch's compiler reads."""
    major, minor = target["capability"]
    return SimpleNamespace(
        type="cuda",
        index=0,
        name=target["name"],
        major=major,
        minor=minor,
        cc=major * 10 + minor,
        multi_processor_count=target["processors"],
        total_memory=int(target["memory"] * 2**30),
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=target["threads_per_processor"],
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=target["shared_memory"],
        L2_cache_size=target["l2_cache"] << 20,
        clock_rate=target["clock"] * 1000,
        gcnArchName="",
        is_integrated=0,
    )


def load_guard() -> None:
    """Give torch a CUDA device guard that does nothing, compiled once per torch version into the user's cache.

    Raises:
        Refused: there is no C++ compiler, or it fails.
    """
    import torch

    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphalign" / "gpu"
    digest = hashlib.sha256(GUARD.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    built = base / f"guard-{digest}.so"
    if not built.is_file():
        _compile(built, Path(torch.__file__).parent)
    torch.ops.load_library(str(built))


def _compile(out: Path, torch_dir: Path) -> None:
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    compiler = next((c for c in names if c and shutil.which(c)), None)
    if compiler is None:
        raise Refused("there is no C++ compiler", hint="install g++ (Debian, Ubuntu: apt-get install g++)")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        work = Path(folder) / out.name
        command = [compiler, "-shared", "-fPIC", "-O1", "-std=c++20", f"-I{torch_dir / 'include'}", str(GUARD), "-o", str(work)]
        done = subprocess.run([*command, f"-L{torch_dir / 'lib'}", "-lc10"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Refused(f"{compiler} cannot compile the device guard", done.stderr[-800:], "check that torch's headers are installed")
        work.replace(out)


def install(target: dict[str, Any]) -> list[str]:
    """Make torch's compiler and Triton believe in one GPU.

    Returns:
        What was replaced, in words.
    """
    import torch
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as has
    from torch._dynamo import device_interface
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    load_guard()
    props = properties(target)
    capability = (props.major, props.minor)

    class Interface(device_interface.CudaInterface):
        """Answers of a CUDA device."""

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def get_compute_capability(device: Any = None) -> int:
            return int(props.cc)

        @staticmethod
        def is_triton_capable(device: Any = None) -> bool:
            return True

        @staticmethod
        def raise_if_triton_unavailable(device: Any = None) -> None:
            return None

        @staticmethod
        def current_device() -> int:
            return 0

        @staticmethod
        def device_count() -> int:
            return 1

        @staticmethod
        def is_bf16_supported(including_emulation: bool = False) -> bool:
            return True

        @staticmethod
        def get_device_properties(device: Any = None) -> Any:
            return props

        class Worker(device_interface.CudaInterface.Worker):
            """The same, for compile workers."""

            @staticmethod
            def get_device_properties(device: Any = None) -> Any:
                return props

            @staticmethod
            def current_device() -> int:
                return 0

    class Driver:
        """Triton's driver: only its description of the device."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", props.cc, 32)

        def get_current_device(self) -> int:
            return 0

        def get_device_capability(self, *_: Any) -> tuple[int, int]:
            return capability

    for device in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(device, Interface)
    device_interface._device_initialized = True
    answers: dict[str, Any] = {
        "get_device_properties": lambda device=None: props,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: props.name,
        "current_device": lambda: 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    driver.set_active(Driver())
    backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    for check in (has.has_triton, has.has_triton_package):
        check.cache_clear()
    replaced: list[tuple[Any, str, Any]] = [
        (has, "has_triton", lambda *_, **__: True),
        (has, "triton_hash_with_backend", lambda: "simulated"),
        (scheduler, "has_triton", lambda *_, **__: True),
    ]
    for module, name, answer in replaced:
        setattr(module, name, answer)
    return [
        "c10's device guard for CUDA does nothing",
        "torch.cuda's and Inductor's device properties are those of the target's data sheet",
        "Triton's driver names the target and cannot launch",
    ]
