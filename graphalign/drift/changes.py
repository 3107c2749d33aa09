"""What differs between two snapshots, topic by topic, as items in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from graphalign.dataflow.census import Census
from graphalign.drift.item import Item
from graphalign.drift.snapshot import EdgeKey, Layers, Snapshot
from graphalign.evaluate.parts import step_words
from graphalign.ir.paths import ranges
from graphalign.patch.spec import Key
from graphalign.sites.ends import layer_of, pattern_of
from graphalign.sites.report import Entry

BUCKET_WORDS = {
    "semantic": "computing a different function", "conflicting": "conflicting", "undetermined": "undetermined",
    "unpatchable": "unpatchable", "leftovers": "not placed",
}  # fmt: skip
SHORT = 6
"""Entries of a list that are worth listing in full."""
Moved = Literal["appeared", "vanished", "changed"]


def _item(topic: Any, change: Moved, what: str, old: str = "", new: str = "", layers: Iterable[int | None] = ()) -> Item:
    numbers = tuple(sorted({n for n in layers if n is not None}))
    return Item(topic=topic, change=change, what=what, old=old, new=new, layers=ranges(numbers))


def edge_words(s: Snapshot, key: EdgeKey) -> str:
    """An edge in words: its group, value and reader."""
    producer, consumer = s.keys[key]
    group = next((c.group for (k, _), c in s.edges.items() if k == key), "")
    return f"{group}: {_end(producer)} → {_end(consumer)}" + (f" in {consumer.module}" if consumer.module else "")


def _end(key: Key) -> str:
    if key.op in ("parameter", "table") or not key.text:
        return f"{key.op} {key.module}"
    return step_words(key.op, f"`{key.text}`" if len(key.text) <= 48 else f"`{key.text[:45]}…`")


# -- sites -------------------------------------------------------------------------------------------------------------------


def sites(old: Snapshot, new: Snapshot) -> Iterator[Item]:
    """Sites that appeared, vanished, or changed kind, format or layers."""
    by_old, by_new = _by_edge(old, new), _by_edge(new, old)
    for key in sorted({*by_old, *by_new}):
        a, b = by_old.get(key, {}), by_new.get(key, {})
        name = edge_words(new if key in by_new else old, key)
        changed: dict[tuple[str, str], list[Layers]] = defaultdict(list)
        for layers in a.keys() & b.keys():
            if a[layers] != b[layers]:
                changed[a[layers], b[layers]].append(layers)
        for (was, now), where in changed.items():
            yield _item("site", "changed", name, was, now, [c for c, _ in where])
        gone, come = a.keys() - b.keys(), b.keys() - a.keys()
        if a and b and (gone or come):
            yield _item("site", "changed", f"{name}: layers", _layers(a), _layers(b))
        elif gone:
            yield _item("site", "vanished", name, old=_kinds(a), layers=[c for c, _ in gone])
        elif come:
            yield _item("site", "appeared", name, new=_kinds(b), layers=[c for c, _ in come])
    yield from _renamed(old, new)
    yield from _left_out("old", old, new)
    yield from _left_out("new", new, old)


def _left_out(which: str, s: Snapshot, other: Snapshot) -> Iterator[Item]:
    """What one of the two specs was made without: no drift."""
    count = Counter(c.group for (key, layers), c in other.edges.items() if (key, layers) not in s.edges and s.leaves_out(c.group, layers))
    if count:
        yield _item("note", "changed", f"the {which} spec leaves out by choice: {', '.join(f'{g} {n}' for g, n in sorted(count.items()))}")


def _by_edge(s: Snapshot, other: Snapshot) -> dict[EdgeKey, dict[Layers, str]]:
    """Edges to their kinds, without those that the other one leaves out by choice."""
    out: dict[EdgeKey, dict[Layers, str]] = defaultdict(dict)
    for (key, layers), c in s.edges.items():
        if (key, layers) not in other.edges and other.leaves_out(c.group, layers):
            continue
        out[key][layers] = f"keep ({c.format} in training)" if c.kind == "keep" else f"round to {c.format}"
    return out


def _kinds(of: dict[Layers, str]) -> str:
    return ", ".join(dict.fromkeys(of.values()))


def _layers(of: dict[Layers, str]) -> str:
    return ranges(tuple(sorted({c for c, _ in of if c is not None}))) or "outside the layers"


def _renamed(old: Snapshot, new: Snapshot) -> Iterator[Item]:
    pairs = {(c.group, new.edges[at].group) for at, c in old.edges.items() if at in new.edges and new.edges[at].group != c.group}
    for a, b in sorted(pairs):
        yield _item("note", "changed", "name of a group (rules changed, sites did not)", a, b)


def evidence(old: Snapshot, new: Snapshot) -> Iterator[Item]:
    """Sites that are the same, but that the inference side shows in another way."""
    for key in sorted(old.evidence.keys() & new.evidence.keys()):
        a, b = old.evidence[key], new.evidence[key]
        if a != b:
            yield _item("evidence", "changed", edge_words(new, key), "; ".join(sorted(a)), "; ".join(sorted(b)))


def findings(old: Snapshot, new: Snapshot) -> Iterator[Item]:
    """What is neither a site nor in agreement. Against a spec, which has none of these, all of the new ones are listed."""
    for key in sorted({*old.buckets, *new.buckets}):
        bucket, what, where = key
        a, b = old.buckets.get(key, ()), new.buckets.get(key, ())
        title = f"{BUCKET_WORDS[bucket]}: {what} at {where}"
        if a and not b:
            yield _item("finding", "vanished", title, old=_reason(a), layers=_of(a))
        elif b and not a:
            yield _item("finding", "appeared", title, new=_reason(b), layers=_of(b))
        elif _of(a) != _of(b):
            yield _item("finding", "changed", f"{title}: layers", ranges(_of(a)), ranges(_of(b)))


def _reason(entries: tuple[Entry, ...]) -> str:
    return "; ".join(dict.fromkeys(e.reason for e in entries))


def _of(entries: tuple[Entry, ...]) -> tuple[int, ...]:
    return tuple(sorted({n for e in entries for n in e.layers}))


# -- ops, edges, kernels -----------------------------------------------------------------------------------------------------


def opaque(old: Snapshot, new: Snapshot, inside: Mapping[str, str]) -> Iterator[Item]:
    """Ops that cannot be seen into, and custom ops that are compared as declared, with what rules/ops says about their inside."""
    for op in sorted(new.opaque - old.opaque):
        declared = inside.get(op, "")
        words = f"its inside is not compared; rules/ops: {declared}" if declared else "how it rounds inside is not known"
        yield _item("op", "appeared", f"opaque op {op}", new=words)
    for op in sorted(old.opaque - new.opaque - new.declared):
        yield _item("op", "vanished", f"opaque op {op}")
    for op in sorted(new.declared - old.declared):
        yield _item("op", "appeared", f"custom op {op}", new=f"compared as rules/ops declares it: {inside.get(op, '')}".rstrip(": "))
    for op in sorted(old.declared - new.declared - new.opaque):
        yield _item("op", "vanished", f"custom op {op}")


def ops(old: Snapshot, new: Snapshot) -> Iterator[Item]:
    """Ops of two sites files, by side."""
    for side in ("inference", "training"):
        a, b = (Counter({(t, m): n for (s, t, m), n in x.ops.items() if s == side}) for x in (old, new))
        yield from _ops(a, b, f"{side} ")


def _ops(old: Counter[tuple[str, str]], new: Counter[tuple[str, str]], prefix: str = "") -> Iterator[Item]:
    """New and vanished ops one by one; ops that only run more or less often (recomputed copies) in one item per module."""
    recounted: dict[str, list[str]] = defaultdict(list)
    for key in sorted({*old, *new}):
        target, module = key
        what = f"{prefix}op {target}" + (f" in {module}" if module else "")
        if not old[key]:
            yield _item("op", "appeared", what, new=f"{new[key]}×")
        elif not new[key]:
            yield _item("op", "vanished", what, old=f"{old[key]}×")
        elif old[key] != new[key]:
            recounted[module].append(f"{target} {old[key]} → {new[key]}")
    for module, counts in recounted.items():
        yield _item(
            "op", "changed", f"{prefix}ops run another number of times" + (f" in {module}" if module else ""), new=", ".join(counts)
        )


def structure(old: Census, new: Census) -> Iterator[Item]:
    """Two captures of one side: ops, edges with their roundings, kernels, attention and engine parameters."""
    yield from _ops(old.ops, new.ops)
    for op in sorted(old.calls.keys() & new.calls.keys()):
        if old.calls[op] != new.calls[op]:
            yield _item("note", "changed", f"arguments of op {op}", ", ".join(old.calls[op]), ", ".join(new.calls[op]))
    yield from _edges(old, new)
    yield from _kernels(old.kernels, new.kernels)
    for topic, a, b in (("attention of", old.attention, new.attention), ("parameter", old.parameters, new.parameters)):
        yield from _entries(topic, dict(a), dict(b))


def compile_ranges(old: Snapshot, new: Snapshot) -> Iterator[Item]:
    """The compile ranges beside the one that decides."""
    for tokens in dict.fromkeys([*old.ranges, *new.ranges]):
        a, b = old.ranges.get(tokens), new.ranges.get(tokens)
        if a is None or b is None:
            yield _item("setting", "appeared" if a is None else "vanished", f"graphs for {tokens}")
        else:
            for item in structure(a, b):
                yield item.model_copy(update={"what": f"{tokens}: {item.what}"})


def _edges(old: Census, new: Census) -> Iterator[Item]:
    seen_old, seen_new = {t for t, _ in old.ops}, {t for t, _ in new.ops}
    for key in sorted({*old.edges, *new.edges}):
        producer, consumer, slot = key
        a, b = old.edges.get(key, {}), new.edges.get(key, {})
        if a == b:
            continue
        name = f"{producer} → operand {slot} of {consumer}"
        if a and b and {r for v in a.values() for r in v} != {r for v in b.values() for r in v}:
            differ = [n for n in {*a, *b} if a.get(n) != b.get(n)]
            yield _item("edge", "changed", name, _roundings(a), _roundings(b), differ)
        elif a and b:
            yield _item("edge", "changed", f"{name}: layers", _edge_layers(a), _edge_layers(b))
        elif _known(producer, consumer, seen_old if b else seen_new):
            # an edge of an op that is itself new or gone is not worth a line of its own
            yield _item("edge", "appeared" if b else "vanished", name, _roundings(a) if a else "", _roundings(b) if b else "", [*a, *b])


def _known(producer: str, consumer: str, targets: set[str]) -> bool:
    ends = [e.split(" in ")[0] for e in (producer, consumer)]
    return all(e in targets or e.startswith("parameter ") or e == "output" for e in ends)


def _roundings(of: dict[int | None, frozenset[tuple[str, ...]]]) -> str:
    found = sorted({r for v in of.values() for r in v})
    return " or ".join(" then ".join(r) if r else "unrounded" for r in found)


def _edge_layers(of: dict[int | None, frozenset[tuple[str, ...]]]) -> str:
    return ranges(tuple(sorted(n for n in of if n is not None))) or "outside the layers"


def _kernels(old: Counter[str], new: Counter[str]) -> Iterator[Item]:
    if old == new:
        return
    gone, come = old - new, new - old
    yield _item(
        "kernel",
        "changed",
        "fused kernels",
        f"{old.total()}, of which {gone.total()} are gone",
        f"{new.total()}, of which {come.total()} are new",
    )
    for change, words in (("vanished", gone), ("appeared", come)):
        for text, n in words.most_common(4):
            yield _item("kernel", "vanished" if change == "vanished" else "appeared", f"{n}× {text}")


def _entries(topic: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[Item]:
    grouped: dict[tuple[Moved, str, str, str], list[int | None]] = defaultdict(list)
    for name in {*old, *new}:
        if old.get(name) != new.get(name):
            change: Moved = "appeared" if name not in old else "vanished" if name not in new else "changed"
            a, b = _differing(old.get(name), new.get(name))
            grouped[change, pattern_of(name), pattern_of(a), pattern_of(b)].append(layer_of(name))
    for (change, what, a, b), layers in sorted(grouped.items(), key=lambda g: g[0]):
        yield _item("parameter", change, f"{topic} {what}", a, b, layers)


def _differing(a: Any, b: Any) -> tuple[str, str]:
    if isinstance(a, dict) and isinstance(b, dict):
        names = [n for n in a if a[n] != b.get(n)]
        return tuple(", ".join(f"{n} {x.get(n)}" for n in names) for x in (a, b))  # type: ignore[return-value]
    return "" if a is None else str(a), "" if b is None else str(b)


# -- settings ----------------------------------------------------------------------------------------------------------------

IRRELEVANT = {"amx", "device", "simulated"}
"""Parts of a target that are compared before (`require_comparable`)."""


def settings(old: Snapshot, new: Snapshot) -> Iterator[Item]:
    """Compile settings and the parts of the target that a version may move.

    A setting that only one version knows and that is off there is no drift: every release adds such options. Nor is another way to say off.
    """
    a, b = ({**_flat(s.compile, ""), **_flat({k: v for k, v in s.target.items() if k not in IRRELEVANT}, "target.")} for s in (old, new))
    quiet: list[str] = []
    described: list[str] = []
    for name in sorted({*a, *b}):
        if _off(a.get(name)) and _off(b.get(name)):
            quiet += [name] if a.get(name, name) != b.get(name, name) else []
        elif name not in a or name not in b:
            yield _item("setting", "appeared" if name in b else "vanished", name, str(a.get(name, "")), str(b.get(name, "")))
        elif name.startswith("simulation.") or _same_entries(a[name], b[name]):
            described += [name] if a[name] != b[name] else []
        elif a[name] != b[name]:
            yield _item("setting", "changed", name, *_values(a[name], b[name]))
    if described:
        yield _item("note", "changed", f"told otherwise, but no setting: {', '.join(described)}")
    if quiet:
        yield _item("note", "changed", f"settings that are off in both, or off in one and unknown to the other: {', '.join(quiet)}")
    for package in sorted({*old.versions, *new.versions}):
        if old.versions.get(package) != new.versions.get(package):
            yield _item("note", "changed", f"version of {package}", old.versions.get(package, "none"), new.versions.get(package, "none"))


def _same_entries(a: Any, b: Any) -> bool:
    """Lists of the same entries in another order."""
    return isinstance(a, list) and isinstance(b, list) and sorted(map(str, a)) == sorted(map(str, b))


def _values(a: Any, b: Any) -> tuple[str, str]:
    """Two values of a setting; of long lists only the entries that differ."""
    if isinstance(a, list) and isinstance(b, list) and max(len(a), len(b)) > SHORT:
        gone, come = ([str(x) for x in one if x not in other] for one, other in ((a, b), (b, a)))
        return ", ".join(gone) or "without", ", ".join(come) or "without"
    return str(a), str(b)


def _flat(x: dict[str, Any], prefix: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for k, v in x.items():
        if isinstance(v, dict) and v:
            out |= _flat(v, f"{prefix}{k}.")
        else:
            out[f"{prefix}{k}"] = v
    return out


def _off(x: Any) -> bool:
    return x is None or x is False or x == 0 or x in ("", [], {}, "none", "NONE")


def sources(old: Snapshot, new: Snapshot) -> Iterator[Item]:
    """Modeling files of the trainer whose text changed, and source expressions that are written differently now."""
    for file in sorted(old.sources.keys() & new.sources.keys()):
        if old.sources[file] != new.sources[file]:
            yield _item("note", "changed", f"the trainer's {file} has another text")
    for key in sorted(old.keys.keys() & new.keys.keys()):
        for a, b in zip(old.keys[key], new.keys[key], strict=True):
            if a.text != b.text:
                yield _item(
                    "site", "changed", f"source of {b.op} number {b.ordinal} in {b.function} ({b.module})", f"`{a.text}`", f"`{b.text}`"
                )
