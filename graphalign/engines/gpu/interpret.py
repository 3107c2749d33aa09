"""Runs generated GPU kernels on CPU tensors in Triton's interpreter: `python interpret.py job.json`, in a process of its own.

The generated wrapper of a piece is run as it is, with its kernels interpreted and its GEMMs replaced by given outputs. Only
files that this machine's own capture has just generated are run. Seen to work with Triton 3.9, torch 2.13.

Job: `data` (npz with the arrays), `out` (npz to write), `pieces`: each `name`, `source`, `inputs` (in the wrapper's order: an
integer, or dtype, size, stride and a key into `data` or null for content that no kernel reads), `externs` (results of the extern
calls, in order: dtype, a key into `data` or null for a call without one, and which argument it writes if that is not `out`; or the size
of the tensor it returns, or which arguments it writes, by name, with a key each).
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any

R_BLOCK = 1024
"""Elements of a reduction per iteration: a looped reduction of 4096 then really loops."""
X_BLOCKS = {"reduction": 4, "pointwise": 512}
KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str='cuda'\)", re.S | re.M)
LAUNCH = re.compile(r"^\s*(\w+)\.run\((.*), stream=\w+\)$", re.M)


class Unsupported(Exception):
    """A kernel or call that cannot be run here."""


def repair_interpreter() -> None:
    """Triton's interpreter truncates when it casts FP32 to BF16 (3.9); hardware rounds to nearest even."""
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    original = interpreter._convert_float

    def convert(data: Any, have: Any, want: Any, mode: Any) -> Any:
        if have == tl.float32 and want == tl.bfloat16:
            bits = np.ascontiguousarray(data).view(np.uint32)
            rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            rounded[(bits & 0x7FFFFFFF) > 0x7F800000] = 0x7FC0
            return rounded.reshape(data.shape)
        if have == tl.bfloat16 and want == tl.float32:
            return (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16).reshape(data.shape)
        return original(data, have, want, mode)

    interpreter._convert_float = convert


class Libdevice:
    """CUDA's math library: correctly rounded FP32 results, by way of FP64."""

    def __getattr__(self, name: str) -> Any:
        import torch
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        function = getattr(torch, name, None) or getattr(torch.special, name, None)
        if function is None:
            raise Unsupported(f"libdevice.{name}")

        def call(*args: Any) -> Any:
            first = next(a for a in args if isinstance(a, tl.tensor))
            given = [torch.from_numpy(a.handle.data.astype("float64")) if isinstance(a, tl.tensor) else a for a in args]
            data = function(*given).float().numpy()
            return tl.tensor(TensorHandle(data, tl.float32), first.type)

        return call


HEADER = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import math as tl_math
libdevice = None

