"""Positions belong to the engine's range, and to rows that its tables record wherever it reads them for these positions."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from graphalign.align.positions import choose_positions
from graphalign.capture.engine_script import index_numbers, read_table, table_offsets
from graphalign.dataflow.opaque import load_opaque_ops
from graphalign.dataflow.trace_inference import Tracer
from graphalign.evaluate.table_rows import rows_read
from graphalign.evaluate.values import Arithmetic
from graphalign.ir.inference import Body, Buffer, Graph, InferenceGraph, Kernel, Node, Table
from graphalign.rules import rules_dir
from graphalign.sites.find import diff
from tests.breadth.captured import captures, counts, entries, report

BEHIND = 4096
"""Rows before those for long contexts, as in Phi-4-mini's table (vLLM 0.32)."""
ADDED = (("behind", "constant", [BEHIND, {"dtype": "int64"}], {}), ("further", "add", [{"n": "load_1"}, {"n": "behind"}], {}))


Ops = list[tuple[Any, ...]]


def behind(position: dict[str, str], name: str) -> Ops:
    """So many rows behind the position."""
    return [(f"n{name}", "constant", [BEHIND, {"dtype": "int64"}], {}), (name, "add", [position, {"n": f"n{name}"}], {})]


def behind_some(position: dict[str, str], name: str) -> Ops:
    """So many rows behind positions above 64: how older engines switched."""
    return [
        (f"k{name}", "constant", [64, {"dtype": "int64"}], {}),
        (f"above{name}", "gt", [position, {"n": f"k{name}"}], {}),
        (f"one{name}", "to_dtype", [{"n": f"above{name}"}, {"dtype": "float32"}], {}),
        (f"n{name}", "constant", [float(BEHIND), {"dtype": "float32"}], {}),
        (f"far{name}", "mul", [{"n": f"one{name}"}, {"n": f"n{name}"}], {}),
        (f"whole{name}", "to_dtype", [{"n": f"far{name}"}, {"dtype": "int64"}], {}),
        (name, "add", [position, {"n": f"whole{name}"}], {}),
    ]


def mysterious(position: dict[str, str], name: str) -> Ops:
    """Somewhere that cannot be evaluated."""
    return [(name, "an_op_that_nobody_knows", [position], {})]


def moved(body: Body, how: Callable[[dict[str, str], str], Ops]) -> Body:
    """A loop that reads its table at other rows than the position's."""
    ops: Ops = []
    for op in body.ops:
        if op[1].startswith("set_indirect") and op[2][0]["n"].startswith("load"):
            row = f"row_{op[1]}"
            ops += [*how(op[2][0], row), (op[0], op[1], [{"n": row}], {})]
        else:
            ops.append(op)
    return body.model_copy(update={"ops": tuple(ops)})


def shifted(table: Table, *, unrecorded: bool = False) -> Table:
    """A table whose rows come after `BEHIND` others, of which the first are recorded and hold something else."""
    content = torch.frombuffer(bytearray(base64.b64decode(table.values)), dtype=torch.float32).view(len(table.rows), -1)
    first = [n for n in table.rows if n < BEHIND]
    rows = [*first, *(n + BEHIND for n in table.rows)]
    values = torch.cat([content[: len(first)].flip(1) + 0.25, content])
    if unrecorded:
        rows, values = rows[: len(first)], values[: len(first)]
    raw = base64.b64encode(values.contiguous().numpy().tobytes()).decode()
    return table.model_copy(update={"rows": tuple(rows), "shape": (BEHIND + table.shape[0], *table.shape[1:]), "values": raw})


def long_rope(
    limit: int | None = None, *, how: Callable[[dict[str, str], str], Ops] = behind, unrecorded: bool = False, apart: bool = False
) -> InferenceGraph:
    """A recorded Phi 3 whose rotary table has other rows before those that it is read at.

    Args:
        limit: its `max_model_len`.
        how: makes a row's number of a position's.
        unrecorded: the capture does not hold the rows that are read.
        apart: the rows' numbers are computed in a loop of their own.
    """
    stock = captures("phi3")[0]
    (table,) = stock.tables
    update: dict[str, Any] = {"tables": (shifted(table, unrecorded=unrecorded),)}
    if limit is not None:
        update["header"] = stock.header.model_copy(update={"model": {**stock.header.model, "max_model_len": limit}})
    if apart:
        extent = next(i.size[0] for g in stock.graphs for i in g.inputs if "position" in i.source)
        update["graphs"], update["bodies"] = tuple(map(computed_before, stock.graphs)), {**stock.bodies, "rows": numbers(extent)}
    else:
        update["bodies"] = {k: moved(b, how) for k, b in stock.bodies.items()}
    return stock.model_copy(update=update)


