"""Why a node is, or is not, aligned."""

from __future__ import annotations

import difflib

from graphalign.errors import BadInputError
from graphalign.sites.report import End, NodeStatus, Report, Site


def explain(report: Report, node: str) -> str:
    """What became of a node, or of the nodes whose module or name contains the text.

    Raises:
        BadInputError: nothing is called that; the nearest names are given.
    """
    for group in report.groups:
        for site in group.sites:
            if site.id == node:
                return _site(site)
    exact = [n for n in report.nodes if n.name == node or n.name.lstrip("%") == node]
    found = exact or [n for n in report.nodes if node in n.where or node in n.name]
    if not found:
        names = [n.name for n in report.nodes] + [s.id for g in report.groups for s in g.sites]
        near = difflib.get_close_matches(node, names, 5, 0.4)
        raise BadInputError(
            f"no node or site is called {node!r}",
            hint=f"did you mean {', '.join(near)}?" if near else "give a node (%24, op31.mul_2), a site (rope.1), or part of a module path",
        )
    more = f"\n… and {len(found) - 40} more; be more specific" if len(found) > 40 else ""
    return "\n".join(_node(n) for n in found[:40]) + more


def _node(n: NodeStatus) -> str:
    lines = [f"{n.side} {n.name} = {n.target}", f"  at {n.where}", f"  {n.status}" + (f": {n.reason}" if n.reason else "")]
    if n.partners and n.assumed:
        lines.append(f"  on the other side: {', '.join(n.partners)}; {n.assumed}")
    elif n.partners:
        lines.append(f"  same value on the other side: {', '.join(n.partners)}")
    if n.unexercised:
        lines.append(f"  not exercised: {n.unexercised}")
    lines += [f"  nearest on the other side: {x}" for x in n.near]
    lines += [f"  {e}" for e in n.edges]
    return "\n".join(lines)


def _end(end: End) -> str:
    where = f" in {end.module}" if end.module else ""
    operand = f", operand {end.operand}" if end.operand is not None else ""
    source = f": {end.text}  ({end.file}:{end.line})" if end.file else ""
    return f"{end.op}{where}{operand}{source}"


def _site(s: Site) -> str:
    lines = [
        f"site {s.id}: {s.kind}",
        f"  producer {_end(s.producer)}",
        f"  consumer {_end(s.consumer)}",
        f"  training rounds to {', '.join(s.training) or 'nothing'}, inference to {', '.join(s.inference) or 'nothing'}",
        f"  layers {', '.join(map(str, s.layers)) or 'none (outside the layers)'}",
        f"  left out, {s.effect:.1%} of the elements behind it differ from the engine's, in: {', '.join(s.reaches)}",
    ]
    lines += [
        f"  evidence: {e.producer} → {e.consumer} in {e.kernel}" + (f" through {', '.join(e.buffers)}" if e.buffers else ", in registers")
        for e in s.evidence
    ]
    return "\n".join(lines)
