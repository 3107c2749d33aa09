"""Drift in words: plain text for a terminal, markdown for a pull-request comment."""

from __future__ import annotations

from graphalign.drift.compare import MEANING, Drift, Origin
from graphalign.drift.item import Item

TITLES = {
    "site": "Sites",
    "finding": "What could not become a site",
    "op": "Ops",
    "edge": "Roundings on the way",
    "evidence": "Evidence: the same sites, shown by other kernels",
    "kernel": "Kernels",
    "setting": "Compile settings",
    "parameter": "Engine parameters and attention",
    "note": "Said, but no drift",
}
LONGEST = 20
"""Items of one topic that are printed; json has all."""
REASONS = 8


def text(d: Drift) -> str:
    """Plain text, a line per item."""
    lines = [f"old: {_origin(d.old)}", f"new: {_origin(d.new)}", "", headline(d)]
    lines += [f"  - {r}" for r in _cut(d.reasons, REASONS)]
    for title, items in _topics(d):
        lines += ["", title]
        lines += [f"  {_sign(i)} {_line(i)}" for i in items[:LONGEST]]
        lines += _more(items, "  ")
    return "\n".join(lines) + "\n"


def markdown(d: Drift) -> str:
    """For a comment on a pull request: the verdict first, the lists folded away."""
    mark = {"right": "✅", "none": "ℹ️", "safe": "⚠️", "unknown": "⚠️", "wrong": "❌"}[d.verdict]
    if d.verdict == "none":
        mark = "⚠️" if d.moved else "✅"
    lines = [f"### {mark} Rounding drift, {d.model or 'model'}", "", headline(d), ""]
    lines += [f"- {_escape(r)}" for r in _cut(d.reasons, REASONS)]
    lines += ["", "| | file | vLLM | torch | Transformers |", "| --- | --- | --- | --- | --- |"]
    for name, o in (("old", d.old), ("new", d.new)):
        v = o.versions
        simulated = " (simulated)" if o.simulated else ""
        lines.append(f"| {name} | {_cell(o.path)}{simulated} | {v.get('vllm', '')} | {v.get('torch', '')} | {v.get('transformers', '')} |")
    for title, items in _topics(d):
        lines += ["", f"<details{' open' if items[0].topic == 'site' else ''}><summary>{title} ({len(items)})</summary>", ""]
        if items[0].topic in ("site", "setting", "evidence", "edge"):
            lines += ["| | what | layers | old | new |", "| --- | --- | --- | --- | --- |"]
            lines += [f"| {i.change} | {_cell(i.what)} | {i.layers} | {_cell(i.old)} | {_cell(i.new)} |" for i in items[:LONGEST]]
        else:
            lines += [f"- {_escape(_line(i))}" for i in items[:LONGEST]]
        lines += [*_more(items, ""), "", "</details>"]
    return "\n".join(lines) + "\n"


def headline(d: Drift) -> str:
    """The result in one sentence."""
    moved = [i for i in d.items if i.moved]
    if not moved:
        return "Nothing moved" + ("." if d.verdict == "none" else f"; {MEANING[d.verdict]}.")
    sites = sum(i.topic == "site" for i in moved)
    counts = f"{sites} kinds of site" if sites else "No site" if d.verdict != "none" else f"{len(moved)} things"
    return f"{counts} moved; {MEANING[d.verdict]}."


def _topics(d: Drift) -> list[tuple[str, list[Item]]]:
    found = [(title, [i for i in d.items if i.topic == topic]) for topic, title in TITLES.items()]
    return [(title, items) for title, items in found if items]


def _sign(i: Item) -> str:
    return {"appeared": "+", "vanished": "-", "changed": "~"}[i.change] if i.moved else "·"


def _line(i: Item) -> str:
    layers = f" [layers {i.layers}]" if i.layers else ""
    if i.change == "changed" and (i.old or i.new):
        return f"{i.what}{layers}: {i.old} → {i.new}" if i.old else f"{i.what}{layers}: {i.new}"
    detail = i.new or i.old
    return f"{i.what}{layers}" + (f": {detail}" if detail else "")


def _more(items: list[Item], indent: str) -> list[str]:
    return [f"{indent}… and {len(items) - LONGEST} more (--format json has all)"] if len(items) > LONGEST else []


def _cut(reasons: tuple[str, ...], n: int) -> list[str]:
    return [*reasons[:n], *([f"… and {len(reasons) - n} more"] if len(reasons) > n else [])]


def _origin(o: Origin) -> str:
    names = [f"{n} {o.versions[n]}" for n in ("vllm", "torch", "transformers") if n in o.versions]
    return f"{o.path} ({o.kind}{', simulated' if o.simulated else ''}; {', '.join(names)})"


def _escape(s: str) -> str:
    """No markup but code spans: the names come out of captures."""
    return "`".join(part if k % 2 else _harmless(part) for k, part in enumerate(s.replace("\n", " ").split("`")))


def _harmless(s: str) -> str:
    for c in "\\*_[]<>#@":
        s = s.replace(c, {"<": "&lt;", ">": "&gt;", "@": "&#64;"}.get(c, f"\\{c}"))
    return s


def _cell(s: str) -> str:
    return _escape(s).replace("|", "\\|")