"""


class Kernel:
    """One generated kernel, launched over the grid that its heuristics would use."""

    def __init__(self, name: str, text: str, folder: str, record: Any) -> None:
        body = text[text.index("@triton.jit") :]
        path = Path(folder) / f"{name}.py"
        path.write_text(HEADER + body)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.libdevice = Libdevice()  # type: ignore[attr-defined]
        self.function, self.name, self.record = getattr(module, name), name, record
        found = re.search(rf"def {name}\((.*?)\):", body, re.S)
        self.stored = set(re.findall(r"tl\.(?:store|atomic_add)\((\w+)", body))
        self.names = [p.split(":")[0].strip() for p in (found.group(1) if found else "").split(",")]
        self.reduction = "persistent_reduction(" in text or "@triton_heuristics.reduction(" in text
        grid = re.search(r"'grid_type': '(\w+)'", text)
        self.grid = grid.group(1) if grid else ""
        combo = re.search(r"'combo_grid_meta': (\{.*?\})", text)
        self.combo: dict[str, Any] = ast.literal_eval(combo.group(1)) if combo else {}

    def run(self, *args: Any, stream: Any = None) -> None:
        given = dict(zip(self.names, args, strict=False))
        sizes = {k: int(v) for k, v in given.items() if "numel" in k}
        blocks: dict[str, int] = {}
        for p in self.names[len(args) :]:
            if p.startswith("R0_BLOCK"):
                blocks[p] = min(R_BLOCK, power_above(sizes.get("r0_numel", R_BLOCK)))
            elif p.startswith(("XBLOCK", "YBLOCK")):
                blocks[p] = X_BLOCKS["reduction" if self.reduction else "pointwise"] if p[0] == "X" else 8
            else:
                raise Unsupported(f"{self.name} needs {p}")
        self.function[self._grid(sizes, blocks)](**given, **blocks)
        # a buffer that is reused in place keeps its parameter when its own store is dropped (torch 2.13)
        self.record({n: a for n, a in given.items() if n.startswith(("out_ptr", "in_out_ptr")) and n in self.stored}, self)

    def _grid(self, sizes: dict[str, int], blocks: dict[str, int]) -> tuple[int, ...]:
        def count(axis: str, n: str = "") -> int:
            size = sizes.get(f"{axis}numel{n}")
            size = self.combo.get(f"{axis}numel{n}") if size is None else size
            block = blocks.get(f"{axis.upper()}BLOCK{n}", blocks.get(f"{axis.upper()}BLOCK", 1))
            return -(-int(size or 1) // block)

        if self.grid == "Grid1D":
            return (count("x"),)
        if self.grid == "Grid2D":
            return (count("x"), count("y"))
        if self.grid == "SequentialComboKernelGrid":
            return (sum(count("x", f"_{i}") * count("y", f"_{i}") for i in range(int(self.combo["num_kernels"]))),)
        raise Unsupported(f"{self.name} has a grid of type {self.grid}")


def power_above(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def split_arguments(text: str) -> list[str]:
    """Top-level arguments of a call."""
    out, depth = [""], 0
    for c in text:
        if c == "," and depth == 0:
            out.append("")
            continue
        depth += (c in "([{") - (c in ")]}")
        out[-1] += c
    return [x.strip() for x in out]


class Externs:
    """`extern_kernels` and ops: every call gets its given result."""

    def __init__(self, results: list[Any], path: str = "extern_kernels") -> None:
        self.results, self.path = results, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Externs(self.results, f"{self.path}.{name}")

    def __call__(self, *args: Any, out: Any = None, **named: Any) -> Any:
        import torch

        if not self.results:
            raise Unsupported(f"a call of {self.path} more than the capture has")
        position, size, result = self.results.pop(0)
        if isinstance(result, dict):
            if result.keys() - named.keys():
                raise Unsupported(f"{self.path} is called with other arguments than the capture has")
            for name, content in result.items():
                named[name].copy_(content.view(named[name].shape))
            return None
        if result is None:  # it only has an effect on the engine
            return torch.empty(0)
        if size is not None:
            return result.view(size)
        out = args[position] if out is None and position is not None else out
        if out is None:
            raise Unsupported(f"a call of {self.path} without `out`")
        if result.numel() != out.numel():
            raise Unsupported(f"{self.path} writes {out.numel()} elements, {result.numel()} were given")
        return out.copy_(result.view(out.shape))


def run_piece(piece: dict[str, Any], data: Any, save: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one piece; what every launch wrote goes to `save`.

    Returns:
        One entry per launch: kernel, and the buffers it wrote with their keys in `save`.
    """
    import torch

    text = Path(piece["source"]).read_text()
    launches: list[dict[str, Any]] = []
    calls = [(m.group(1), split_arguments(m.group(2))) for m in LAUNCH.finditer(text)]

    def record(written: dict[str, Any], kernel: Kernel) -> None:
        i = len(launches)
        name, arguments = calls[i]
        if name != kernel.name:
            raise Unsupported(f"launch {i} is {kernel.name}, the source says {name}")
        entry: dict[str, Any] = {"kernel": name, "written": {}}
        for parameter, tensor in written.items():
            argument = arguments[kernel.names.index(parameter)]
            key = f"{piece['name']}/{i}/{parameter}"
            save[key] = to_numpy(tensor)
            entry["written"][argument] = key
        launches.append(entry)

    def tensor(entry: dict[str, Any]) -> Any:
        if isinstance(entry["value"], int):
            return entry["value"]
        dtype = getattr(torch, entry["dtype"])
        out = torch.empty_strided(entry["size"], entry["stride"], dtype=dtype)
        if entry["value"] is not None:
            values = from_numpy(data[entry["value"]], dtype)
            if entry.get("rows"):
                out[torch.tensor(entry["rows"])] = values.view(-1, *entry["size"][1:])
            else:
                out.copy_(values.view(entry["size"]))
        return out

    with tempfile.TemporaryDirectory(prefix="graphalign-kernels-") as folder:
        scope = wrapper_scope()
        results = [(e["position"], e.get("size"), result_of(e, data)) for e in piece["externs"]]
        scope["extern_kernels"] = Externs(results)
        scope["torch"].ops = types.SimpleNamespace(aten=torch.ops.aten, **{n: Externs(results, f"torch.ops.{n}") for n in ("vllm", "_C")})
        for m in KERNEL.finditer(text):
            scope[m.group(1)] = Kernel(m.group(1), m.group(2), folder, record)
        start = text.index("    def call(self, args):")
        end = text.index("\nrunner = Runner(")
        exec(compile("class Runner:\n" + text[start:end], piece["source"], "exec"), scope)
        scope["Runner"]().call([tensor(e) for e in piece["inputs"]])
    return launches


