"""Plots of a gap report, as SVG images for a light and a dark page."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphalign.gap.report import GapReport
from graphalign.gap.statistics import k3
from graphalign.gap.variants import STOCK
from graphalign.render.gap_table import Unit, units
from graphalign.render.markup import Html, tag

COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7")
"""Four of Okabe and Ito's colours, which colour-blind people tell apart ("Color Universal Design", 2008)."""
DASHES = ("-", "--", "-.", ":")
THEMES = {"light": ("#1f2933", "#ffffff"), "dark": ("#e4e9ef", "#12171d")}
Lines = Sequence[tuple[str, list[NDArray[np.float64]]]]
"""Label and d per sequence."""


def picture(draw: Callable[[Any], None], alt: str, *, height: float = 3.2) -> Html:
    """A plot as an element: one image for light pages, one for dark ones.

    Args:
        draw: draws into matplotlib axes.
        alt: what it shows, in words.
        height: inches; it is 8 wide.
    """
    images = {theme: _image(draw, height, *colours) for theme, colours in THEMES.items()}
    # markup.tag shortens long attributes of captures; these are made here
    image = Html(f'<img src="{images["light"]}" alt="{tag("i", alt)[3:-4]}">')
    dark = Html(f'<source media="(prefers-color-scheme: dark)" srcset="{images["dark"]}">')
    return Html(f"<figure><picture>{dark}{image}</picture></figure>")


def _image(draw: Callable[[Any], None], height: float, ink: str, paper: str) -> str:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "legend.labelcolor")
    style: Any = dict.fromkeys(inked, ink) | dict.fromkeys(("axes.facecolor", "figure.facecolor"), paper)
    style |= dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)
    style |= {"svg.hashsalt": "graphalign", "font.size": 10}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8, height), layout="constrained")
        draw(figure.subplots())
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode()


def histogram(lines: Lines, title: str) -> Html:
    """Distribution of |d| per token, on logarithmic axes; exactly equal tokens are a bar of their own at the left."""
    low = 1e-6

    def draw(axes: Any) -> None:
        edges = np.logspace(np.log10(low), 1, 57)
        for (label, d), colour, dash in zip(lines, COLOURS, DASHES, strict=False):
            x = np.abs(np.concatenate(d))
            counts, _ = np.histogram(np.clip(x, low, 9.99), edges)
            axes.stairs(
                counts / x.size, edges, label=f"{label} (equal: {(x == 0).mean():.1%})", color=colour, linestyle=dash, linewidth=1.6
            )
        axes.set(xscale="log", xlabel="|d| per token, nats (left end: up to 1e-6, equal included)", ylabel="share of tokens", title=title)
        axes.legend(fontsize=9)

    return picture(draw, f"{title}: histogram of the absolute difference per token for {', '.join(label for label, _ in lines)}")


def by_position(lines: Lines, unit: Unit, bins: int = 12) -> Html:
    """Mean k3 over the position in the response, in a unit."""
    longest = max(len(x) for _, d in lines for x in d)
    width = max(1, -(-longest // bins))
    nats = 10.0**unit.exponent

    def draw(axes: Any) -> None:
        for (label, d), colour, dash in zip(lines, COLOURS, DASHES, strict=False):
            xs, ys = [], []
            for start in range(0, longest, width):
                part = [x[start : start + width] for x in d if len(x) > start]
                if part:
                    xs.append(start + width / 2)
                    ys.append(float(k3(np.concatenate(part)).mean()) / nats)
            axes.plot(xs, ys, label=label, color=colour, linestyle=dash, marker="o", markersize=3)
        axes.set(xlabel="token of the response", ylabel=f"mean k3, {unit} nats", title="Gap by position", ylim=(0, None))
        axes.legend(fontsize=9)

    return picture(draw, "mean k3 by position in the response")


def shares(report: GapReport) -> Html:
    """Shapley shares with their intervals."""
    a = report.attribution
    assert a is not None
    order = sorted(a.sampled, key=lambda s: s.reduction.value)
    prefill = {s.group: s for s in a.prefill}
    unit = 10.0 ** units(report)[0].exponent

    def draw(axes: Any) -> None:
        for offset, (label, of) in enumerate((("as sampled", {s.group: s for s in order}), ("in prefill", prefill))):
            found = [of[s.group].reduction for s in order]
            y = np.arange(len(order)) + (0.18 if offset == 0 else -0.18)
            values = [e.value / unit for e in found]
            spread = [[max(0.0, (e.value - (e.low if e.low is not None else e.value)) / unit) for e in found],
                      [max(0.0, ((e.high if e.high is not None else e.value) - e.value) / unit) for e in found]]  # fmt: skip
            axes.barh(
                y, values, 0.34, xerr=spread, label=label, color=COLOURS[1 - offset], hatch="" if offset == 0 else "//", ecolor="#808080"
            )
        axes.set_yticks(range(len(order)), [s.group for s in order])
        axes.axvline(0, linewidth=0.8, color="#808080")
        axes.set(xlabel=f"reduction of k3, {units(report)[0]} nats", title="Shapley share of each group")
        axes.legend(fontsize=9)

    return picture(draw, "Shapley share of each group in the reduction of k3", height=1.2 + 0.5 * len(order))


def drift(report: GapReport) -> Html:
    """Drift by layer."""

    def draw(axes: Any) -> None:
        for (name, found), colour, dash in zip(sorted(report.drift.items(), key=lambda x: x[0] != STOCK), COLOURS, DASHES, strict=False):
            axes.plot(list(found), [found[k] for k in found], label=name, color=colour, linestyle=dash, marker="o", markersize=3)
        axes.set(
            xlabel="layer", ylabel="‖trainer − engine‖ / ‖engine‖", title="Drift of anchor operands by layer, one prompt", ylim=(0, None)
        )
        axes.legend(fontsize=9)

    return picture(draw, "relative distance of the trainer's anchor operands from the engine's, by layer")
