"""Tables computed at load time: the engine's recorded rows against what the trainer computes for the same positions."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import torch

from graphalign.evaluate.trace_training import Tracer
from graphalign.ir.inference import InferenceGraph, Table

EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half a unit in the last place at 1, relative, by format; FP32 tables are compared at 2⁻²⁰."""


@dataclass(frozen=True)
class TableMatch:
    """One training table and the engine's table it was found in."""

    op: int
    name: str
    """The engine's table, empty if none matched."""
    worst: float
    """Largest difference, in units of the format's rounding, over the positions compared."""


def snap(
    capture: InferenceGraph, tracer: Tracer, native: dict[int, torch.Tensor], positions: tuple[int, ...]
) -> tuple[dict[int, torch.Tensor], list[TableMatch]]:
    """Replace each training table by the engine's values where they agree up to the engine's storage format.

    A training column is matched to an engine column by its values at all positions, so a column that happens to agree at
    one position does not match. Columns are matched as magnitudes' vectors in the same order of positions.

    Args:
        capture: the inference side, with recorded rows.
        tracer: the traced training side; its `table_of_value` lists the tables.
        native: what the trainer computed, by value id.
        positions: the positions evaluated, one per token.

    Returns:
        Op index to float64 values that both sides use, and one match per table.
    """
    snapped: dict[int, torch.Tensor] = {}
    matches: list[TableMatch] = []
    engine = [(t, rows) for t in capture.tables if (rows := _rows(t, positions)) is not None]
    for value, op in tracer.table_of_value.items():
        data = native.get(value)
        if data is None or not data.is_floating_point() or data.numel() == 0:
            continue
        axis = next((d for d, n in enumerate(data.shape) if n == len(positions)), None)
        if axis is None:
            continue
        columns = data.double().movedim(axis, 0).reshape(len(positions), -1)
        best: tuple[float, Table, torch.Tensor] | None = None
        for table, rows in engine:
            worst, picked = _match(columns, rows, table.dtype)
            if best is None or worst < best[0]:
                best = worst, table, picked
        if best is None:
            continue
        if best[0] <= 1.0:
            shape = data.movedim(axis, 0).shape
            snapped[op] = best[2].view(shape).movedim(0, axis).contiguous()
            matches.append(TableMatch(op, best[1].name, best[0]))
        else:
            matches.append(TableMatch(op, "", best[0]))
    return snapped, matches


def _rows(table: Table, positions: tuple[int, ...]) -> torch.Tensor | None:
    where = {r: i for i, r in enumerate(table.rows)}
    if any(p not in where for p in positions):
        return None
    raw = torch.frombuffer(bytearray(base64.b64decode(table.values)), dtype=torch.float32).double()
    return raw.view(len(table.rows), -1)[[where[p] for p in positions]]


def _match(columns: torch.Tensor, rows: torch.Tensor, dtype: str) -> tuple[float, torch.Tensor]:
    """The engine's column nearest to each training column, and the worst difference in units of last place."""
    unit = 2 * EPSILON.get(dtype, 2.0**-21)
    scale = torch.maximum(columns.abs(), torch.tensor(2.0**-10, dtype=torch.float64)).unsqueeze(2) * unit
    distance = ((columns.unsqueeze(2) - rows.unsqueeze(1)).abs() / scale).amax(0)
    worst, index = distance.min(1)
    return float(worst.max()), rows[:, index]
