"""`gap.html`: a gap report as one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from graphalign.gap.report import GapReport, Measured, VariantResult
from graphalign.gap.variants import EVERYTHING, PAPERS_TITLE, STOCK
from graphalign.render import gap_plots as plots
from graphalign.render.frame import contents, document, navigation
from graphalign.render.gap_table import Unit, describe, main_rows, percent, units, widens
from graphalign.render.markup import Html, table, tag, text

SAMPLED = "Against the engine's log-probabilities when it sampled the tokens: what an RL run sees."
PREFILL = (
    "Against the same engine's, when it scores the same tokens in one prefill: decode and batch effects, which no patch of a trainer "
    "removes, are left out."
)
Arrays = Sequence[NDArray[np.float64]]


def render_gap_page(report: GapReport, engine: Mapping[str, Arrays], training: Mapping[str, Arrays]) -> str:
    """The page.

    Args:
        report: the result.
        engine: "sampled" and "prefill" log-probabilities, one array per sequence.
        training: variant to the trainer's log-probabilities, for the plots.
    """
    title = f"The gap between inference and training: {report.model.get('name') or report.model.get('architecture') or 'model'}"
    sections: list[tuple[str, str, Html]] = [
        ("summary", "Summary", _summary(report)),
        ("sampled", "As sampled", text([tag("p", SAMPLED), _table(report, "sampled")])),
        ("prefill", "In prefill", text([tag("p", PREFILL), _table(report, "prefill")])),
        ("plots", "Plots", _plots(report, engine, training)),
        ("groups", "Which group closes it", _groups(report)),
        ("residue", "What is left", _residue(report)),
        ("setting", "Setting", _setting(report)),
    ]  # fmt: skip
    lead = f"{report.tokens} generated tokens in {report.sequences} responses; seeds {', '.join(map(str, report.seeds))}; {report.prompts}"
    body = [
        tag("a", "Skip to the table", href="#sampled", class_="skip"),
        tag("header", [tag("h1", title), tag("p", lead, class_="soft")]),
        navigation(sections),
        contents(sections),
        tag("footer", "Made by graphalign gap. This file works offline."),
    ]
    return document(title, body, css="figure img{display:block;width:100%;height:auto}", images=True)


def _summary(r: GapReport) -> Html:
    stock = r.variant(STOCK).sampled.pooled
    k, _ = units(r)
    cards = [(k.estimate(stock.k3), f"k3 of the stock trainer, {k} nats, with its 95 % interval")]
    names = {v.name: v for v in r.variants}
    if EVERYTHING in names:
        sides = names[EVERYTHING].sampled.against_stock, names[EVERYTHING].prefill.against_stock
        words = "k3 with everything the graph shows", "the same, against the engine in prefill"
        cards += [(percent(side.k3_relative), word) for side, word in zip(sides, words, strict=True) if side is not None]
    cards.append((k.estimate(r.engine_gap.k3), f"k3 of the engine against itself (sampled, prefill), {k} nats: no patch removes it"))
    if r.floor is not None:
        cards.append(
            (
                k.estimate(r.floor.k3),
                f"k3 of the patched trainer against itself with one weight 1 ULP off, {k} nats: what any difference grows to",
            )
        )
    notes: list[Html] = [tag("p", n, class_="banner") for n in r.notes]
    formula = (
        "d = inference − training log-probability of a generated token, in nats. k3 = mean(exp(−d) − 1 + d) estimates the KL divergence "
        "from inference to training; mean d estimates the same with far more noise. Intervals are bootstrap 95 % intervals over responses; "
        "comparisons with stock use the same responses on both sides."
    )
    return text(
        [
            tag("div", [tag("div", [tag("b", n), tag("span", t)], class_="card") for n, t in cards], class_="cards"),
            tag("p", formula),
            *notes,
        ]
    )


def _table(r: GapReport, side: str) -> Html:
    k, d = units(r)
    columns = ("edges", f"k3 [{k}]", "against stock", f"mean d [{d}]", f"mean |d| [{d}]", "max |d|, nats", "equal")
    head = [("trainer", ""), *((n, "n") for n in columns)]
    rows = [_row(v, getattr(v, side), k, d) for v in main_rows(r) if side == "prefill" or "engine's" not in v.name]
    rest = [v for v in r.variants if v not in main_rows(r)]
    parts = [table(head, rows, class_="cardtable")]
    if rest:
        more = table(
            head,
            [_row(v, getattr(v, side), k, d) for v in sorted(rest, key=lambda v: -getattr(v, side).pooled.k3.value)],
            class_="cardtable",
        )
        parts.append(tag("details", [tag("summary", f"The other {len(rest)} subsets of groups"), more]))
    if len(r.seeds) > 1:
        seeds = [("trainer", "")] + [(f"seed {s}", "n") for s in r.seeds]
        lines = [
            tag(
                "tr",
                [
                    tag("td", v.title),
                    *(tag("td", percent(m.against_stock_by_seed[s].k3_relative), class_="n", data_label=f"seed {s}") for s in r.seeds),
                ],
            )
            for v in main_rows(r)
            if (m := getattr(v, side)).against_stock_by_seed and (side == "prefill" or "engine's" not in v.name)
        ]
        parts.append(tag("details", [tag("summary", "k3 against stock, seed by seed"), table(seeds, lines, class_="cardtable")]))
    return text(parts)


def _row(v: VariantResult, m: Measured, k: Unit, d: Unit) -> Html:
    p = m.pooled
    cells = [str(v.edges or ""), k.estimate(p.k3), percent(m.against_stock.k3_relative) if m.against_stock else "", d.estimate(p.mean_d),
             d.estimate(p.mean_abs_d), f"{p.max_abs_d:.3f}", f"{p.equal_share.value:.2%}"]  # fmt: skip
    labels = ("edges", f"k3 [{k}]", "against stock", f"mean d [{d}]", f"mean |d| [{d}]", "max |d|, nats", "equal")
    return tag("tr", [tag("td", v.title), *(tag("td", c, class_="n", data_label=n) for c, n in zip(cells, labels, strict=True))])


def _plots(r: GapReport, engine: Mapping[str, Arrays], training: Mapping[str, Arrays]) -> Html:
    names = [v.name for v in r.variants if v.name in (STOCK, EVERYTHING) or v.title == PAPERS_TITLE]
    titles = {v.name: v.title for v in r.variants}
    lines = [(titles[n], [e - t for e, t in zip(engine["sampled"], training[n], strict=True)]) for n in names]
    itself = ("the engine against itself", [a - b for a, b in zip(engine["sampled"], engine["prefill"], strict=True)])
    parts = [plots.histogram(lines, "Difference per token, as sampled"), plots.by_position([*lines, itself], units(r)[0])]
    prefill = [(titles[n], [e - t for e, t in zip(engine["prefill"], training[n], strict=True)]) for n in names]
    parts.append(plots.histogram(prefill, "Difference per token, in prefill"))
    if r.drift:
        parts.append(plots.drift(r))
    return text(parts)


def _groups(r: GapReport) -> Html:
    a = r.attribution
    if a is None:
        return tag("p", "Not measured (--no-attribution).")
    k, _ = units(r)
    prefill = {s.group: s for s in a.prefill}
    rows = [
        tag("tr", [tag("td", tag("strong", s.group)), *(tag("td", c, class_="n", data_label=n) for n, c in (
            ("as sampled", k.estimate(s.reduction)), ("part", f"{s.part:.0%}"), ("alone", k.estimate(s.alone) if s.alone else "–"),
            ("in prefill", k.estimate(prefill[s.group].reduction)), ("part in prefill", f"{prefill[s.group].part:.0%}"),
        )), tag("td", widens(s, prefill[s.group]), data_label="flag")])
        for s in sorted(a.sampled, key=lambda s: -s.reduction.value)
    ]  # fmt: skip
    how = f"All {a.subsets} subsets of groups were measured." if a.exact else f"Orders were sampled: {a.subsets} subsets were measured."
    head = [("group", ""), (f"share [{k}]", "n"), ("part", "n"), (f"alone [{k}]", "n"), (f"in prefill [{k}]", "n"), ("part", "n"), ("", "")]
    words = "A group's Shapley share is what it takes off k3, averaged over every order in which the groups could be patched. " + how
    return text([tag("p", words), plots.shares(r), table(head, rows, class_="cardtable")])


def _residue(r: GapReport) -> Html:
    parts: list[Html] = []
    if r.residue is not None:
        x = r.residue
        rows = [("GEMM: the trainer's against the engine's, equal shapes", x.gemm)]
        rows += [(f"GEMM: the engine's on its first {n} rows against all rows", a) for n, a in x.gemm_rows.items()]
        rows += [("attention: the trainer's against the engine's", x.attention), ("patched regions: order of summation", x.regions)]
        lines = [
            tag("tr", [tag("td", name), *(tag("td", c, class_="n") for c in (f"{a.equal:.5f}", f"{a.lowest:.5f}", str(a.results)))])
            for name, a in rows
            if a is not None
        ]
        parts += [tag("p", f"Share of bitwise equal elements, on the engine's own operands for one prompt of {x.tokens} tokens."),
                  table([("class", ""), ("equal", "n"), ("lowest", "n"), ("results", "n")], lines)]  # fmt: skip
    else:
        parts.append(tag("p", f"Kernels were not compared: {r.residue_skipped}"))
    if r.shared_skipped:
        parts.append(tag("p", f"The engine's kernels were not tried in the trainer: {r.shared_skipped}"))
    if r.emulated is not None:
        e = r.emulated
        words = (
            f"The other way round, an engine that rounds where the source does (emulate_precision_casts) with the stock trainer: "
            f"{e.sites} sites left; as sampled {describe(e.gap, r)}; in prefill {describe(e.prefill, r)}; "
            f"{e.tokens_per_second:.1f} tokens/s against {r.engine_tokens_per_second:.1f}."
        )
        parts.append(tag("p", words))
    return text(parts)


def _setting(r: GapReport) -> Html:
    pairs: dict[str, object] = dict(r.versions)
    pairs |= {f"target {k}": v for k, v in r.target.items()} | {f"regime {k}": v for k, v in r.regime.items()}
    pairs |= {"most tokens per response": r.max_tokens, "responses per prompt": r.samples_per_prompt}
    pairs |= {f"seconds, {k}": f"{v:.1f}" for k, v in r.seconds.items()}
    return tag("dl", [x for k, v in pairs.items() for x in (tag("dt", k), tag("dd", str(v)))])
