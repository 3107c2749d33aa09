"""Whatever way a trainer lays its lists out, the tokens that count have the same log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from graphalign.dumps.adapters import Adapter, Column, Layout, Mask
from graphalign.dumps.files import Record
from graphalign.dumps.rows import Row, rows_of

VALUES = st.floats(-20, -0.0078125, width=32)


@st.composite
def responses(draw: st.DrawFn) -> tuple[list[int], list[int], list[float], list[int]]:
    """Prompt, response, its log-probabilities, which of its tokens count."""
    prompt = draw(st.lists(st.integers(0, 99), min_size=1, max_size=6))
    response = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
    n = len(response)
    mask = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n).filter(any))
    return prompt, response, draw(st.lists(VALUES, min_size=n, max_size=n)), mask


def laid_out(layout: Layout, prompt: list[int], values: list[Any], fill: Any, whole: bool) -> list[Any]:
    if layout is Layout.RESPONSE:
        return values
    if layout is Layout.TOKENS:
        return [fill] * len(prompt) + values
    return [fill] * (len(prompt) - 1) + values + ([fill] if whole else [])


@given(responses(), st.sampled_from(Layout), st.sampled_from(Layout), st.booleans(), st.integers(0, 3))
def test_every_layout_gives_the_same_row(
    made: tuple[list[int], list[int], list[float], list[int]], inference: Layout, mask: Layout, whole: bool, padding: int
) -> None:
    prompt, response, values, counts = made
    q = Column(field="q", layout=inference)
    length = "n" if inference is not Layout.RESPONSE and mask is not Layout.RESPONSE else ""
    adapter = Adapter(
        name="x", title="x", kind="jsonl", needs=("q",), tokens="ids", response_length="r", length=length, inference=q,
        masks=(Mask(field="m", layout=mask),),
    )  # fmt: skip
    pad = padding if length and inference is Layout.TOKENS and mask is Layout.TOKENS else 0
    record = {
        "ids": [*prompt, *response, *[0] * pad], "r": len(response), "n": len(prompt) + len(response),
        "q": laid_out(inference, prompt, values, 0.0, whole) + [0.0] * pad,
        "m": laid_out(mask, prompt, counts, 0, whole) + [0] * pad,
    }  # fmt: skip
    (row,) = rows_of(Record("x", record), adapter, "x.jsonl")
    assert isinstance(row, Row), row
    keep = np.array(counts) == 1
    assert row.inference[row.keep].tolist() == np.array(values, np.float64)[keep].tolist()
    assert row.tokens is not None
    assert row.tokens[row.first :][row.keep].tolist() == np.array(response)[keep].tolist()
