"""One diagram: the ops around a group's sites in one layer, both sides, with everything else folded away.

Training: the ends of the sites are drawn one by one, the rest of their regions as chains of steps, anchors and sources at
the borders. Inference: what holds those values, reached from the matching anchor operands; copies of one value in one
kernel are one vertex, steps of the inference side only belong to the vertex that reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from graphalign.align.align import Alignment
from graphalign.align.edges import Finding
from graphalign.evaluate.aten import base
from graphalign.evaluate.parts import step_words
from graphalign.ir.dataflow import Op
from graphalign.ir.drawing import Arrow, Panel, Vertex
from graphalign.ir.graph import components, met
from graphalign.pictures.judged import Judged, label, title
from graphalign.sites.ends import Ends, layer_of

Key = Hashable
MOST_KERNELS = 3
"""Kernels in which copies of one residual sum are drawn; there can be one in every later layer."""
KINDS = {"gemm": "gemm", "attention": "attention"}


@dataclass
class _Edge:
    sites: dict[str, None] = field(default_factory=dict)
    verdict: str = ""
    via: dict[str, None] = field(default_factory=dict)


@dataclass
class _Side:
    members: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))
    edges: dict[tuple[Key, Key, tuple[str, ...]], _Edge] = field(default_factory=lambda: defaultdict(_Edge))


class Cut:
    """Builds the panel of some findings.

    Args:
        al: the alignment.
        ends: names of training ops.
        judged: all findings.
        group: name of the group; empty for all.
        layer: the layer that the findings' consumers are in.
        findings: the edges to draw.
    """

    def __init__(self, al: Alignment, ends: Ends, judged: Judged, group: str, layer: int | None, findings: list[Finding]) -> None:
        self.al, self.ends, self.judged, self.group, self.layer, self.findings = al, ends, judged, group, layer, findings
        self.t, self.i = al.training, al.inference
        self.left, self.right = _Side(), _Side()
        self.launch = judged.launches(al)
        self.focus: set[int] = set()
        """Training ops that are drawn one by one: the ends of the sites."""
        self.members: set[int] = set()
        """Training ops that are drawn, one by one or folded."""
        self.key_t: dict[int, Key] = {}
        """Training ops to their vertices."""
        self.key_i: dict[int, Key] = {}
        """Inference ops to theirs."""
        self.above: dict[Key, list[Key]] = defaultdict(list)
        """Vertices of the inference side to those that they read."""
        self.sinks: list[tuple[int, int]] = []
        """(anchor or op, slot) that read what is drawn of the training side."""
        self.anchor_edges: list[tuple[int, int]] = []
        """The same of the inference side."""

    def panel(self) -> Panel:
        """The panel."""
        self._choose()
        self._draw_training()
        self._draw_inference()
        self._mark_inference()
        return self._name()

    # -- training -------------------------------------------------------------------------------------------------------

    def _choose(self) -> None:
        regions = self.al.regions
        # how a residual sum comes about is drawn only where a site ends in it
        ends = {f.consumer for f in self.findings} | {f.producer for f in self.findings if f.producer not in regions.sums}
        self.focus = {x for x in ends if self.t.ops[x].kind == "op"}
        if any(f.consumer in self.judged.semantic and self.t.ops[f.consumer].kind == "anchor" for f in self.findings):
            self.focus = set()  # the sides part in the anchor: what it reads is enough
        wanted = {regions.region[x] for x in self.focus - regions.sums if x in regions.region}
        layers = {layer_of(self.t.ops[x].module) for x in self.focus}
        inside = {
            x
            for r in wanted
            for x in self.judged.members(regions, r)
            if x not in regions.sums and x not in regions.tail and layer_of(self.t.ops[x].module) in layers
        }
        self.members = inside | self.focus
        self.key_t = {x: ("op", x) for x in self.focus}
        behind: dict[int, frozenset[int]] = {}
        for x in sorted(self.members):
            mine: set[int] = set()
            near = [r.producer for o in self.t.ops[x].operands for r in o if r.producer in self.members]
            for p in near:
                mine |= behind[p] | ({p} if p in self.focus else set())
            behind[x] = frozenset(mine)
        # Steps with the same sites above them make one vertex: folding any others together could make a cycle.
        rest = self.members - self.focus
        alike = ((a, b) for a, b in self.t.graph.subgraph(rest).edges() if behind[a] == behind[b])
        self.key_t |= {x: ("steps", same[0]) for same in components(rest, alike) for x in same}

    def _training_key(self, x: int) -> Key:
        return self.key_t.get(x, ("edge", x))

    def _draw_training(self) -> None:
        side = self.left
        for x in sorted(self.members):
            side.members[self.key_t[x]].append(x)
            for slot, operand in enumerate(self.t.ops[x].operands):
                for ref in operand:
                    self._training_edge(ref.producer, x, slot, ref.roundings)
            for c, slot in self.t.readers.get(x, ()):
                reader = self.t.ops[c]
                wanted = reader.kind == "anchor" or (reader.kind == "op" and x not in self.al.regions.sums)
                if c not in self.members and wanted:
                    for ref in reader.operands[slot]:
                        if ref.producer == x:
                            self._training_edge(x, c, slot, ref.roundings)
                            self.sinks.append((c, slot))
        for f in self.findings:
            if f.consumer not in self.members:
                self._training_edge(f.producer, f.consumer, f.slot, f.training)
                self.sinks.append((f.consumer, f.slot))
        for tail, head, _ in list(side.edges):
            for key in (tail, head):
                if isinstance(key, tuple) and key[0] == "edge" and not side.members[key]:
                    side.members[key].append(key[1])

    def _training_edge(self, producer: int, consumer: int, slot: int, roundings: tuple[str, ...]) -> None:
        tail, head = self._training_key(producer), self._training_key(consumer)
        if tail == head:
            return
        edge = self.left.edges[tail, head, roundings]
        key = (consumer, slot, producer)
        if key in self.judged.sites:
            edge.sites[self.judged.sites[key]] = None
        else:
            edge.verdict = self.judged.verdict(key) or edge.verdict

    # -- inference ------------------------------------------------------------------------------------------------------

    def _starts(self) -> list[int]:
        matched = dict(self.al.outputs)
        starts = []
        for sink in dict.fromkeys(self.sinks):
            # an operand that holds other values has no match, but its anchor may have one
            known = [matched[sink]] if sink in matched else [(i, sink[1]) for i in self.al.partners.get(sink[0], ())]
            for i, slot in known:
                if slot < len(self.i.ops[i].operands):
                    self.anchor_edges.append((i, slot))
                    starts += [r.producer for r in self.i.ops[i].operands[slot]]
        for f in self.findings:
            kernels: dict[int, None] = {}
            for p in f.paths:
                if self.i.ops[p.consumer].kind == "op":
                    kernels.setdefault(self.launch[p.consumer])
                    if self.launch[p.consumer] in list(kernels)[:MOST_KERNELS]:
                        starts.append(p.consumer)
        return starts

    def _hits(self, i: int) -> frozenset[int]:
        return frozenset(x for x in self.al.reverse.get(i, ()) if x in self.members)

    def _draw_inference(self) -> None:
        def inside(i: int) -> bool:
            return self.i.is_op(i) and (not self.al.reverse.get(i) or bool(self._hits(i)))

        placed = set(self.i.above(self._starts(), inside))
        border = {i for i in placed if not inside(i)}
        reads = {i: placed.difference(border).intersection(self.i.graph.succ[i]) for i in placed}
        for i in sorted(placed, reverse=True):
            self.key_i[i] = self._inference_key(i, i in border, reads[i])
        side = self.right
        for i in sorted(placed):
            side.members[self.key_i[i]].append(i)
            if i not in border:
                for ref in (r for o in self.i.ops[i].operands for r in o):
                    self._inference_edge(ref.producer, self.key_i[i], ref.roundings, ref.via)
        for i, slot in self.anchor_edges:
            key = self.key_i.get(i, ("edge", i))
            if not side.members[key]:
                side.members[key].append(i)
            for ref in self.i.ops[i].operands[slot]:
                self._inference_edge(ref.producer, key, ref.roundings, ref.via)

    def _inference_key(self, i: int, border: bool, readers: set[int]) -> Key:
        op = self.i.ops[i]
        partners = self.al.reverse.get(i, ())
        if border:
            # a table or a sum that the other side draws once is drawn once here, too
            return ("edge", i) if op.kind != "op" else ("border", self.launch[i], frozenset(partners))
        hits = self._hits(i)
        if hits:
            held = frozenset(self.key_t[x] for x in hits)
            return ("held", self.launch[i], held)
        above = {self.key_i[r] for r in readers}
        if len(above) == 1 and all(self.launch.get(r) == self.launch[i] for r in readers) and not self._rounded_into(i, readers):
            return next(iter(above))
        return ("own", self.launch[i], op.target, frozenset(above))

    def _rounded_into(self, i: int, readers: Iterable[int]) -> bool:
        return any(r.producer == i and r.roundings for c in readers for o in self.i.ops[c].operands for r in o)

    def _inference_edge(self, producer: int, head: Key, roundings: tuple[str, ...], via: tuple[str, ...]) -> None:
        tail = self.key_i.get(producer)
        if tail is not None and tail != head:
            self.right.edges[tail, head, roundings].via.update(dict.fromkeys(via))

    def _mark_inference(self) -> None:
        """Number the inference edges that are a site's evidence."""
        readers = {x for _, head, _ in self.left.edges for x in self.left.members[head]}
        leaving: dict[Key, list[tuple[Key, tuple[str, ...], _Edge]]] = defaultdict(list)
        for (a, b, roundings), edge in self.right.edges.items():
            leaving[a].append((b, roundings, edge))
            self.above[b].append(a)
        for key in self.judged.sites_read_by(readers):
            f, site = self.judged.findings[key], self.judged.sites[key]
            if (self._training_key(f.producer), self._training_key(f.consumer), f.training) not in self.left.edges:
                continue
            for p in f.paths:
                head, tail = self.key_i.get(p.consumer), self.key_i.get(p.producer)
                between = self._between(tail, head)
                for b, roundings, edge in leaving.get(tail, ()):
                    if roundings == p.roundings and b in between:
                        edge.sites[site] = None
        for f in self.findings:
            if verdict := self.judged.verdict((f.consumer, f.slot, f.producer)):
                self._mark_entry(f, verdict)

    def _between(self, tail: Key | None, head: Key | None) -> set[Key]:
        """The reader and the vertices of the inference side only that lead to it."""
        if tail is None or head is None:
            return set()

        def own(at: Key) -> list[Key]:
            return [a for a in self.above.get(at, ()) if isinstance(a, tuple) and a[0] == "own"]

        return set(met([head], own, len(self.above)))

    def _mark_entry(self, f: Finding, verdict: str) -> None:
        """The inference edges that an edge that is no site was compared with."""
        wanted = [(self.key_i.get(p.consumer, ("edge", p.consumer)), self.key_i.get(p.producer), p.roundings) for p in f.paths]
        for (a, b, roundings), edge in self.right.edges.items():
            if any(a == tail and roundings == found and b in self._between(tail, head) for head, tail, found in wanted):
                edge.verdict = verdict
        if not wanted and self.t.ops[f.consumer].kind == "anchor":
            anchors = {self.key_i.get(i, ("edge", i)) for i in self.al.partners.get(f.consumer, ())}
            for (_, b, _), edge in self.right.edges.items():
                if b in anchors:
                    edge.verdict = verdict

    # -- names ----------------------------------------------------------------------------------------------------------

    def _name(self) -> Panel:
        regions: dict[int, list[int]] = defaultdict(list)
        for x in sorted(self.members - self.al.regions.sums):
            regions[self.al.regions.region[x]].append(x)
        boxes = {r: n for n, r in enumerate(sorted(regions, key=lambda r: regions[r][0]))}
        titles = tuple(title([self.t.ops[x] for x in regions[r]]) for r in boxes)
        ids_t = {k: f"t{n}" for n, k in enumerate(_order(self.left), 1)}
        ids_i = {k: f"i{n}" for n, k in enumerate(_order(self.right), 1)}
        held: dict[Key, set[str]] = defaultdict(set)
        holds: dict[Key, set[str]] = defaultdict(set)
        at = {i: k for k, xs in self.right.members.items() for i in xs}
        for k, xs in self.left.members.items():
            for x in xs:
                for i in self.al.partners.get(x, ()):
                    if i in at:
                        held[k].add(ids_i[at[i]])
                        holds[at[i]].add(ids_t[k])
        left = [self._training_vertex(ids_t[k], k, boxes, held[k]) for k in ids_t]
        labels = {v.id: v.label for v in left}
        right = [self._inference_vertex(ids_i[k], k, boxes, holds[k], labels) for k in ids_i]
        arrows = [
            Arrow(tail=ids[a], head=ids[b], roundings=r, sites=tuple(e.sites), verdict=e.verdict, via=tuple(e.via)[:4])
            for side, ids in ((self.left, ids_t), (self.right, ids_i))
            for (a, b, r), e in side.edges.items()
        ]
        layers = () if self.layer is None else (self.layer,)
        return Panel(group=self.group, layer=self.layer, layers=layers, boxes=titles, vertices=(*left, *right), arrows=tuple(arrows))

    def _training_vertex(self, name: str, key: Key, boxes: dict[int, int], partners: set[str]) -> Vertex:
        ops = [self.t.ops[x] for x in self.left.members[key]]
        op = ops[0]
        source = self.ends.source(op)
        inside = op.id in self.members and op.id not in self.al.regions.sums
        chain = " → ".join(dict.fromkeys(base(o.target) for o in ops)) if op.kind == "op" else op.kind
        steps = isinstance(key, tuple) and key[0] == "steps" and len(ops) > 1
        kind = "steps" if steps else self._kind(op)
        words = chain if steps else label(op, " ".join(source.text.split()) if source else "")
        if (made := op.detail.get("step")) is not None and not steps:
            words = step_words(made.name, words)
        return Vertex.model_validate(
            {
                "id": name,
                "kind": kind,
                "label": words,
                "op": chain,
                "module": op.module or (op.target if op.kind == "parameter" else ""),
                "place": f"{source.file}:{source.line}" if source else "",
                "source": source.text if source else "",
                "box": boxes[self.al.regions.region[op.id]] if inside else None,
                "count": 1,
                "names": tuple(o.name for o in ops[:8]),
                "partners": tuple(sorted(partners, key=lambda p: int(p[1:]))),
            }
        )

    def _kind(self, op: Op) -> str:
        if op.id in self.al.regions.sums and op is self.t.ops[op.id]:
            return "sum"
        return KINDS.get(op.target, "anchor") if op.kind in ("anchor", "output") else op.kind

    def _inference_vertex(self, name: str, key: Key, boxes: dict[int, int], partners: set[str], labels: dict[str, str]) -> Vertex:
        ops = [self.i.ops[i] for i in self.right.members[key]]
        holders = [o for o in ops if self.al.reverse.get(o.id)] or ops
        op = holders[0]
        hits = sorted({x for o in ops for x in self._hits(o.id)})
        box = next((boxes[self.al.regions.region[x]] for x in hits if x not in self.al.regions.sums), None)
        kind = self._kind(op) if op.kind != "op" else "op"
        if op.kind == "op" and any(x in self.al.regions.sums for o in ops for x in self.al.reverse.get(o.id, ())):
            kind = "sum"
        steps = kind == "op" and any(isinstance(k := self.key_t[x], tuple) and k[0] == "steps" for x in hits) and len(hits) > 1
        place, _, text = (op.source if isinstance(op.source, str) else "").partition("  ")
        own = {o.id for o in ops}
        inner = any(r.producer in own for o in ops for operand in o.operands for r in operand)
        chain = (" → " if inner else " / ").join(dict.fromkeys(o.target.removeprefix("reduction.") for o in ops))
        chain = chain if op.kind == "op" else op.kind
        border = isinstance(key, tuple) and key[0] == "border"
        known = [labels[p] for p in sorted(partners, key=lambda p: int(p[1:]))]
        words = label(op, "") if op.kind != "op" else (known[0] if known and not steps else "")
        return Vertex.model_validate(
            {
                "id": name,
                "kind": "steps" if steps else kind,
                "label": words,
                "op": chain,
                "module": op.module,
                "place": place,
                "source": text,
                "box": box,
                "kernel": op.where if op.kind == "op" and not border else "",
                "launch": self.launch[op.id] if op.kind == "op" else 0,
                "count": 1 if border else len(ops) if steps else len(holders),
                "names": tuple(o.name for o in ops[:8]),
                "partners": tuple(sorted(partners, key=lambda p: int(p[1:]))),
            }
        )


def _order(side: _Side) -> list[Key]:
    """Vertices in execution order, but what nothing leads to right before its first reader: the same in every layer of a kind."""
    heads = {b for _, b, _ in side.edges}
    before: dict[Key, list[Key]] = defaultdict(list)
    for a, b, _ in side.edges:
        if a not in heads:
            before[b].append(a)
    out: dict[Key, None] = {}
    for key in sorted(heads, key=lambda k: side.members[k][0]):
        out.update(dict.fromkeys((*before[key], key)))
    return list(out)
