"""A gap report as text for people."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphalign.gap.report import Attribution, GapReport, Measured, Share, VariantResult
from graphalign.gap.statistics import Estimate, GapStatistics
from graphalign.gap.variants import EVERYTHING, FP32, PAPERS_TITLE, POINTWISE, STOCK

UNIT = 1e-4
"""The paper's unit, in nats."""
MOST_ROWS = 14


@dataclass(frozen=True)
class Unit:
    """How numbers of one kind are written: all in one unit, with the same decimals."""

    exponent: int
    decimals: int

    def __str__(self) -> str:
        return f"1e{self.exponent}"

    def number(self, x: float) -> str:
        """`17.7`"""
        text = f"{x / 10.0**self.exponent:.{self.decimals}f}"
        return text if float(text) else text.removeprefix("-")

    def estimate(self, e: Estimate) -> str:
        """`17.7 [16.1, 19.4]`"""
        return self.number(e.value) + ("" if e.low is None or e.high is None else f" [{self.number(e.low)}, {self.number(e.high)}]")


def unit_for(x: float) -> Unit:
    """The paper's unit, 1e-4 nats, unless `x` is far from it; so that `x` has three digits.

    Args:
        x: the largest number of its kind.
    """
    power = math.floor(math.log10(abs(x))) if x and math.isfinite(x) else -4
    exponent = -4 if -4 <= power <= -1 else power
    return Unit(exponent, max(0, 2 - (power - exponent)))


def units(report: GapReport) -> tuple[Unit, Unit]:
    """Units of k3 and of d in a report's tables."""
    stock = report.variant(STOCK).sampled.pooled
    return unit_for(stock.k3.value), unit_for(stock.mean_abs_d.value)


def percent(e: Estimate | None) -> str:
    """`−37 % [−41, −33]`."""
    if e is None:
        return ""
    interval = "" if e.low is None or e.high is None else f" [{e.low:+.0%}, {e.high:+.0%}]".replace("%", "")
    return f"{e.value:+.1%}{interval}"


def render_gap(report: GapReport, console: Console) -> None:
    """Print the tables of a report."""
    r = report
    seeds = ", ".join(map(str, r.seeds))
    console.print(Text(f"{r.tokens} tokens in {r.sequences} responses ({r.prompts}; seeds {seeds}; at most {r.max_tokens} tokens)"))
    k, d = units(r)
    words = (
        f"d = inference − training log-probability of a token, in {d} nats; k3 = mean(exp(−d) − 1 + d), in {k} nats; with bootstrap 95 % "
    )
    console.print(Text(words + "intervals over responses", style="dim"))
    for side, title in (
        ("sampled", "Against the engine as it sampled (decode, in a batch): what an RL run sees"),
        ("prefill", "Against the engine when it scores the same tokens in one prefill"),
    ):
        console.print(_gaps(r, side, title))
    console.print(
        Text("The engine against itself, as sampled minus in prefill (no patch of a trainer removes it): " + describe(r.engine_gap, r))
    )
    if r.floor is not None:
        console.print(
            Text("The patched trainer against itself with one weight 1 ULP off (what any difference grows to): " + describe(r.floor, r))
        )
    _seeds(r, console)
    everything = next((v for v in r.variants if v.name == EVERYTHING), None)
    if everything is not None and everything.sampled.against_paper is not None:
        sides = {
            side: percent(m.against_paper.k3_relative) for side in ("sampled", "prefill") if (m := getattr(everything, side)).against_paper
        }
        words = f"{everything.title}, against the paper's three regions on the same tokens: k3 {sides['sampled']} as sampled"
        console.print(Text(words + (f", {sides['prefill']} in prefill" if "prefill" in sides else "")))
    if r.attribution is not None:
        render_shares(r.attribution, k, console)
    _residue(r, console)
    if r.emulated is not None:
        e = r.emulated
        groups = ", ".join(f"{k} {v}" for k, v in e.groups.items()) or "none"
        console.print(Text(
            f"The other way round: an engine that rounds where the source does (emulate_precision_casts), with the stock trainer:\n"
            f"  sites left {e.sites} ({groups}); as sampled {describe(e.gap, r)}; in prefill {describe(e.prefill, r)}\n"
            f"  {e.tokens_per_second:.1f} tokens/s generated, against {r.engine_tokens_per_second:.1f} of the engine as it is"
        ))  # fmt: skip
    for note in r.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def describe(s: GapStatistics, report: GapReport) -> str:
    """Statistics in a line, in the report's units."""
    k, d = units(report)
    return f"k3 {k.estimate(s.k3)} · {k} nats, mean |d| {d.estimate(s.mean_abs_d)} · {d} nats, {s.equal_share.value:.1%} equal"


