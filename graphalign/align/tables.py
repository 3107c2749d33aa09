"""Tables computed at load time: the engine's recorded rows against what the trainer computes for the same positions."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graphalign.dataflow.trace_training import Tracer
from graphalign.evaluate.values import round_to
from graphalign.ir.dataflow import LOW_PRECISION
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
    names: tuple[str, ...] = ()
    """All the engine's tables that hold the matched values: layers often have a copy each."""


def snap(
    capture: InferenceGraph,
    tracer: Tracer,
    native: dict[int, torch.Tensor],
    positions: tuple[int, ...],
    computed: dict[str, torch.Tensor] | None = None,
    *,
    read: Mapping[str, tuple[tuple[int, ...], ...]] | None = None,
    unrounded: bool = False,
) -> tuple[dict[int, torch.Tensor], list[TableMatch]]:
    """Replace each training table by the engine's values where they agree up to the engine's storage format.

    A training column is matched to an engine column by its values at all positions, so a column that happens to agree at
    one position does not match. Columns are matched as magnitudes' vectors in the same order of positions.
    A table that has no positions (a scalar multiplier) is matched element by element to one of the same size that is recorded whole.

    Args:
        capture: the inference side, with recorded rows.
        tracer: the traced training side; its `table_of_value` lists the tables.
        native: what the trainer computed, by value id.
        positions: the positions evaluated, one per token.
        computed: tables that the engine's kernels compute, at these positions, by op name.
        read: which rows of its tables the engine reads at these positions (`table_rows.Reads.rows`); of tables that are not listed, the
            rows numbered as the positions.
        unrounded: for an evaluation that rounds. An element that the engine's format rounds to what the engine holds stays what the
            trainer computed: whether the trainer rounds it must show. One that rounds to a neighbour (FP32 noise at a tie) is the engine's.

    Returns:
        Op index to float64 values that both sides use, and one match per table.
    """
    snapped: dict[int, torch.Tensor] = {}
    matches: list[TableMatch] = []
    by_position: list[tuple[tuple[str, ...], str, torch.Tensor]]
    by_position = [
        ((t.name,), t.dtype, rows)
        for t in capture.tables
        for numbers in (read or {}).get(t.name, (positions,))
        if (rows := _rows(t, numbers)) is not None
    ]
    by_position += _distinct(computed or {}, len(positions))
    formats = {t.name: t.dtype for t in capture.tables} | dict.fromkeys(computed or {}, "float32")
    whole = [(t, data) for t in capture.tables if (data := _whole(t)) is not None]
    for value, op in tracer.table_of_value.items():
        data = native.get(value)
        if data is None or not (data.is_floating_point() or data.is_complex()) or data.numel() == 0 or not bool(torch.isfinite(data).all()):
            continue
        turned, data = data.is_complex(), as_real(data)  # cosines and sines of rotary embeddings as complex numbers
        best: tuple[float, torch.Tensor] | None = None
        names: list[str] = []
        axis = next((d for d, n in enumerate(data.shape) if n == len(positions)), None)
        candidates: list[tuple[tuple[str, ...], float, torch.Tensor]] = []
        if axis is not None:
            moved = data.double().movedim(axis, 0)
            columns = moved.reshape(len(positions), -1)
            for named, dtype, rows in by_position:
                worst, picked = _match(columns, rows, dtype)
                candidates.append((named, worst, picked.view(moved.shape).movedim(0, axis).contiguous()))
        for table, content in whole:
            if content.numel() == data.numel():
                candidates.append(((table.name,), _distance(data.double().reshape(-1), content, table.dtype), content.view(data.shape)))
        for _, worst, picked in candidates:
            if best is None or worst < best[0]:
                best = worst, picked
        if best is None:
            continue
        if best[0] <= 1.0:
            names = [n for named, worst, picked in candidates if worst <= 1.0 and torch.equal(picked, best[1]) for n in named]
            values = _trainers(data.double(), best[1], formats[names[0]]) if unrounded else best[1]
            snapped[op] = torch.view_as_complex(values.contiguous()) if turned else values
            matches.append(TableMatch(op, names[0], best[0], tuple(names)))
        else:
            matches.append(TableMatch(op, "", best[0]))
    return snapped, matches


def _trainers(own: torch.Tensor, engine: torch.Tensor, dtype: str) -> torch.Tensor:
    """The trainer's elements where the engine's format rounds them to the engine's, elsewhere the engine's."""
    if dtype not in LOW_PRECISION:
        return engine
    return torch.where(round_to(own, dtype) == engine, own, engine)


def as_real(data: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, as the engine has them; anything else as it is."""
    return torch.view_as_real(data) if data.is_complex() else data


def _distinct(computed: dict[str, torch.Tensor], tokens: int) -> list[tuple[tuple[str, ...], str, torch.Tensor]]:
    """Computed tables as rows by position, equal ones (layers') together: (names, format, [tokens, width])."""
    found: dict[bytes, tuple[list[str], torch.Tensor]] = {}
    for name, data in computed.items():
        axis = next((d for d, n in enumerate(data.shape) if n == tokens), None)
        if axis is None or not data.is_floating_point() or not bool(torch.isfinite(data).all()):
            continue
        rows = data.movedim(axis, 0).reshape(tokens, -1).contiguous()
        found.setdefault(rows.numpy().tobytes(), ([], rows))[0].append(name)
    return [(tuple(names), "float32", rows) for names, rows in found.values()]


def _whole(table: Table) -> torch.Tensor | None:
    """A table's content, flat, if all of it is recorded."""
    if len(table.rows) < (table.shape[0] if table.shape else 1):
        return None
    return torch.frombuffer(bytearray(base64.b64decode(table.values)), dtype=torch.float32).double()


def _distance(a: torch.Tensor, b: torch.Tensor, dtype: str) -> float:
    """The worst difference in units of last place of the engine's format."""
    unit = 2 * EPSILON.get(dtype, 2.0**-21)
    return float(((a - b).abs() / (torch.maximum(a.abs(), torch.tensor(2.0**-10, dtype=torch.float64)) * unit)).max())


def _rows(table: Table, numbers: tuple[int, ...]) -> torch.Tensor | None:
    where = {r: i for i, r in enumerate(table.rows)}
    if any(n not in where for n in numbers):
        return None
    raw = torch.frombuffer(bytearray(base64.b64decode(table.values)), dtype=torch.float32).double()
    return raw.view(len(table.rows), -1)[[where[n] for n in numbers]]


def _match(columns: torch.Tensor, rows: torch.Tensor, dtype: str) -> tuple[float, torch.Tensor]:
    """The engine's column nearest to each training column, and the worst difference in units of last place."""
    unit = 2 * EPSILON.get(dtype, 2.0**-21)
    scale = torch.maximum(columns.abs(), torch.tensor(2.0**-10, dtype=torch.float64)).unsqueeze(2) * unit
    distance = ((columns.unsqueeze(2) - rows.unsqueeze(1)).abs() / scale).amax(0)
    worst, index = distance.min(1)
    return float(worst.max()), rows[:, index]
