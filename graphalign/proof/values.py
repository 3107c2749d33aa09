"""Reading the engine's real anchor values: a safetensors file, parsed with bounds checked."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphalign.errors import CaptureFileError
from graphalign.ir.inference import TAIL, InferenceGraph

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class EngineValues:
    """What every anchor of the engine read and wrote while it scored one prompt."""

    tokens: tuple[int, ...]
    reads: dict[tuple[str, str], torch.Tensor]
    """(extern node, argument) to the tensor it read."""
    writes: dict[str, torch.Tensor]
    """Extern node to what it wrote."""
    output: torch.Tensor | None
    """The compiled graph's result, [tokens, hidden]."""
    rows: dict[str, dict[int, float]] = field(default_factory=dict)
    """GEMM node to {number of rows: share of elements that stay bitwise equal when it runs on its first rows only}."""


def read_values(path: str | Path, capture: InferenceGraph) -> EngineValues:
    """Read recorded values and assign them to the capture's extern nodes.

    Raises:
        CaptureFileError: the file is damaged, or its calls are not those of the capture.
    """
    tensors, meta = _read(Path(path))
    try:
        calls, tokens = json.loads(meta["calls"]), tuple(int(t) for t in json.loads(meta["tokens"]))
    except (KeyError, ValueError, TypeError):
        raise CaptureFileError(f"{path} holds no engine values", where=str(path)) from None
    nodes = [
        n
        for g in capture.graphs
        if g.name != TAIL  # run eagerly, out of the recorder's sight
        for k in g.kernels
        for n in k.nodes
        if n.kind == "extern" and n.op not in ("", "inductor.multi_output")
    ]
    if [c.get("op") for c in calls] != [n.op for n in nodes]:
        raise CaptureFileError(
            f"the engine made {len(calls)} extern calls, the capture has {len(nodes)}, or in another order", where=str(path),
            hint="capture and record in one run",
        )  # fmt: skip
    reads: dict[tuple[str, str], torch.Tensor] = {}
    writes: dict[str, torch.Tensor] = {}
    for i, node in enumerate(nodes):
        for name, _ in node.args:
            if (t := tensors.get(f"{i}.{name}")) is not None:
                if name in node.mutates:
                    writes[node.name] = t
                else:
                    reads[node.name, name] = t
        if (t := tensors.get(f"{i}.result.0")) is not None:
            writes.setdefault(node.name, t)
    try:
        rows = {n.name: {int(k): float(v) for k, v in c["rows"].items()} for n, c in zip(nodes, calls, strict=True) if c.get("rows")}
    except (ValueError, TypeError, AttributeError):
        raise CaptureFileError(f"{path} holds no engine values", where=str(path)) from None
    return EngineValues(tokens, reads, writes, tensors.get("output"), rows)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        if size > len(data) - 8:
            raise ValueError("truncated header")
        header: dict[str, Any] = json.loads(data[8 : 8 + size])
        meta = header.pop("__metadata__", {})
        out: dict[str, torch.Tensor] = {}
        body = memoryview(data)[8 + size :]
        for name, h in header.items():
            a, b = h["data_offsets"]
            if not 0 <= a <= b <= len(body):
                raise ValueError(f"{name} lies outside the file")
            out[name] = torch.frombuffer(bytearray(body[a:b]), dtype=_DTYPES[h["dtype"]]).reshape(h["shape"])
        return out, meta
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as e:
        raise CaptureFileError(f"cannot read engine values {path}: {e}", where=str(path), hint="record them again") from None
