"""From a patch and the live stock model to the generated file and its diff."""

from __future__ import annotations

import copy
import difflib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from graphalign.errors import PatchError
from graphalign.patch.spec import PatchSpec, digest, dump
from graphalign.source.emit import Emitter
from graphalign.source.flow import Flow
from graphalign.source.frame import footer, header, helpers
from graphalign.source.guard import find_guards, wide_inputs
from graphalign.source.plan import Change, Planner, parts
from graphalign.source.spans import Spans
from graphalign.source.stock import Stock, load_module, read_stock, restore, swap_classes
from graphalign.source.watch import Seen, watch


@dataclass
class Generated:
    """A modeling file with the patch in it. Not verified yet; see `verify`."""

    stock: Stock
    spec: PatchSpec
    body: str
    """The stock text with the changes."""
    text: str
    """The whole file: header, body, and what puts it to use."""
    helpers: str
    """The part of `text` with the functions that changed lines call."""
    changes: Mapping[int, Change]
    spans: Spans
    emitter: Emitter
    flow: Flow

    @property
    def diff(self) -> str:
        """Unified diff of the stock text (with absolute imports, without hub-kernel decorators) and the changed one."""
        name = self.stock.file
        lines = difflib.unified_diff(
            self.stock.text.splitlines(), self.body.splitlines(), f"a/{name}", f"b/{name}", lineterm="", n=3
        )  # fmt: skip
        return "\n".join(lines) + "\n"

    @property
    def changed_lines(self) -> int:
        """Lines that the diff adds."""
        return sum(x.startswith("+") and not x.startswith("+++") for x in self.diff.splitlines())

    def load(self, name: str = "graphalign_generated") -> dict[str, object]:
        """The generated module's globals."""
        return load_module(name, f"{name}.py", compile(self.text, f"{name}.py", "exec", dont_inherit=True))

    def without(self, span: int, part: str) -> Generated:
        """The same file without one part of one change, and without the lines that would notice it by themselves."""
        left = {s: _less(c, part) if s == span else c for s, c in self.changes.items()}
        emitter = Emitter(self.spans, self.emitter.low.removeprefix("torch."), self.emitter.model, self.emitter.modules)
        return _assemble(self.stock, self.spec, self.spans, {s: c for s, c in left.items() if c is not None}, emitter, self.flow)

    def guarded(self) -> Generated:
        """The same file with the lines that check layers' inputs.

        Raises:
            PatchError: it does not run.
        """
        return _guarded(self)


def _less(change: Change, part: str) -> Change | None:
    left = copy.copy(change)
    setattr(left, part, False)
    return left if parts(left) else None


def refuse_regime(spec: PatchSpec) -> None:
    """Raises PatchError for a patch that no source can carry, whatever the model's."""
    if spec.regime.get("autocast"):
        raise PatchError(
            "the regime has autocast, whose casts are in no expression of a modeling file",
            where=f"autocast {spec.regime['autocast']}", hint="use `graphalign.apply`, or train with parameters in the low format",
        )  # fmt: skip
    if not spec.edges:
        raise PatchError("the patch has no edits; the stock file is the aligned one")


def generate(model: nn.Module, spec: PatchSpec, *, early: bool = False) -> Generated:
    """Write the patch into the model's modeling file.

    Args:
        model: the stock model of the spec's regime, with real or random weights, in eval mode; it stays as it is.
        spec: the patch.
        early: round where values are made, under more conditions on the layer, rather than where they are read.

    Raises:
        PatchError: the source cannot carry the patch: names the expression and its line.
    """
    refuse_regime(spec)
    stock = read_stock(model)
    formats = sorted({e.format for g in spec.groups for e in g.edits})
    if len(formats) != 1:
        raise PatchError(f"the patch has edits of several formats: {', '.join(formats)}", hint="use `graphalign.apply`")
    spans = Spans(stock.text)
    trace = watch(model, stock, spans)
    flow = Flow(trace, spec)
    modules: dict[int, set[str]] = defaultdict(set)
    for e in trace.events:
        if isinstance(e, Seen) and e.value >= 0:
            modules[e.span].add(e.module)
    emitter = Emitter(spans, formats[0], model, modules)
    planner = Planner(flow, spans, emitter.knows_layer, early=early)
    changes = planner.run()
    return _guarded(_assemble(stock, spec, spans, changes, emitter, flow))


def _guarded(made: Generated) -> Generated:
    """With the lines that check layers' inputs, see `guard`."""
    emitter = made.emitter
    swapped = swap_classes(emitter.model, made.stock.module, made.load())
    try:
        inputs = wide_inputs(emitter.model)
    except Exception as e:  # whatever the generated code raises
        raise PatchError(f"the generated file does not run: {type(e).__name__}: {e}", hint="use `graphalign.apply`") from e
    finally:
        restore(swapped)
    found = find_guards(made.flow, made.spans, inputs)
    emitter.guards = {s: g for s, g in found.items() if g[0] == g[1] or emitter.knows_layer(s)}
    return _assemble(made.stock, made.spec, made.spans, made.changes, emitter, made.flow)


def _assemble(stock: Stock, spec: PatchSpec, spans: Spans, changes: Mapping[int, Change], emitter: Emitter, flow: Flow) -> Generated:
    body = emitter.write(changes)
    needed = helpers(
        guarded=bool(emitter.guards),
        once=emitter.low.removeprefix("torch.") if emitter.once else "",
        norm=emitter.norm,
        apart=emitter.apart,
    )
    text = header(stock, spec, digest(dump(spec).encode())) + body.rstrip("\n") + "\n" + footer(stock, emitter.model, needed)
    return Generated(stock, spec, body, text, needed, changes, spans, emitter, flow)