def numbers(extent: str) -> Body:
    """A loop that computes rows' numbers from positions."""
    ops: tuple[Any, ...] = (
        ("get_index", "get_index", ["index0"], {}),
        ("load_1", "load", [{"b": "b0"}, {"n": "get_index"}], {}),
        *ADDED,
        ("store", "store", [{"b": "b1"}, {"n": "get_index"}, {"n": "further"}, None], {}),
        ("output", "output", [{"n": "store"}], {}),
    )
    return Body(var_ranges=(("p0", extent),), sizes=((extent,), ()), indexing={"index0": "p0"}, ops=ops)


def computed_before(graph: Graph) -> Graph:
    """A graph that computes the rows' numbers first and reads them from a buffer."""
    given = next((i for i in graph.inputs if "position" in i.source), None)
    if given is None:
        return graph
    buffer = Buffer.model_validate(
        {"name": "rows", "dtype": "int64", "size": given.size, "stride": ("1",), "layout": "FixedLayout", "offset": "0"}
    )
    first = Kernel.model_validate({"name": "rows", "kind": "loop", "nodes": ()})
    node = Node(name="rows", kind="loop", outputs=("rows",), body="rows", buffers=(given.name, "rows"))
    kernels = tuple(
        k.model_copy(
            update={
                "nodes": tuple(
                    n.model_copy(update={"buffers": tuple("rows" if b == given.name else b for b in n.buffers)}) for n in k.nodes
                )
            }
        )
        for k in graph.kernels
    )
    update = {"kernels": (first.model_copy(update={"nodes": (node,)}), *kernels), "buffers": (*graph.buffers, buffer)}
    return graph.model_copy(update=update)


@cache
def rules() -> Any:
    return load_opaque_ops(rules_dir(None))


def traced(capture: InferenceGraph) -> Tracer:
    tracer = Tracer(capture, rules())
    tracer.run()
    return tracer


def test_numbers_added_to_an_index_are_offsets() -> None:
    capture = long_rope()
    graphs = [g.model_dump(mode="json") for g in capture.graphs]
    bodies = {k: b.model_dump(mode="json") for k, b in capture.bodies.items()}
    (table,) = capture.tables
    assert table_offsets(graphs, bodies, table.name, table.shape[1]) == [BEHIND]
    assert table_offsets(graphs, bodies, "another", table.shape[1]) == []
    stock = {k: b.model_dump(mode="json") for k, b in captures("phi3")[0].bodies.items()}
    assert table_offsets(graphs, stock, table.name, table.shape[1]) == []
    apart = long_rope(apart=True)
    graphs, bodies = [g.model_dump(mode="json") for g in apart.graphs], {k: b.model_dump(mode="json") for k, b in apart.bodies.items()}
    assert table_offsets(graphs, bodies, table.name, table.shape[1]) == [BEHIND]


def test_numbers_of_masked_blocks_are_found() -> None:
    """A simulated GPU's loops read the table in a masked block (seen on vLLM 0.32)."""
    inner = [["load_1", "load", [{"b": "b2"}, {"n": "get_index"}], {}], *ADDED, ["set_indirect0", "set_indirect0", [{"n": "further"}], {}]]
    outer = [["constant", "constant", [96, {"dtype": "int64"}], {}], ["lt", "lt", [{"n": "index_expr"}, {"n": "constant"}], {}]]
    body = {"ops": [*outer, ["masked_subblock1", "masked_subblock1", [{"n": "lt"}, 0.0], {}]], "subblocks": {"masked_subblock1": inner}}
    assert index_numbers(body, "set_indirect") == {BEHIND}