def result_of(entry: dict[str, Any], data: Any) -> Any:
    """What an extern call gives: a tensor, tensors by the arguments it writes, or None."""
    import torch

    def read(key: str) -> Any:
        return from_numpy(data[key], getattr(torch, entry["dtype"]))

    writes = entry.get("writes")
    return {name: read(key) for name, key in writes.items()} if writes else entry["value"] and read(entry["value"])


def wrapper_scope() -> dict[str, Any]:
    """What a generated wrapper finds in its module."""
    import torch

    def empty(size: Any, stride: Any, dtype: Any) -> Any:
        return torch.empty_strided(size, stride, dtype=dtype)

    def reinterpret(t: Any, size: Any, stride: Any, offset: int = 0) -> Any:
        return t.as_strided(size, stride, t.storage_offset() + offset)

    class Torch:
        """torch, with a device guard that does nothing."""

        cuda = types.SimpleNamespace(_DeviceGuard=lambda _: contextlib.nullcontext(), set_device=lambda _: None)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    return {
        "torch": Torch(), "empty_strided_cuda": empty, "reinterpret_tensor": reinterpret, "copy_if_misaligned": lambda t: t,
        "assert_size_stride": lambda *_: None, "assert_alignment": lambda *_: None, "get_raw_stream": lambda _: None,
        "aten": torch.ops.aten, "device": torch.device, "inf": float("inf"), "nan": float("nan"),
    }  # fmt: skip


def to_numpy(t: Any) -> Any:
    import torch

    t = t.contiguous().reshape(-1).clone()  # the wrapper will reuse the memory
    return t.view(torch.int16).numpy() if t.dtype in (torch.bfloat16, torch.float16) else t.numpy()


def from_numpy(a: Any, dtype: Any) -> Any:
    import torch

    t = torch.from_numpy(a)
    return t.view(dtype) if dtype in (torch.bfloat16, torch.float16) else t.to(dtype)


def main(path: str) -> int:
    import numpy as np

    with open(path) as f:
        job = json.load(f)
    repair_interpreter()
    data = np.load(job["data"], allow_pickle=False)
    save: dict[str, Any] = {}
    report = []
    for piece in job["pieces"]:
        try:
            report.append({"name": piece["name"], "launches": run_piece(piece, data, save)})
        except Unsupported as e:
            report.append({"name": piece["name"], "unsupported": str(e)})
        except Exception as e:  # a kernel may use what the interpreter lacks
            traceback.print_exc()
            report.append({"name": piece["name"], "unsupported": f"{type(e).__name__}: {e}"[:300]})
    save["report"] = np.frombuffer(json.dumps(report).encode(), dtype=np.uint8)
    np.savez(job["out"], **save)
    return 0


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    here = Path(__file__).resolve().parent
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != here]
    sys.exit(main(sys.argv[1]))
