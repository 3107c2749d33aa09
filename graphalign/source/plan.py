"""Chooses the casts of the generated file: which expression gets which, in which layers.

An op that must compute in FP32 gets an upcast operand where none arrives in FP32. A cast that an unrounded path crosses goes. Every
path to a rounded read is cut at its earliest expression behind which nobody reads the value unrounded: in any layer if there is one,
else in the layers where that holds. Whether the choice is right is for `verify` to say.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import networkx as nx

from graphalign.errors import PatchError
from graphalign.ir.paths import layer_of
from graphalign.source.flow import Flow, Read
from graphalign.source.spans import Spans, place
from graphalign.source.watch import Op, Seen

PROMOTES = frozenset({"add", "sub", "mul", "div", "rsub", "cat", "where", "maximum", "minimum"})
"""ATen ops for which one FP32 operand (of at least one dimension) is enough."""
Layers = frozenset[int | None]


@dataclass
class Change:
    """What one expression gets. Layers: where; None for all that run it."""

    up: bool = False
    down: bool = False
    uncast: bool = False
    literal: bool = False
    """It is read for its dtype, which is no longer the one that was meant."""
    up_in: Layers | None = None
    down_in: Layers | None = None
    down_at: frozenset[str] | None = None
    """Modules: for a function that does not know its layer's number, and is told by its callers."""
    uncast_in: Layers | None = None
    norm: bool = False
    """It calls a `nn.LayerNorm`, which computes in FP32."""
    norm_in: Layers | None = None
    apart: bool = False
    """That one's mean reads the input as it is, its other steps read it rounded."""
    apart_in: Layers | None = None
    shared: bool = False
    """Its rounded value is read elsewhere too: all read one tensor, as under `apply`, so that gradients add up in its format."""
    wide: bool = False
    """With `shared`: the readers share what is FP32 in the stock model too."""
    serves: set[str] = field(default_factory=set)
    """Ids of the sites that it is for."""
    ops: set[int] = field(default_factory=set)
    """Ops that compute in FP32, or whose result stays so, because of it."""


PARTS = ("up", "down", "uncast", "literal", "norm", "apart")


def parts(change: Change) -> list[str]:
    """What a change consists of."""
    return [p for p in PARTS if getattr(change, p)]


