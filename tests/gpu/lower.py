"""Lowers small functions for a simulated GPU, without vLLM: `python lower.py OUT FUNCTION:WIDTH …`, in a process of its own.

Writes OUT/capture.json and the generated code, OUT/pieceN.py, one piece per function, in order.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

ROWS = 4096
H100 = {
    "key": "h100", "name": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "processors": 132, "memory": 79.6, "l2_cache": 50,
    "shared_memory": 232448, "threads_per_processor": 2048, "clock": 1980,
}  # fmt: skip


def rms(s: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = s.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(s.dtype) * w


def total(x: torch.Tensor) -> torch.Tensor:
    """Sum of `x` [rows, terms, width] over its terms, one after the other."""
    first, *rest = x.unbind(1)
    for p in rest:
        first = first + p
    return first


def norm(w: torch.Tensor, x: torch.Tensor) -> Any:
    """Norm of a residual sum: the sum is recomputed, or kept in registers."""
    return rms(total(x), w)


def stored(w: torch.Tensor, x: torch.Tensor) -> Any:
    """The same, and the sum is a result too."""
    s = total(x)
    return rms(s, w), s


FUNCTIONS = {"norm": (norm, 2), "stored": (stored, 2), "realised": (stored, 6)}
"""Name to function and number of terms. `realised`: so many reads that Inductor makes the sum a buffer (`realize_reads_threshold`)."""


def main(out: Path, cases: list[str]) -> None:
    import torch._inductor.config as inductor
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from graphalign.engines.gpu import device, pieces

    device.install(H100)
    inductor.force_disable_caches = True
    inductor.compile_threads = 1
    recorder = pieces.PieceRecorder(None, str(out))  # type: ignore[arg-type]
    recorder.install()
    codegen = GraphLowering.codegen

    def stop(graph: Any) -> Any:
        codegen(graph)
        raise pieces.Lowered

    GraphLowering.codegen = stop  # type: ignore[method-assign,assignment]
    for case in cases:
        name, width = case.split(":")
        function, count = FUNCTIONS[name]
        torch._dynamo.reset()
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        with mode:
            w = torch.empty(int(width), dtype=torch.bfloat16, device="cuda:0")
            x = torch.empty(ROWS, count, int(width), dtype=torch.bfloat16, device="cuda:0")
        torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad(), contextlib.suppress(pieces.Lowered):
            torch.compile(function)(w, x)
    recorder.uninstall()
    for i, graph in enumerate(recorder.graphs):
        graph["name"] = f"piece{i + 1}"
        for entry in graph["inputs"]:
            if entry["role"] == "tensor":
                entry["source"] = f"value:{cases[i]}.{entry['source']}"
                graph["tokens"] = graph["tokens"] or next(iter(graph["symbols"]), "")
    header = {"versions": {}, "target": {}, "compile": {}, "model": {}, "simulated": True, "notes": recorder.notes}
    capture = {"header": header, "parameters": [], "tables": [], "attention": [], "bodies": recorder.bodies, "graphs": recorder.graphs}
    (out / "capture.json").write_text(json.dumps(capture))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
