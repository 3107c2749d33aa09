"""A report as a hostile capture would make it: every name carries a payload."""

from __future__ import annotations

from typing import Any

from graphalign.sites.report import Report

PAYLOAD = (
    "</title></script></style><script>window.hit=1</script><img src=x onerror=window.hit=1>"
    "\" ' onmouseover=window.hit=1 x='<![CDATA[]]><!-- &lt;\\N\\G\\l"
)
CONTROL = "\x00\x1b[31m\u202e\u2066"
KEPT = {"format", "version", "side", "kind", "entry", "status", "verdict", "training", "inference", "roundings", "tail", "head", "partners"}
"""Fields whose values are fixed words or graphalign's own numbers."""
NAMES = {"id", "name", "group", "sites", "site", "differs"}
"""Names of groups and sites; they are made of op names where no rule fits."""


def poison(report: Report) -> Report:
    """The same report with the payload in every string that a capture can put there."""
    groups = [g.name for g in report.groups]
    data = report.model_dump(mode="json")
    data["target"]["device"] = PAYLOAD
    data["compile"] = {PAYLOAD: {PAYLOAD: [PAYLOAD]}}
    data["notes"] = [PAYLOAD + CONTROL]
    entry = {"side": "both", "what": "w", "where": "x", "reason": "r", "layers": [0], "count": 1, "names": ["n"]}
    for bucket in ("leftovers", "undetermined", "conflicting", "unpatchable", "semantic"):
        data[bucket] = [entry]
    panels = data["drawing"]["panels"]
    panels.append({**panels[0], "group": "conflicting", "entry": "conflicting", "reason": "r", "names": ["n"]})
    for a in panels[-1]["arrows"]:
        a["verdict"] = "conflicting"
    data["model"]["engine_class"] = "Transformers"
    return Report.model_validate(_walk(data, groups, ""))


def _walk(value: Any, groups: list[str], key: str) -> Any:
    if isinstance(value, dict):
        return {k: v if k in KEPT and k != "sites" and not isinstance(v, dict) else _walk(v, groups, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_walk(v, groups, key) for v in value]
    if not isinstance(value, str):
        return value
    if key in NAMES:
        return next((f"{g}{PAYLOAD}{value[len(g) :]}" for g in groups if value == g or value.startswith(f"{g}.")), value)
    return value + PAYLOAD + CONTROL
