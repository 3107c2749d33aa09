"""What is written on a diagram's parts, and what they say when they are pointed at. Full texts are in the hover; labels are short."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from graphalign.ir.drawing import Panel, Vertex
from graphalign.render.sheets import BARS, Sheet, titles
from graphalign.render.words import clean, kernel_name, layer_words, shorten
from graphalign.sites.ends import layer_of

WIDTH = 29
"""Characters in a line of a label."""
LONG = 36
"""Characters in the small line below it, and in a name that is shown whole."""
ENTRIES = {"semantic": "semantic divergence", "conflicting": "conflicting", "undetermined": "undetermined", "unpatchable": "unpatchable"}
SOURCES = ("parameter", "table", "input")


def lines(sheet: Sheet, v: Vertex) -> tuple[list[str], str]:
    """A vertex's label: its lines, and a small one below them."""
    if v.kind in (*BARS, *SOURCES):
        word = {"gemm": "GEMM ", "attention": "attention "}.get(v.kind, "")
        names = _together(_middle(x.label) for x in sheet.all(v))
        broken = [part for n, name in enumerate(names[:4]) for part in wrap((word if n == 0 else "") + name, WIDTH, 3)]
        return [*broken, f"and {len(names) - 4} more"] if len(names) > 4 else broken, ""
    times = f" ×{v.count}" if v.count > 1 else ""
    if v.kind == "sum":
        layers = dict.fromkeys(_layer(sheet, x) for x in sheet.all(v))
        where = f" · {' and '.join(x or 'this layer' for x in layers)}" if any(layers) else ""
        return wrap(v.label or v.op, WIDTH), f"residual sum{times}{where}"
    if v.kind == "steps":
        return wrap(v.op, WIDTH, 3), f"{v.count} engine ops" if v.id[0] == "i" else f"{len(v.op.split(' → '))} steps"
    names = list(dict.fromkeys(x.label for x in sheet.all(v) if x.label))
    body = wrap(v.label or v.op, WIDTH, 3)
    for other in names[1:3]:
        body += wrap(f"or {other}", WIDTH, 2)
    layer = _layer(sheet, v)
    place = f" · {shorten(v.place.split('/')[-1], WIDTH)}" if v.place else ""
    rest = f"{times}{place}" + (f" · {layer}" if layer else "")
    return body, shorten(v.op, max(LONG - len(rest), 6)) + rest


def wrap(text: str, width: int, most: int = 2) -> list[str]:
    """At most `most` lines of at most `width` characters, about equally long; words are broken where a dotted name or a call can be."""
    words = [p for w in clean(text).split() for p in _broken(w, width)]
    out = _filled(words, width)
    while len(out) > 1:
        longest = max(len(line.rstrip()) for line in out)
        closer = _filled(words, longest - 1)
        if len(closer) > len(out) or max(len(line.rstrip()) for line in closer) >= longest:
            break
        out = closer
    return [line.rstrip() for line in (out if len(out) <= most else [*out[: most - 1], shorten("".join(out[most - 1 :]), width)])]


def _broken(word: str, width: int) -> list[str]:
    """A word with a space after it, in parts that fit."""
    if len(word) <= width:
        return [word + " "]
    parts = [p[n : n + width] for p in re.findall(r"[^.(,]*[.(,]*", word) for n in range(0, len(p), width)]
    return [*parts[:-1], parts[-1] + " "]


def _filled(words: list[str], width: int) -> list[str]:
    out = [""]
    for word in words:
        if out[-1] and len((out[-1] + word).rstrip()) > width:
            out.append("")
        out[-1] += word
    return out


def _middle(name: str) -> str:
    """A dotted name; if it is long, without what is between its first part and its last. A bound method's module is the module."""
    name = re.sub(r"\.\w+\.__self__\b", "", name)
    parts = name.split(".")
    return name if len(name) <= 2 * WIDTH or len(parts) < 3 else f"{parts[0]}…{parts[-1]}"


def _together(names: Iterable[str]) -> list[str]:
    """`a.b.q, a.b.k, c` as `a.b.q, k` and `c`."""
    by: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        front, dot, last = name.rpartition(".")
        by[front + dot].append(last)
    return [front + ", ".join(last) for front, last in by.items()]


def _layer(sheet: Sheet, v: Vertex) -> str:
    """`layer 3`, if it is of another layer than the panel's."""
    known = {x.id: x for w in sheet.panel.vertices for x in sheet.all(w)}
    twin = v if v.id[0] == "t" else next((known[p] for p in v.partners if p in known), v)
    layer = layer_of(twin.module)
    return f"layer {layer}" if layer is not None and layer != sheet.panel.layer else ""


def sites_label(sites: tuple[str, ...]) -> str:
    """`rope.1, .5`: the group is said once."""
    out: list[str] = []
    for site in sites[:4]:
        group, dot, number = site.rpartition(".")
        out.append(f".{number}" if dot and out and sites[0].rpartition(".")[0] == group else site)
    return ", ".join(out) + (f" +{len(sites) - 4}" if len(sites) > 4 else "")


def kernels_label(names: Iterable[str]) -> str:
    """`kernel cpp_fused…_5`."""
    known = list(dict.fromkeys(names))
    return "kernel " + kernel_name(known[0], 26) + (f" and {len(known) - 1} more" if len(known) > 1 else "")


def vertex_hover(sheet: Sheet, v: Vertex) -> str:
    """Everything about a vertex, in lines."""
    return "\n\n".join(dict.fromkeys(_hover(x) for x in sheet.all(v)))


def _hover(v: Vertex) -> str:
    out = [clean(v.source or v.label or v.op, 300)]
    if v.place:
        out.append(f"{clean(v.place, 200)}")
    if v.module:
        out.append(f"in {clean(v.module, 200)}")
    what = f"{clean(v.op, 200)}: {', '.join(clean(n, 60) for n in v.names)}"
    out.append(what + (f" and {v.count - 8} more" if v.count > 8 else ""))
    if v.kernel:
        out.append(f"kernel {clean(v.kernel, 200)}")
    return "\n".join(out)


def caption(panel: Panel) -> str:
    """What a panel shows, in a line."""
    group = ENTRIES.get(panel.entry, panel.group) or "all sites"
    if panel.layer is None:
        return f"{group}: outside the layers"
    others = "" if len(panel.layers) == 1 else f"; it stands for {layer_words(panel.layers)}"
    return f"{group}: layer {panel.layer}{others}"


def subtitle(sheet: Sheet) -> str:
    """Which part of the panel a sheet shows, and what it stands for; the reason if it is no site."""
    names = titles(sheet)
    shown = names[0] if names else "between residual sums"
    if sheet.panel.entry:
        return clean(sheet.panel.reason, 400)
    regions = [name.replace(", ", " + ") for name in names]
    if len(regions) > 1 and sheet.regions:
        return f"{', '.join(regions[:-1])} and {regions[-1]}: alike, drawn once, their sites in this order"
    return ", ".join(regions) or shown
