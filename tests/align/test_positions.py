"""Positions belong to the engine's range, and to rows that its tables record at every offset that it reads them at."""

from __future__ import annotations

import base64

import torch

from graphalign.align.pair import choose_positions
from graphalign.capture.engine_script import read_table, table_offsets
from graphalign.evaluate.offsets import table_offsets as offsets_of
from graphalign.ir.inference import Body, InferenceGraph, Table
from tests.breadth.captured import captures

READ = (
    ("load", "load", [{"b": "b1"}, {"n": "get_index"}], {}),
    ("constant", "constant", [4096, {"dtype": "int64"}], {}),
    ("add", "add", [{"n": "load"}, {"n": "constant"}], {}),
    ("set_indirect0", "set_indirect0", [{"n": "add"}], {}),
    ("beside", "constant", [7, {"dtype": "int64"}], {}),
    ("less", "lt", [{"n": "load"}, {"n": "beside"}], {}),
)
"""How a loop reads the second half of LongRoPE's table (vLLM 0.32)."""


def long_rope(limit: int) -> InferenceGraph:
    """A recorded Phi 3 whose table has rows for short contexts before those for long ones, read at an offset of 4096."""
    stock = captures("phi3")[0]
    (old,) = stock.tables
    table = read_table(old.name, torch.zeros(4096 + 131072, 4).bfloat16(), limit, [4096])
    assert table is not None
    bodies = {k: b.model_copy(update={"ops": (*b.ops, *READ)}) for k, b in stock.bodies.items()}
    header = stock.header.model_copy(update={"model": {**stock.header.model, "max_model_len": limit}})
    return stock.model_copy(update={"header": header, "tables": (Table.model_validate(table),), "bodies": bodies})


def test_offsets_are_what_is_added_to_an_index() -> None:
    body = {"ops": [list(op) for op in READ]}
    assert table_offsets({"a": body, "b": {"ops": body["ops"][:3]}}) == [4096]


def test_rows_are_recorded_an_offset_behind() -> None:
    t = torch.arange(4096 + 131072).float().view(-1, 1)
    table = read_table("t", t, 131072, [4096])
    assert table is not None
    rows = set(table["rows"])
    assert {0, 1, 4096, 4097, 131071, 135167} <= rows
    values = torch.frombuffer(bytearray(base64.b64decode(table["values"])), dtype=torch.float32)
    assert values.tolist() == sorted(rows)
    assert len([r for r in rows if r < 131072 and r + 4096 in rows]) >= 64


def test_positions_have_rows_at_every_offset_and_end_where_the_engine_does() -> None:
    for limit in (512, 131072):
        capture = long_rope(limit)
        (table,) = capture.tables
        assert offsets_of(capture) == {table.name: (4096,)}
        for shift in (0, 1):
            positions = choose_positions(capture, 8, shift)
            assert len(set(positions)) == 8
            assert max(positions) == limit - 1
            assert {p + 4096 for p in positions} <= set(table.rows)


def test_a_capture_that_records_no_range_keeps_the_models() -> None:
    stock = captures("phi3")[0]
    assert offsets_of(stock) == {}
    assert max(choose_positions(stock, 8, 0)) == max(stock.tables[0].rows)


def test_bodies_without_computed_indices_have_no_offsets() -> None:
    body = Body(var_ranges=(), sizes=((), ()), indexing={}, ops=READ[:3])
    capture = long_rope(512)
    assert offsets_of(capture.model_copy(update={"bodies": dict.fromkeys(capture.bodies, body)})) == {}