class Planner:
    """Chooses the changes of one trace.

    Args:
        flow: the trace's.
        spans: the file's.
        knows_layer: whether the function that a span is in can tell its layer's number.
        early: cut where a value is made if a condition on the layer allows it, rather than at several readers without a condition.
    """

    def __init__(self, flow: Flow, spans: Spans, knows_layer: Callable[[int], bool], *, early: bool = False) -> None:
        self.flow, self.spans, self.knows_layer, self.early = flow, spans, knows_layer, early
        self.changes: dict[int, Change] = defaultdict(Change)
        self.lifted = nx.DiGraph()
        """From an op to those that compute in FP32 because its result is FP32."""
        self.cut: set[int] = set()
        """Casts of the stock file that stay: events."""
        self.ends: dict[int, list[int]] = defaultdict(list)
        for i, e in enumerate(flow.events):
            if isinstance(e, Seen):
                self.ends[e.span].append(i)

    def run(self) -> dict[int, Change]:
        """The changes, by span.

        Raises:
            PatchError: two demands meet in one expression and no condition on the layer parts them; names it and its line.
        """
        self._existing_casts()
        self._idle_casts()
        self._upcasts()
        self._cuts()
        self._dtype_reads()
        self._round_edits()
        self._share()
        for c in self.changes.values():
            c.serves |= self._served(c.ops)
        return {k: c for k, c in self.changes.items() if c.up or c.down or c.uncast or c.literal or c.norm}

    # -- casts of the stock file ------------------------------------------------------------------------------------------

    def _existing_casts(self) -> None:
        casts: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for i, e in self.flow.ops.items():
            if self.flow.rounds(i) and e.here:
                j = next((j for j in self.flow.seen[e.outs[0]] if j > i), None)
                if j is not None:
                    casts[self._span(j)].append((i, j))
        for span, found in casts.items():
            hot = [(i, j) for i, j in found if self.flow.read_unrounded(self._value(j), j)]
            if not hot:
                self.cut |= {i for i, _ in found}
                continue
            roots = {r for i, _ in found for r in self.flow.roots_of(self.flow.ops[i].ins[0])}
            self.changes[span].uncast = True
            self.changes[span].ops |= roots
            self.flow.add_roots(roots)

    def _idle_casts(self) -> None:
        """Casts that do nothing in the stock model, `x.to(self.weight.dtype)`, and would round what is FP32 in the generated code."""
        widened = self.flow.widened()
        for span, events in self.flow.evaluations.items():
            node = self.spans.nodes[span]
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to"):
                continue
            given = [*node.args, *(k.value for k in node.keywords)]
            if len(given) != 1 or not ast.unparse(given[0]).endswith(".dtype") or self.changes[span].uncast:
                continue
            inner = self.spans.by_place.get(place(node.func.value), -1)
            before = {self._value(j) for j in self.flow.evaluations[inner]}
            hot = [j for j in events if self._value(j) in before and widened.get(self._value(j)) and self._unrounded_inside(span, j)]
            if hot:
                self.changes[span].uncast = True
                self.changes[span].ops |= {r for j in hot for r in widened[self._value(j)]}

    def _unrounded_inside(self, span: int, j: int) -> bool:
        """Whether what is called with a cast's result reads it unrounded."""
        call = self.spans.call_around(span)
        end = self._end(call, j) if call is not None else -1
        return self.flow.low(self._value(j)) and self.flow.read_unrounded(self._value(j), j, end if end > 0 else None)

    # -- ops that compute in FP32 -----------------------------------------------------------------------------------------

    def _upcasts(self) -> None:
        alike: dict[tuple[str, str, int | None], list[int]] = defaultdict(list)
        for i, e in self.flow.ops.items():
            if not e.transparent and e.outs:
                alike[e.function, e.op, self._span_doing(i)].append(i)
        for i in sorted(self.flow.wide):
            e = self.flow.ops[i]
            others = alike[e.function, e.op, self._span_doing(i)]
            narrow = [k for k in others if k not in self.flow.wide and self.flow.low(self.flow.ops[k].outs[0])]
            where = self._layers_apart([i, *(k for k in others if k in self.flow.wide)], narrow, i) if narrow else None
            if e.op == "native_layer_norm" and e.module in self.flow.norms:
                self._norm(i, where)
                continue
            arrives = [self._arrives_wide((i, s)) and self.flow.dims[u] > 0 for s, u in enumerate(e.ins)]
            if e.op in PROMOTES and any(arrives):
                wide = (r for s, u in enumerate(e.ins) if arrives[s] for r in self.flow.roots_of(u) if r in self.flow.roots)
                self.lifted.add_edges_from((r, i) for r in wide)
                continue
            low = [s for s, u in enumerate(e.ins) if self.flow.low(u) and not arrives[s]]
            for s in low[:1] if e.op in PROMOTES else low:
                span = self._operand_span((i, s))
                if span is None:
                    raise PatchError(
                        f"{e.op} in {e.function} must compute in FP32, and no expression of this file yields its operand {s}",
                        where=f"{e.module}", hint="the op runs inside a function of another file: `graphalign.apply` patches it",
                    )  # fmt: skip
                c = self.changes[span]
                c.up = True
                if where is not None:
                    c.up_in = where
                c.ops.add(i)

    def _norm(self, i: int, where: Layers | None) -> None:
        """The call of a `nn.LayerNorm` goes through a function that computes in FP32."""
        span = self._span_doing(i)
        node = self.spans.nodes[span] if span is not None else None
        if span is None or not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
            raise PatchError(
                f"native_layer_norm must compute in FP32 in {self.flow.ops[i].module}, and is not called with its input alone",
                where=self.spans.show(span) if span is not None else self.flow.ops[i].text, hint="use `graphalign.apply`",
            )  # fmt: skip
        c = self.changes[span]
        c.norm, c.norm_in = True, where
        c.ops.add(i)
        if i in self.flow.apart:
            layers = {layer_of(self.flow.ops[k].module) for k in self.flow.apart if self._span_doing(k) == span}
            every = {self._layer(j) for j in self.flow.evaluations[span]}
            c.apart, c.apart_in = True, None if layers == every else frozenset(layers)

    def _layers_apart(self, yes: list[int], no: list[int], at: int) -> Layers:
        """The layers of some ops, if no other op lies in one of them."""
        a = frozenset(layer_of(self.flow.ops[i].module) for i in yes)
        b = frozenset(layer_of(self.flow.ops[i].module) for i in no)
        if a & b or None in a | b:
            e, other = self.flow.ops[at], self.flow.ops[no[0]]
            span = self._span_doing(at)
            raise PatchError(
                f"one expression must compute in FP32 in {e.module} and not in {other.module}",
                where=self.spans.show(span) if span is not None else e.text,
                hint="use `graphalign.apply`, which tells places apart, or leave a group out: `graphalign patch --except GROUP`",
            )
        return a

    def _arrives_wide(self, read: tuple[int, int]) -> bool:
        u = self.flow.operand(read)
        return not self.flow.low(u) or (read in self.flow.unrounded and bool(self.flow.roots_of(u) & self.flow.roots))

    # -- cutting paths to rounded reads -----------------------------------------------------------------------------------

    def _cuts(self) -> None:
        widened = self.flow.widened()
        for u in sorted(widened):
            for read in self.flow.readers[u]:
                if self.flow.needs_rounded(read):
                    for root in sorted(widened[u]):
                        self._cut(root, u, read)

    def _cut(self, root: int, u: int, read: tuple[int, int]) -> None:
        path, crossed = self._path(root, u)
        stays_wide = not self.flow.low(self.flow.ops[root].outs[0]) and not any(self.flow.low(v) for v in path)
        if crossed or stays_wide:
            return
        reader = read[0]
        found = self._candidates(path, reader)
        # a cut that is there already
        for j, span, kind in found:
            c = self.changes.get(span)
            if c is None or not c.down or not self._safe(span, kind, self._in_module(self._module(j))):
                continue
            if j in self._rounding(span):
                return
        usable = [(j, s, k) for j, s, k in found if not self.changes[s].uncast]
        for one in [[x] for x in usable] if self.early else [usable]:
            if self._cut_all(one, root) or self._cut_layers(one, root):
                return
        for j, span, kind in usable:
            modules = {self._module(k) for k in self.flow.evaluations[span]}
            safe = frozenset(m for m in modules if self._safe(span, kind, self._in_module(m)))
            if self._module(j) in safe and self.spans.functions[span].endswith(".forward") and "" not in safe:
                narrow = {self._module(k) for k in self.flow.evaluations[span] if self._low_anyway(k)}
                self._down(span, None, root, at=safe & (narrow | {self._module(j)}))
                return
        e = self.flow.ops[reader]
        last = found[-1][1] if found else None
        raise PatchError(
            f"{e.op} in {e.function} reads rounded what other reads take unrounded, and no expression on the way is free of them",
            where=(self.spans.show(last) if last is not None else f"{e.op} in {e.function}") + f"; in {e.module}",
            hint="use `graphalign.apply`, which tells places apart, or leave a group out: `graphalign patch --except GROUP`",
        )

    def _cut_all(self, found: list[tuple[int, int, str]], root: int) -> bool:
        """Round at the first expression that may be rounded in every layer."""
        for _, span, kind in found:
            if self._safe(span, kind, None):
                self._down(span, None, root)
                return True
        return False

    def _cut_layers(self, found: list[tuple[int, int, str]], root: int) -> bool:
        """Round at the first expression that may be rounded in its layer, and can tell its number."""
        for j, span, kind in found:
            layer = self._layer(j)
            if layer is None or not self.knows_layer(span) or not self._safe(span, kind, self._in_layer(layer)):
                continue
            layers = {self._layer(k) for k in self.flow.evaluations[span]}
            low = {self._layer(k) for k in self.flow.evaluations[span] if self._low_anyway(k)}
            needed = frozenset(x for x in layers if x == layer or (x in low and self._safe(span, kind, self._in_layer(x))))
            self._down(span, needed, root)
            return True
        return False

    def _low_anyway(self, j: int) -> bool:
        """Whether an evaluation yields the low format in the generated code too: the other branch of a condition would widen it."""
        return self.flow.low(self._value(j)) and not self.flow.widened().get(self._value(j))

    def _in_module(self, module: str) -> Callable[[int], bool]:
        return lambda k: self._module(k) == module

    def _in_layer(self, layer: int | None) -> Callable[[int], bool]:
        return lambda k: self._layer(k) == layer

    def _served(self, ops: set[int]) -> set[str]:
        """The sites of some ops, and of those that compute in FP32 because these do."""
        reached = {x for i in ops if i in self.lifted for x in nx.descendants(self.lifted, i)}
        return {site for i in ops | reached for site in self.flow.served(i)}

    def _down(self, span: int, layers: Layers | None, root: int, at: frozenset[str] | None = None) -> None:
        c = self.changes[span]
        c.ops.add(root)
        if c.down and c.down_in is None and c.down_at is None:
            return
        if at is not None:
            c.down_at = at | (c.down_at or frozenset())
        c.down_in = None if layers is None else layers | (c.down_in or frozenset())
        c.down = True

    def _path(self, root: int, u: int) -> tuple[list[int], bool]:
        """Values from a root's result to `u`, and whether a cast that stays lies between. Cut short at a join of two widened values."""
        path, crossed, v = [u], False, u
        widened = self.flow.widened()
        while (m := self.flow.maker.get(v)) is not None and m != root and self.flow.ops[m].transparent:
            crossed |= m in self.cut
            back = [x for x in self.flow.ops[m].ins if root in widened.get(x, ())]
            if len(set(back)) > 1:
                break
            v = back[0] if back else self.flow.ops[m].ins[0]
            path.insert(0, v)
        return path, crossed

    def _candidates(self, path: list[int], reader: int) -> list[tuple[int, int, str]]:
        """Evaluations where the value may be rounded, in order: (event, span, kind)."""
        last = max((j for v in path for j in self.flow.seen[v] if j < reader and not self._about(j)), default=-1)
        out = []
        for v in path:
            for n, j in enumerate(k for k in self.flow.seen[v] if k < reader and not self._about(k)):
                span = self._span(j)
                call = isinstance(self.spans.nodes[span], ast.Call)
                if n == 0 or call:
                    out.append((j, span, ""))
                elif (reads := self._reads_of_variable(span, j)) is not None and reader in {i for i, _ in reads}:
                    out.append((j, span, "variable"))
                elif j == last:
                    out.append((j, span, "last"))
                elif (c := self.spans.call_around(span)) is not None and j < reader < self._end(c, j):
                    out.append((j, span, "argument"))
                elif self._doing(span, j) == reader:
                    out.append((j, span, "operand"))
        return sorted(out)

    def _end(self, call: int, after: int) -> int:
        return next((k for k in self.ends[call] if k > after), -1)

    def _safe(self, span: int, kind: str, where: Callable[[int], bool] | None) -> bool:
        """Whether rounding an expression's value changes no unrounded read, over all its evaluations, or some."""
        events = [j for j in self.flow.evaluations[span] if where is None or where(j)]
        if kind == "argument":
            call = self.spans.call_around(span)
            return call is not None and not any(
                (end := self._end(call, j)) < 0 or self.flow.read_unrounded(self._value(j), j, end) for j in events
            )
        if kind == "variable":
            return all((reads := self._reads_of_variable(span, j)) is not None and not reads & self.flow.unrounded for j in events)
        if kind == "operand":
            return not any(self._operand_unrounded(span, j) for j in events)
        if kind == "last":
            return not any(self._next_read_unrounded(j) for j in events)
        return not any(self.flow.read_unrounded(self._value(j), j) for j in events)

    def _reads_of_variable(self, span: int, j: int) -> set[Read] | None:
        """What reads the value by the name that it gets here, `residual = hidden_states`; None if that is not known.

        Rounded here, before its other readers, its gradient is added up last: as under `apply`, which rounds values where they are made.
        """
        p = self.spans.parent(span)
        if not (isinstance(p, ast.Assign) and len(p.targets) == 1 and isinstance(target := p.targets[0], ast.Name)):
            return None
        out: set[Read] = set()
        for k in self.flow.seen[self._value(j)]:
            node, at = self.spans.nodes[self._span(k)], self._span(k)
            if k < j or not (isinstance(node, ast.Name) and node.id == target.id):
                continue
            if self._module(k) != self._module(j) or self.spans.functions[at] != self.spans.functions[span] or self._about(k):
                continue
            if (op := self._doing(at, k)) is not None:
                out |= {(op, s) for s, x in enumerate(self.flow.ops[op].ins) if x == self._value(j)}
            elif (call := self.spans.call_around(at)) is not None and (end := self._end(call, k)) > 0:
                out |= {r for r in self.flow.below(self._value(j), k) if r[0] < end}
            else:
                return None
        return out

    def _doing(self, span: int, j: int) -> int | None:
        """The op of the sum or product whose operand an expression is."""
        p = self.spans.parent(span)
        around = self.spans.by_place.get(place(p)) if isinstance(p, ast.BinOp) else None
        end = self._end(around, j) if around is not None else -1
        return self.flow.maker.get(self._value(end)) if end > 0 else None

    def _operand_unrounded(self, span: int, j: int) -> bool:
        """Whether the sum or product around an evaluation reads it unrounded."""
        made = self._doing(span, j)
        return made is None or any((made, s) in self.flow.unrounded for s, x in enumerate(self.flow.ops[made].ins) if x == self._value(j))

    def _next_read_unrounded(self, j: int) -> bool:
        u = self._value(j)
        onward = {i for i, _ in self.flow.onward[u]}
        following = min((i for i, _ in (*self.flow.readers[u], *self.flow.onward[u]) if i > j), default=None)
        if following is None:
            return False
        if following in onward:
            return any(self.flow.read_unrounded(v, following) for v in self.flow.ops[following].outs)
        return any((following, s) in self.flow.unrounded for s, x in enumerate(self.flow.ops[following].ins) if x == u)

    # -- the rest ---------------------------------------------------------------------------------------------------------

    def _dtype_reads(self) -> None:
        """`x.dtype` of a value that is FP32 now and was not."""
        widened = self.flow.widened()
        for span, events in self.flow.evaluations.items():
            if self.spans.read_for(span) != "dtype":
                continue
            call = self.spans.taken_as(span)
            if call is not None and self.changes[self.spans.by_place[place(call)]].uncast:
                continue  # the whole cast goes
            hot = [j for j in events if widened.get(self._value(j)) and self.flow.low(self._value(j))]
            if any(not self.rounded_before(j) for j in hot):
                self.changes[span].literal = True
                self.changes[span].ops |= {r for j in hot for r in widened[self._value(j)]}

    def rounded_before(self, i: int) -> bool:
        """Whether the value of an evaluation was rounded on its way there, in the generated code."""
        chain = self.flow.chain(self._value(i))
        for v in chain:
            if self.flow.maker.get(v) in self.cut:
                return True
            for j in self.flow.seen[v]:
                c = self.changes.get(self._span(j))
                first = isinstance(self.spans.nodes[self._span(j)], ast.Call) or j == self.flow.seen[v][0]
                if j < i and c is not None and c.down and c.down_in is None and c.down_at is None and first:
                    return True
        return False

    def _round_edits(self) -> None:
        for read in sorted(self.flow.rounded):
            span = self._operand_span(read)
            if span is None:
                e = self.flow.ops[read[0]]
                raise PatchError(
                    f"operand {read[1]} of {e.op} in {e.function} must be rounded, and no expression of this file yields it", where=e.module
                )
            c = self.changes[span]
            c.down = True
            c.serves |= {self.flow.sites[read]} - {""}
            if not self.flow.low(self.flow.operand(read)):
                c.up = True

    def _share(self) -> None:
        """Mark the casts that round one value in several places."""
        self._before_views()
        same: dict[int, set[int]] = defaultdict(set)
        for span, c in self.changes.items():
            for j in self._rounding(span) if c.down else ():
                same[self._value(j)].add(span)
        for spans in self._rounded_in().values():
            if len(spans) > 1:
                for span in spans - {-1}:
                    self.changes[span].shared = True
        for value, spans in same.items():
            if len(spans) > 1 and not self.flow.low(value):
                for span in spans:
                    self.changes[span].wide = True

    def _rounding(self, span: int) -> list[int]:
        """The evaluations of an expression that its cast rounds."""
        c = self.changes[span]
        found = self.flow.evaluations[span]
        return [
            j for j in found if (c.down_in is None or self._layer(j) in c.down_in) and (c.down_at is None or self._module(j) in c.down_at)
        ]

    def _rounded_in(self) -> dict[int, set[int]]:
        """Value to the expressions that round it; -1: a LayerNorm that rounds its input itself."""
        out: dict[int, set[int]] = defaultdict(set)
        for span in [s for s, c in self.changes.items() if c.down]:
            for j in self._rounding(span):
                out[self.flow.uncast(self._value(j), self.cut)].add(span)
        for i in self.flow.apart:
            out[self.flow.uncast(self.flow.operand((i, 0)), self.cut)].add(-1)
        return out

    def _before_views(self) -> None:
        """`x.view(…)` is rounded before the view if others round `x` itself: else they would not share one tensor."""
        rounded = self._rounded_in()
        for span, c in list(self.changes.items()):
            node = self.spans.nodes[span]
            if parts(c) != ["down"] or not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = self.spans.by_place.get(place(node.func.value))
            if owner is None or owner in self.changes:
                continue
            pairs = [(j, max((k for k in self.flow.evaluations[owner] if k < j), default=-1)) for j in self._rounding(span)]
            if any(k < 0 or (m := self.flow.maker.get(self._value(j))) is None or not self.flow.ops[m].transparent for j, k in pairs):
                continue
            if any(rounded.get(self.flow.uncast(self._value(k), self.cut), set()) - {span} for _, k in pairs):
                self.changes[owner] = c
                del self.changes[span]

    # -- events -----------------------------------------------------------------------------------------------------------

    def _event(self, j: int) -> Seen:
        e = self.flow.events[j]
        assert isinstance(e, Seen)
        return e

    def _span(self, j: int) -> int:
        return self._event(j).span

    def _value(self, j: int) -> int:
        return self._event(j).value

    def _module(self, j: int) -> str:
        return self._event(j).module

    def _layer(self, j: int) -> int | None:
        return layer_of(self._event(j).module)

    def _span_doing(self, i: int) -> int | None:
        e: Op = self.flow.ops[i]
        return next((self._span(j) for u in e.outs[:1] for j in self.flow.seen[u] if j > i), None)

    def _operand_span(self, read: tuple[int, int]) -> int | None:
        """The expression that yields an operand: the last one before the op."""
        seen = reversed(self.flow.seen[self.flow.operand(read)])
        return next((self._span(j) for j in seen if j < read[0] and not self._about(j)), None)

    def _about(self, j: int) -> bool:
        """Whether an expression is read for what the tensor is like, not for its elements."""
        return self.spans.read_for(self._span(j)) in ("dtype", "device", "shape", "ndim")
