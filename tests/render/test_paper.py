"""Every diagram of recorded models is readable when it is printed on a page of A4."""

from __future__ import annotations

import pytest

from graphalign.render.dot import SVG
from graphalign.render.labels import caption, subtitle
from graphalign.render.page_diagrams import draw
from graphalign.render.sheets import Sheet, sheets
from tests.render import needs
from tests.render.reports import report

MODELS = (
    *("qwen2", "qwen3", "llama", "smollm2", "h100"),
    *("gemma2_eager", "gemma2", "gemma3", "cohere", "granite", "olmo2", "mixtral", "gpt_oss", "qwen3_moe", "qwen3_next"),
    *("gpt_neox", "bloom", "falcon", "starcoder2", "smollm3"),
)
PAGE = tuple((side - 20) / 25.4 * 72 for side in (297, 210))
"""Points of an A4 page inside its margins of 10 mm, the long side first."""
SMALLEST = 7.0
"""Points of the smallest text on paper; the labels are 10.5/9 of that."""


def points(sheet: Sheet) -> float:
    """Size on paper of a sheet's smallest text, on a page that is turned the better way."""
    svg = draw(sheet, title=caption(sheet.panel), note=subtitle(sheet), legend=True)
    sides = [float(svg.get(k, "0").removesuffix("pt")) for k in ("width", "height")]
    scale = min(1.0, PAGE[0] / max(sides), PAGE[1] / min(sides))
    return scale * min(float(t.get("font-size", "0")) for t in svg.iter(f"{{{SVG}}}text") if (t.text or "").strip())


@needs.dot  # the wheel makes boxes for a wider font, which costs up to 5 % of the size here
@pytest.mark.parametrize("name", MODELS)
def test_text_is_readable_at_a4(name: str) -> None:
    drawing = report(name).drawing
    assert drawing is not None
    found = {f"{caption(p)}: {subtitle(s)}": points(s) for p in drawing.panels for s in sheets(p)}
    assert found
    assert not {what: f"{size:.1f} points" for what, size in found.items() if size < SMALLEST}
