"""What moved between two specs, two sites files or two captures, and whether a patch made from the old one still holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

from graphalign.drift import changes, snapshot
from graphalign.drift.item import Item
from graphalign.drift.snapshot import WORDS, Change, Layers, Snapshot
from graphalign.errors import BadInputError
from graphalign.ir.paths import ranges
from graphalign.patch.spec import Frozen

Verdict = Literal["right", "safe", "wrong", "unknown", "none"]
MEANING: dict[Verdict, str] = {
    "right": "the old patch is right: the new map asks for the same edits",
    "safe": "the old patch is safe but incomplete: no edit contradicts the new map, edits are missing",
    "wrong": "the old patch is wrong: an edit contradicts the new map",
    "unknown": "whether the old patch holds is unknown: the new map cannot judge some of its edits, and contradicts none",
    "none": "captures alone say nothing about a patch: compare two sites files, or use `graphalign find --baseline patch.yaml`",
}
TARGET = ("device", "device_name", "capability", "isa", "amx", "inductor_isa", "tp", "simulated")
"""What makes two targets different machines. GEMM dispatch and compile ranges may move with a version: these are drift."""
MODEL = ("architecture", "config_digest", "layers")


class Origin(Frozen):
    """One of the two things compared."""

    kind: str
    path: str
    versions: dict[str, str]
    simulated: bool = False


class Drift(Frozen):
    """The result; `--format json` prints it."""

    format: Literal["graphalign.drift"] = "graphalign.drift"
    version: Literal[1] = 1
    old: Origin
    new: Origin
    model: str
    verdict: Verdict
    reasons: tuple[str, ...]
    """Why the verdict is not `right`: each edit that contradicts, is missing, or cannot be judged."""
    items: tuple[Item, ...]

    @property
    def moved(self) -> bool:
        """Whether anything moved: exit code 5."""
        return any(i.moved for i in self.items)


def drift(old: Snapshot, new: Snapshot, inside: Mapping[str, str] | None = None) -> Drift:
    """Compare two snapshots of one kind, or a spec with the sites made anew.

    Args:
        old: from before.
        new: from after.
        inside: what rules declare about the inside of opaque ops, by op.

    Raises:
        BadInputError: they are of different kinds, models, targets or regimes.
    """
    require_comparable(old, new)
    items: list[Item] = []
    verdict: Verdict = "none"
    reasons: list[str] = []
    if old.kind == new.kind:
        items += changes.opaque(old, new, inside or {})
    if old.kind in ("spec", "sites"):
        verdict, reasons = judge(old, new)
        items += changes.sites(old, new)
        if old.kind == new.kind == "sites":
            items += [*changes.evidence(old, new), *changes.findings(old, new), *changes.ops(old, new)]
        elif new.kind == "sites":
            items += changes.findings(old, new)
    if old.structure is not None and new.structure is not None:
        items += [*changes.structure(old.structure, new.structure), *changes.compile_ranges(old, new)]
    items += changes.settings(old, new)
    items += changes.sources(old, new)
    model = str(new.model.get("architecture") or old.model.get("architecture") or "")
    return Drift(old=_origin(old), new=_origin(new), model=model, verdict=verdict, reasons=tuple(reasons), items=tuple(items))


def _origin(s: Snapshot) -> Origin:
    return Origin(kind=WORDS[s.kind], path=s.path, versions=dict(sorted(s.versions.items())), simulated=s.simulated)


def require_comparable(old: Snapshot, new: Snapshot) -> None:
    """Refuse a comparison that would call a difference of the question a difference of the answer.

    Raises:
        BadInputError: names what differs, with both values.
    """
    if old.kind != new.kind and (old.kind, new.kind) != ("spec", "sites"):
        raise BadInputError(
            f"{_article(WORDS[old.kind])} cannot be compared with {_article(WORDS[new.kind])}",
            where=f"old: {old.path}\nnew: {new.path}",
            hint="give two specs, two sites files, two captures of one side, or an old spec and a new sites file",
        )
    for what, a, b, names, hint in (
        ("models", old.model, new.model, MODEL, "compare captures of one model"),
        ("targets", old.target, new.target, TARGET, "a patch belongs to one target: make one for each, and compare like with like"),
        ("regimes", old.regime, new.regime, tuple(sorted({*old.regime, *new.regime})), "a patch belongs to one regime: make one for each"),
    ):
        for name in names:
            if name in a and name in b and a[name] != b[name]:
                raise BadInputError(
                    f"these are of different {what}: {name} is {_plain(a[name])} in one and {_plain(b[name])} in the other",
                    where=f"old: {old.path}\nnew: {new.path}",
                    hint=hint,
                )
    if old.simulated != new.simulated:
        raise BadInputError("one of the two is simulated, the other from a real device", where=f"old: {old.path}\nnew: {new.path}",
                            hint="compare like with like")  # fmt: skip


def _article(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def _plain(x: Any) -> str:
    return str(x) if len(str(x)) <= 60 else f"{str(x)[:57]}…"


def judge(old: Snapshot, new: Snapshot) -> tuple[Verdict, list[str]]:
    """Whether the old edits still hold on the new map, with one reason per kind of edge that is not as it was.

    An old edit contradicts the new map if the map asks for another edit there, or says that both sides agree there. Where the map
    could not judge the edge (undetermined, conflicting, behind an opaque op, left out by choice, …) the edit is neither right nor wrong.
    """
    if semantic := [k for k in new.buckets if k[0] == "semantic"]:
        return "wrong", [f"the two sides now compute different functions at {where}: {what}" for _, what, where in semantic[:3]]
    wrong: dict[str, list[Layers]] = defaultdict(list)
    unknown: dict[str, list[Layers]] = defaultdict(list)
    missing: dict[str, list[Layers]] = defaultdict(list)
    for (key, layers), change in old.edges.items():
        name = changes.edge_words(old, key)
        now = new.edges.get((key, layers))
        if now is None and new.leaves_out(change.group, layers):
            unknown[f"the new spec leaves {change.group} out by choice"].append(layers)
        elif now is None:
            entry = snapshot.unsettled(old, new, key, layers)
            if entry is not None:
                unknown[f"{_edit(change)} {name}: now {changes.BUCKET_WORDS[entry[0]]}, {entry[1].reason}"].append(layers)
            else:
                wrong[f"{_edit(change)} {name}: inference no longer differs there"].append(layers)
        elif (now.kind, now.format) != (change.kind, change.format):
            wrong[f"{_edit(change)} {name}: now it must {_edit(now)}"].append(layers)
    for (key, layers), change in new.edges.items():
        if (key, layers) in old.edges:
            continue
        if old.leaves_out(change.group, layers):
            missing[f"the old patch leaves {change.group} out by choice"].append(layers)
        else:
            missing[f"{_edit(change)} {changes.edge_words(new, key)} is missing"].append(layers)
    reasons = [f"{text}{_in(layers)}" for found in (wrong, unknown, missing) for text, layers in found.items()]
    verdict: Verdict = "wrong" if wrong else "unknown" if unknown else "safe" if missing else "right"
    return verdict, reasons


def _edit(change: Change) -> str:
    return "keep unrounded" if change.kind == "keep" else f"round to {change.format}"


def _in(layers: list[Layers]) -> str:
    numbers = tuple(sorted({c for c, _ in layers if c is not None}))
    return f" (layers {ranges(numbers)})" if numbers else ""