def test_rows_are_recorded_an_offset_behind() -> None:
    t = torch.arange(BEHIND + 131072).float().view(-1, 1)
    table = read_table("t", t, 131072, [BEHIND + 131072, BEHIND])
    assert table is not None
    rows = set(table["rows"])
    assert {0, 1, BEHIND, BEHIND + 1, 131071, BEHIND + 131071} <= rows
    values = torch.frombuffer(bytearray(base64.b64decode(table["values"])), dtype=torch.float32)
    assert values.tolist() == sorted(rows)
    assert len([r for r in rows if r < 131072 and r + BEHIND in rows]) >= 64


@pytest.mark.parametrize("apart", [False, True])
def test_rows_that_are_read_are_found_by_running_the_loops(apart: bool) -> None:
    capture = long_rope(apart=apart)
    (table,) = capture.tables
    positions = (0, 1, 5, 15)
    read = rows_read(capture, traced(capture), Arithmetic(0, positions, (0,) * 4))
    assert read.rows == {table.name: (tuple(p + BEHIND for p in positions),)}
    assert read.unrecorded == set()
    assert rows_read(captures("phi3")[0], traced(captures("phi3")[0]), Arithmetic(0, positions, (0,) * 4)).rows == {
        table.name: (positions,)
    }


def test_rows_may_depend_on_the_position() -> None:
    capture = long_rope(how=behind_some)
    (table,) = capture.tables
    read = rows_read(capture, traced(capture), Arithmetic(0, (0, 1, 64, 2047), (0,) * 4))
    assert read.rows == {table.name: ((0, 1, 64, 2047 + BEHIND),)}
    graphs, bodies = [g.model_dump(mode="json") for g in capture.graphs], {k: b.model_dump(mode="json") for k, b in capture.bodies.items()}
    assert BEHIND in table_offsets(graphs, bodies, table.name, table.shape[1])


def test_rows_that_cannot_be_evaluated_are_not_compared() -> None:
    """It was a crash."""
    found = diff(long_rope(2048, how=mysterious), captures("phi3")[1])
    assert found.semantic == ()
    assert any("an operand could not be evaluated" in e.reason for e in found.leftovers)


def test_positions_end_where_the_engine_does() -> None:
    for limit in (64, 512, 2048):
        capture = long_rope(limit)
        (table,) = capture.tables
        for shift in (0, 1):
            positions = choose_positions(capture, traced(capture), 8, shift)
            assert len(set(positions)) == 8
            assert max(positions) == max(r for r in captures("phi3")[0].tables[0].rows if r < limit)
            assert {p + BEHIND for p in positions} <= set(table.rows)


def test_positions_whose_rows_are_not_recorded_are_left_out() -> None:
    """Rows of every position, but only some of those that are read."""
    capture = long_rope(2048)
    (table,) = capture.tables
    kept = [n for n, r in enumerate(table.rows) if r < BEHIND or r % 2 == 0]
    content = torch.frombuffer(bytearray(base64.b64decode(table.values)), dtype=torch.float32).view(len(table.rows), -1)[kept]
    raw = base64.b64encode(content.contiguous().numpy().tobytes()).decode()
    thin = table.model_copy(update={"rows": tuple(table.rows[n] for n in kept), "values": raw})
    capture = capture.model_copy(update={"tables": (thin,)})
    positions = choose_positions(capture, traced(capture), 8, 0)
    assert len(set(positions)) == 8
    assert all(p % 2 == 0 for p in positions)


def test_a_capture_that_records_no_range_keeps_the_models() -> None:
    stock = captures("phi3")[0]
    assert stock.reach is None
    assert max(choose_positions(stock, traced(stock), 8, 0)) == max(stock.tables[0].rows)


@pytest.mark.parametrize("apart", [False, True])
def test_a_table_read_at_an_offset_is_the_trainers(apart: bool) -> None:
    """It was a divergence: the trainer's table was looked for among the rows numbered as the positions."""
    found = diff(long_rope(2048, apart=apart), captures("phi3")[1])
    assert counts(found) == counts(report("phi3"))
    assert (entries(found), found.uncompared) == ({}, ())


def test_rows_that_are_not_recorded_are_not_compared() -> None:
    """Neither a divergence nor agreement."""
    found = diff(long_rope(2048, unrecorded=True), captures("phi3")[1])
    assert found.semantic == ()
    (said,) = found.uncompared
    assert "cos_sin_cache: it is read at rows that the capture does not hold (4096" in said
    assert "rope" not in counts(found)
    assert found.stats["training_paired"] < report("phi3").stats["training_paired"]