def main_rows(report: GapReport) -> list[VariantResult]:
    """The variants worth a row: no more than `MOST_ROWS` subsets of groups, and everything that is none."""
    few = [v for v in report.variants if len(report.variants) <= MOST_ROWS or len(v.groups) <= 1 or _special(v)]
    return sorted(few, key=lambda v: (v.name != STOCK, -v.sampled.pooled.k3.value))


def _special(v: VariantResult) -> bool:
    return v.name in (STOCK, EVERYTHING, FP32, POINTWISE) or "engine's" in v.name or v.title == PAPERS_TITLE


def _gaps(r: GapReport, side: str, title: str) -> Table:
    table = _table(title)
    k, d = units(r)
    table.add_column("trainer", min_width=14, overflow="fold")
    for name in ("edges", "k3", "against stock", "mean d", "mean |d|", "max |d|", "equal"):
        table.add_column(name, justify="right", overflow="fold")
    for v in main_rows(r):
        if "engine's" in v.name and side == "sampled":
            continue
        m: Measured = getattr(v, side)
        p = m.pooled
        cells = [v.title, str(v.edges or ""), k.estimate(p.k3), percent(m.against_stock.k3_relative) if m.against_stock else ""]
        cells += [d.estimate(p.mean_d), d.number(p.mean_abs_d.value), f"{p.max_abs_d / 10.0**d.exponent:.0f}"]
        table.add_row(*cells, f"{p.equal_share.value:.1%}")
    return table


def _seeds(r: GapReport, console: Console) -> None:
    if len(r.seeds) < 2:
        return
    table = _table("k3 against stock, seed by seed, as sampled")
    table.add_column("trainer", no_wrap=True)
    for s in r.seeds:
        table.add_column(f"seed {s}", justify="right", no_wrap=True)
    for v in main_rows(r):
        if v.sampled.against_stock_by_seed and (len(v.groups) != 1 or _special(v)) and "engine's" not in v.name:
            table.add_row(v.title, *(percent(v.sampled.against_stock_by_seed[s].k3_relative) for s in r.seeds))
    console.print(table)


def render_shares(a: Attribution, k: Unit, console: Console) -> None:
    """Print Shapley shares, a table for each way of scoring: one with both does not fit into 80 columns."""
    how = f"all {a.subsets} subsets measured" if a.exact else f"sampled orders, {a.subsets} subsets measured"
    prefill = {s.group: s for s in a.prefill}
    sampled = sorted(a.sampled, key=lambda s: -s.reduction.value)
    for side, found in (("as sampled", sampled), ("in prefill", [prefill[s.group] for s in sampled])):
        table = _table(f"Shapley share of each group in the reduction of k3, {side} ({how})")
        table.add_column("group", min_width=12, overflow="fold")
        for name in ("reduction", "part", "alone"):
            table.add_column(name, justify="right", no_wrap=True)
        for s in found:
            table.add_row(s.group, k.estimate(s.reduction), f"{s.part:.0%}", k.estimate(s.alone) if s.alone else "")
        console.print(table)
    for s in sampled:
        if said := widens(s, prefill[s.group]):
            console.print(Text(f"{s.group}: {said}", style="yellow"))


def widens(sampled: Share, prefill: Share) -> str:
    """Where a group makes the gap larger, in words; empty if nowhere for sure."""
    where = [name for name, share in (("as sampled", sampled), ("in prefill", prefill)) if share.widens]
    return f"widens the gap {' and '.join(where)}" if where else ""


def _residue(r: GapReport, console: Console) -> None:
    if r.residue is None:
        if r.residue_skipped:
            console.print(Text(f"kernels were not compared: {r.residue_skipped}", style="yellow"))
        return
    x = r.residue
    table = _table(f"What is left: bitwise equal elements on the engine's own operands ({x.tokens} tokens)")
    for name in ("class", "equal", "lowest", "results"):
        table.add_column(name, justify="left" if name == "class" else "right")
    rows = [("GEMM, the trainer's against the engine's, equal shapes", x.gemm)]
    rows += [(f"GEMM, the engine's, {n} row{'s' if n > 1 else ''} against all", a) for n, a in x.gemm_rows.items()]
    rows += [("attention, the trainer's against the engine's", x.attention), ("patched regions (below 1: order of summation)", x.regions)]
    for name, a in rows:
        if a is not None:
            table.add_row(name, f"{a.equal:.5f}", f"{a.lowest:.5f}", str(a.results))
    console.print(table)
    if r.shared_skipped:
        console.print(Text(f"the engine's kernels were not tried in the trainer: {r.shared_skipped}", style="yellow"))
