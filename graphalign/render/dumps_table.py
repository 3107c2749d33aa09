"""A dump's report as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphalign.dumps.report import DumpReport, Finding, Part, Scored
from graphalign.gap.statistics import GapStatistics
from graphalign.render.gap_table import Unit, percent, unit_for

MOST_STEPS: Final = 12
SHOWN_FILES: Final = 8
T = TypeVar("T")
FORMULA: Final = "d = inference − training log-probability of a token; k3 = mean(exp(−d) − 1 + d); bootstrap 95 % intervals over responses"


def units(r: DumpReport) -> tuple[Unit, Unit]:
    """Units of k3 and of d."""
    gaps = [g for g in (r.gap, *(s.gap for s in r.scored), r.engine_gap) if g is not None]
    k = max((g.k3.value for g in gaps), default=0.0)
    return unit_for(k), unit_for(max((g.mean_abs_d.value for g in gaps), default=0.0))


def render_dump(r: DumpReport, console: Console) -> None:
    """Print the tables of a report."""
    _files(r, console)
    for f in r.findings:
        console.print(Text(finding_text(f), style="bold red" if f.refuses else "yellow"))
    if r.gap is not None or r.scored:
        console.print(Text(FORMULA, style="dim"))
    k, d = units(r)
    rows = summary_rows(r)
    if rows:
        console.print(_gaps("The gap", "between", rows, k, d))
    for title, head, parts in (
        ("By training step", "step", spread(r.by_step, MOST_STEPS)),
        ("By position in the response", "token", r.by_position),
        ("By the engine's probability of the token", "probability", r.by_probability),
    ):
        if parts:
            console.print(_gaps(title, head, [(p.name, p.gap) for p in parts], k, d))
    if len(r.by_step) > MOST_STEPS:
        console.print(Text(f"{len(r.by_step)} steps; {MOST_STEPS} are shown, gap.json has all", style="dim"))
    if r.scored:
        console.print(_scored(r.scored, k, d))
    if r.floor is not None:
        words = "The patched trainer against itself with one weight 1 ULP off (what any difference grows to)"
        console.print(Text(f"{words}: k3 {k.estimate(r.floor.k3)} · {k} nats"))
    if r.sampling is not None:
        console.print(Text(sampling_text(r)))
    if r.outside_clip is not None:
        console.print(
            Text(f"tokens whose ratio p/q is outside of 1 ± 0.2, PPO's usual clip range, before any update: {r.outside_clip:.3%}")
        )
    if r.logged:
        table = _table("The same columns as trainers log them")
        for name in ("figure", "value", "logged as"):
            table.add_column(name, justify="right" if name == "value" else "left", overflow="fold")
        for x in r.logged:
            table.add_row(x.name, f"{x.value:.6g}", x.logged_as)
        console.print(table)
    _left_out(r, console)
    for note in r.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def summary_rows(r: DumpReport) -> list[tuple[str, GapStatistics]]:
    """The gaps of the whole: the dump's trainer, the engine against itself."""
    rows = [("the engine and the trainer that wrote the dump", r.gap), ("the engine as it sampled and in prefill", r.engine_gap)]
    return [(name, gap) for name, gap in rows if gap is not None]


def finding_text(f: Finding) -> str:
    """A finding in a few lines."""
    lines = [("no numeric gap: " if f.refuses else "") + f.what]
    for label, text in (("where:", f.where), ("try:", f.hint)):
        lines += [f"  {label if i == 0 else '':<7}{line}" for i, line in enumerate(text.splitlines())]
    return "\n".join(lines)


def sampling_text(r: DumpReport) -> str:
    """How the tokens were drawn, in a line."""
    s = r.sampling
    assert s is not None
    found = [f"{n} about {v:g}" for n, v in (("top_k", s.top_k), ("top_p", s.top_p), ("min_p", s.min_p)) if v is not None]
    filters = ", ".join(found) or "no sign of top_k, top_p or min_p"
    heat = "" if s.temperature is None else f" at temperature {s.temperature:.3f} ± {s.temperature_error:.3f}"
    return f"by the stock trainer's logits {s.tokens} tokens were drawn{heat}, with {filters}"


def spread(parts: Sequence[T], most: int) -> Sequence[T]:
    """No more than `most` of them, first and last included, evenly."""
    if len(parts) <= most:
        return parts
    return [parts[round(i * (len(parts) - 1) / (most - 1))] for i in range(most)]


def _files(r: DumpReport, console: Console) -> None:
    used, tokens = sum(f.used for f in r.files), sum(f.tokens for f in r.files)
    console.print(
        Text(f"{tokens} tokens that count in {used} of {r.rows} responses, from {len(r.files)} file{'s' if len(r.files) > 1 else ''}")
    )
    for f in r.files[:SHOWN_FILES]:
        console.print(Text(f"  {f.path}: {f.title}; {f.used} of {f.rows} responses, {f.tokens} tokens", style="dim"))
    if len(r.files) > SHOWN_FILES:
        console.print(Text(f"  … and {len(r.files) - SHOWN_FILES} more", style="dim"))


def _left_out(r: DumpReport, console: Console) -> None:
    if r.empty:
        console.print(Text(f"{r.empty} responses have no token that counts"))
    for x in r.left_out:
        console.print(Text(f"left out: {x.rows} of {r.rows} responses: {x.fault}", style="yellow"))
        for example in x.examples:
            console.print(Text(f"  {example}", style="dim"))
        console.print(Text(f"  try:   {x.hint}", style="dim"))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _gaps(title: str, head: str, rows: Sequence[tuple[str, GapStatistics]], k: Unit, d: Unit) -> Table:
    table = _table(title)
    table.add_column(head, min_width=12, overflow="fold")
    for name in ("tokens", f"k3 [{k}]", f"mean d [{d}]", f"mean |d| [{d}]", "max |d|", "equal"):
        table.add_column(name, justify="right", overflow="fold")
    for name, g in rows:
        table.add_row(name, *cells(g, k, d))
    return table


def cells(g: GapStatistics, k: Unit, d: Unit) -> list[str]:
    """Tokens, k3, mean d, mean |d|, largest |d| in nats, share of equal tokens."""
    share = f"{g.equal_share.value:.1%}"
    return [str(g.tokens), k.estimate(g.k3), d.estimate(g.mean_d), d.number(g.mean_abs_d.value), f"{g.max_abs_d:.3g}", share]


def _scored(scored: Sequence[Scored], k: Unit, d: Unit) -> Table:
    table = _table("Trainers run here on the dump's tokens, against the engine's log-probabilities")
    table.add_column("trainer", min_width=12, overflow="fold")
    for name in ("edges", f"k3 [{k}]", "k3 against stock", f"mean |d| [{d}]", "max |d|", "equal"):
        table.add_column(name, justify="right", overflow="fold")
    for s in scored:
        relative = percent(s.against_stock.k3_relative) if s.against_stock else ""
        c = cells(s.gap, k, d)
        table.add_row(s.title, str(s.edges or ""), c[1], relative, *c[3:])
    return table


def part_rows(parts: Sequence[Part]) -> list[tuple[str, GapStatistics]]:
    """Name and gap of every part."""
    return [(p.name, p.gap) for p in parts]
