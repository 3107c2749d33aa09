"""What the table of sites warns of."""

from __future__ import annotations

import io

from rich.console import Console

from graphalign.ir.inference import UNLOWERED, Graph, Header, Kernel
from graphalign.render.sites_table import render_table
from graphalign.sites.find import diff
from graphalign.sites.report import Report
from tests.fixtures.recorded import captures, report


def text(found: Report) -> str:
    out = io.StringIO()
    render_table(found, Console(file=out, width=200))
    return out.getvalue()


def test_pieces_that_could_not_be_lowered_are_counted_by_their_kernels_and_said() -> None:
    inference, training = captures("qwen3")
    piece = Graph(name="p1", inputs=(), buffers=(), outputs=(), kernels=(Kernel(name="x", kind=UNLOWERED, generated="", nodes=()),))
    found = diff(inference.model_copy(update={"graphs": (*inference.graphs, piece)}), training)
    assert found.stats["unlowered"] == 1
    assert "warning: 1 compiled pieces could not be lowered" in text(found)
    assert "unlowered" not in report("qwen3").stats
    assert "could not be lowered" not in text(report("qwen3"))


def test_a_header_says_which_weights_have_their_rows_in_another_order() -> None:
    header = Header(versions={}, target={}, compile={}, model={}, notes=("rows of a.b.weight are permuted in a.c", "another note"))
    assert header.permuted == {"a.b.weight"}
