"""The rewriter pass: changes where a Dynamo graph rounds, and nothing else.

A value that some consumer must read unrounded is computed in FP32 and carried in FP32 through casts and views to exactly
those consumers; everybody else reads it rounded, as before. Rounding commutes with layout ops and sign changes, so the
result is the same wherever on the way it is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from graphalign.errors import PatchError
from graphalign.evaluate.aten import ATTENTIONS, MATMULS
from graphalign.evaluate.parts import SEPARATOR
from graphalign.patch.spec import Key
from graphalign.rewrite.analyse import Info, OpKey, analyse, carried_operands, is_anchor, is_low, tensor_operands
from graphalign.rewrite.attention import OP
from graphalign.rewrite.autocast import refuse_other_numbers
from graphalign.rewrite.inplace import out_of_place, writes
from graphalign.rewrite.parts import replace_by_steps
from graphalign.rewrite.units import UnitEdit

ENTRY = "graphalign_entry"
"""Metadata mark of the cast that narrows a value which another unit left unrounded."""
_PROMOTES = frozenset({"add", "sub", "mul", "div", "rsub", "cat", "where", "maximum", "minimum", "addcmul", "lerp"})
"""ATen ops that promote mixed operands: one FP32 operand is enough."""


@dataclass
class Rewritten:
    """What was done to a graph."""

    done: list[UnitEdit] = field(default_factory=list)
    missing: list[UnitEdit] = field(default_factory=list)
    """Edits whose ops are not in this graph (another graph of the same forward may have them)."""
    near: dict[int, str] = field(default_factory=dict)
    """By id of a missing edit: the ops of this graph that come nearest."""
    unrounded: list[int] = field(default_factory=list)
    """Positions of results that leave unrounded, in place of the rounded ones."""
    beside: list[tuple[int, frozenset[str]]] = field(default_factory=list)
    """For each result that was added at the graph's end: the position of the rounded one, and the sources of its value."""


def rewrite(gm: fx.GraphModule, unit: nn.Module, edits: Sequence[UnitEdit], autocast: str | None = None) -> Rewritten:
    """Apply a unit's edits to its Dynamo graph, in place. All are resolved before anything changes.

    Args:
        gm: the graph, see `analyse`.
        unit: the module whose forward was traced.
        edits: of the unit.
        autocast: the device type for which autocast is on although the patch is for none, see `refuse_other_numbers`.

    Raises:
        PatchError: an edit is ambiguous, two overlap, its producer is another op than the spec says, or the op cannot be edited.
    """
    rewriter = _Rewriter(gm, unit, edits)
    if autocast is not None:
        refuse_other_numbers(gm, rewriter.info, autocast)
    return rewriter.run()


class _Rewriter:
    def __init__(self, gm: fx.GraphModule, unit: nn.Module, edits: Sequence[UnitEdit]) -> None:
        self.gm, self.edits = gm, edits
        self.info = analyse(gm, unit)
        self.by_key: dict[OpKey, fx.Node] = {k: n for n, i in self.info.items() for k in i.ops}
        self.out = Rewritten()
        self.keep: dict[tuple[fx.Node, int], UnitEdit] = {}
        self.round: dict[tuple[fx.Node, int], UnitEdit] = {}
        self.exits: dict[fx.Node, UnitEdit] = {}
        self.unread = {n for n in gm.graph.nodes if not n.users}
        self.wide_nodes: dict[fx.Node, fx.Node] = {}
        self.narrow_nodes: dict[fx.Node, fx.Node] = {}
        self.wide: set[fx.Node] = set()

    def run(self) -> Rewritten:
        self._take_apart()
        self._out_of_place()
        for edit in self.edits:
            self._resolve(edit)
        if not (self.keep or self.round or self.exits):
            return self.out
        self.wide = self._find_wide()
        for node in list(self.gm.graph.nodes):
            if node.op in ("call_function", "call_method", "call_module") and node in self.info:
                self._rewrite(node)
            elif node.op == "output":
                self._rewrite_output(node)
        # only what lost its readers here: FX (torch 2.13) takes `mask.scatter_(…)`, written for its effect, for dead
        self.gm.graph.eliminate_dead_code(lambda n: n in self.unread or not self.info.get(n, Info(transparent=True)).transparent)
        self.gm.graph.lint()
        self.gm.recompile()
        return self.out

    # -- resolving ------------------------------------------------------------------------------------------------------

    def _take_apart(self) -> None:
        """Put steps in the place of the fused ops of which an edit names one."""
        keys = [k for e in self.edits for k in (e.consumer, e.producer) if k is not None and SEPARATOR in k.op]
        for whole in dict.fromkeys(OpKey(k.module, k.function, k.op.partition(SEPARATOR)[0], k.ordinal) for k in keys):
            if (node := self.by_key.get(whole)) is not None:
                replace_by_steps(self.gm, node, whole, self.info)
        self.by_key = {k: n for n, i in self.info.items() for k in i.ops}

    def _out_of_place(self) -> None:
        """Ops that edits name make tensors of their own: behind one that writes into its operand, the graph names another producer."""
        named = [self.by_key.get(OpKey(k.module, k.function, k.op, k.ordinal)) for e in self.edits for k in (e.consumer, e.producer) if k]
        for node in dict.fromkeys(named):
            if node is not None and writes(node):
                out_of_place(self.gm, node, self.info[node].text)

    def _resolve(self, edit: UnitEdit) -> None:
        key = edit.consumer or edit.producer
        assert key is not None
        node = self.by_key.get(OpKey(key.module, key.function, key.op, key.ordinal))
        if node is None:
            self.out.missing.append(edit)
            self.out.near[edit.id] = self._nearest(key)
            return
        self._agree(node, key)
        if edit.consumer is None:
            self.exits[node] = edit
            self.out.done.append(edit)
            return
        operands = tensor_operands(node)
        if edit.operand >= len(operands):
            raise PatchError(
                f"{_show(key)} has {len(operands)} tensor operands, the patch edits number {edit.operand}", where=self._at(node)
            )
        self._check_producer(node, operands[edit.operand], edit)
        table = self.keep if edit.kind == "keep" else self.round
        other = self.round if edit.kind == "keep" else self.keep
        if (node, edit.operand) in other:
            raise PatchError(f"two edits claim operand {edit.operand} of {_show(key)}", where=self._at(node), hint="remove one of them")
        table[node, edit.operand] = edit
        self.out.done.append(edit)

    def _agree(self, node: fx.Node, key: Key) -> None:
        """The node's source line must contain the expression's first words: a second witness against a wrong ordinal."""
        line, text = "".join(self.info[node].text.split()), "".join(key.text.split())
        if line and text and text not in line and line not in text and not _overlap(line, text):
            raise PatchError(
                f"the op that the patch names is another expression here: {key.text!r}",
                where=f"{_show(key)} runs {self.info[node].text!r}",
                hint="nearest: " + near if (near := self._nearest(key)) else "",
            )  # fmt: skip
        if self.info[node].compute is None and key.op not in {k.op for k in self.info[node].ops}:
            raise PatchError(f"{_show(key)} is part of a larger op here and cannot be edited", where=self._at(node))

    def _nearest(self, key: Key) -> str:
        """The ops that a key may have meant: of the same kind and function first."""
        ops = [(k, i.text) for i in self.info.values() for k in i.ops]
        for alike in (
            lambda k: (k.module, k.op) == (key.module, key.op),
            lambda k: (k.function, k.op) == (key.function, key.op),
            lambda k: k.module == key.module,
            lambda k: k.op == key.op,
        ):
            if found := [f"{k.module or 'the layer'}.{k.op}#{k.ordinal} {text}" for k, text in ops if alike(k)]:
                return "; ".join(found[:4])
        return ""

    def _check_producer(self, node: fx.Node, operand: fx.Node, edit: UnitEdit) -> None:
        found = self._producers(operand)
        if edit.producer is None:
            if edit.kind == "keep" and not any(n.meta.get(ENTRY) for n in found):
                raise PatchError(
                    f"operand {edit.operand} of {_show(edit.consumer)} does not come from outside the module", where=self._at(node),
                    hint="the layer's input reached it another way, or was cast on entry",
                )  # fmt: skip
            return
        if edit.producer.op in ("parameter", "table"):
            if edit.kind == "keep" and not self._changes(operand):
                raise PatchError(
                    f"operand {edit.operand} of {_show(edit.consumer)} is rounded before it enters the module",
                    where=self._at(node),
                    hint="leave this edit out; regenerate the patch with this version",
                )
            return
        if not any(_is_producer(edit.producer, k) for n in found if n in self.info for k in self.info[n].ops):
            names = [f"{k.module or 'the layer'}.{k.op}#{k.ordinal} in {k.function}" for n in found for k in self.info[n].ops[:1]]
            raise PatchError(
                f"operand {edit.operand} of {_show(edit.consumer)} is not computed by {_show(edit.producer)} here",
                where=self._at(node), hint=f"it is computed by: {', '.join(names) or 'an input'}",
            )  # fmt: skip

    def _producers(self, node: fx.Node) -> list[fx.Node]:
        if node.meta.get(ENTRY) or not self.info.get(node, Info()).transparent:
            return [node]
        return [p for a in carried_operands(node) for p in self._producers(a)]

    def _at(self, node: fx.Node) -> str:
        return f"{node.format_node()}\n{self.info[node].text}"

    # -- rewriting ------------------------------------------------------------------------------------------------------

    def _find_wide(self) -> set[fx.Node]:
        """Compute nodes that must give an FP32 result, and the transparent nodes on the way."""
        wide: set[fx.Node] = set()
        todo = [tensor_operands(c)[slot] for c, slot in self.keep] + list(self.exits)
        while todo:
            n = todo.pop()
            if n in wide:
                continue
            wide.add(n)
            if self.info.get(n, Info()).transparent and not n.meta.get(ENTRY):
                todo += carried_operands(n)
        return wide

    def _rewrite(self, node: fx.Node) -> None:
        info = self.info[node]
        if info.transparent:
            return  # carried on demand
        kept = [slot for (c, slot) in self.keep if c is node]
        rounded = {slot: e for (c, slot), e in self.round.items() if c is node}
        operands = tensor_operands(node)
        if is_anchor(info):
            low = [slot for slot in kept if is_low(self.info[operands[slot]].dtype)]
            if low or rounded:
                raise PatchError(
                    f"the patch edits what {node.target} reads, a GEMM or a kernel whose operands keep their formats",
                    where=self._at(node), hint="leave this edit out; regenerate the patch with this version",
                )  # fmt: skip
            for slot in kept:  # a router's GEMM in FP32: its operand was rounded before it was upcast
                _replace_operands(node, {slot: self._wide(operands[slot])})
            return  # what it returns is a number of its format: unrounded, it is the same
        if not kept and not rounded and not (node in self.wide and is_low(info.dtype)):
            return
        with self.gm.graph.inserting_before(node):
            replaced: dict[int, fx.Node] = {}
            for slot in kept:
                replaced[slot] = self._wide(operands[slot])
            for slot, edit in rounded.items():
                replaced[slot] = self._round(operands[slot], edit)
            if (kept or node in self.wide) and is_low(info.dtype):
                self._widen_operands(node, operands, replaced)
        if replaced:
            _replace_operands(node, replaced)
        if (kept or node in self.wide) and is_low(info.dtype):
            self._narrow_result(node)

    def _widen_operands(self, node: fx.Node, operands: list[fx.Node], replaced: dict[int, fx.Node]) -> None:
        """Make the op compute in FP32: upcast the operands that are still low, or one of them where the op promotes."""
        promotes = {k.op for k in self.info[node].ops} <= _PROMOTES
        for slot, operand in enumerate(operands):
            value = operand.meta.get("example_value")
            if slot in replaced or not isinstance(value, torch.Tensor) or not is_low(value.dtype):
                continue
            if promotes and any(self._rank(x) > 0 for x in replaced.values()):
                continue
            replaced[slot] = self._cast(operand, torch.float32)
        if writes(node):
            out_of_place(self.gm, node, self.info[node].text)

    def _rank(self, node: fx.Node) -> int:
        value = node.meta.get("example_value")
        return value.dim() if isinstance(value, torch.Tensor) else 0

    def _narrow_result(self, node: fx.Node) -> None:
        """The op now gives FP32; whoever is not to read that gets it rounded to the format it had."""
        dtype = self.info[node].dtype
        assert dtype is not None
        value = node.meta["example_value"]
        users = list(node.users)
        with self.gm.graph.inserting_after(node):
            narrow = self._cast(node, dtype)
        for u in users:
            u.replace_input_with(node, narrow)
        self.narrow_nodes[node] = narrow
        narrow.meta["example_value"] = value
        self.info[narrow] = Info((), dtype, True, self.info[node].text)
        self.wide_nodes[node] = self.wide_nodes[narrow] = node

    def _wide(self, node: fx.Node) -> fx.Node:
        """A node with the same value, unrounded."""
        if node in self.wide_nodes:
            return self.wide_nodes[node]
        info = self.info.get(node, Info())
        if node.meta.get(ENTRY):
            wide = tensor_operands(node)[0]
        elif info.transparent:
            wide = self._wide_transparent(node, info)
        elif is_low(info.dtype):
            wide = self._cast_after(node)  # a parameter, a GEMM's output: exact
        else:
            wide = node
        self.wide_nodes[node] = wide
        return wide

    def _wide_transparent(self, node: fx.Node, info: Info) -> fx.Node:
        casts = _is_cast(node, self.info)
        if casts and is_low(info.dtype):
            return self._wide(tensor_operands(node)[0])
        carried = carried_operands(node)
        if not any(self._changes(a) for a in carried):
            return self._cast_after(node) if is_low(info.dtype) else node
        inputs = {a: self._wide(a) for a in carried if isinstance(a.meta.get("example_value"), torch.Tensor | tuple | list)}
        if casts:
            return next(iter(inputs.values()))  # a cast to FP32 of what is FP32 already
        with self.gm.graph.inserting_after(node):
            copy = self.gm.graph.node_copy(node, lambda n: inputs.get(n, n))
        copy.meta = dict(node.meta)
        if isinstance(v := node.meta.get("example_value"), torch.Tensor):
            copy.meta["example_value"] = v.to(torch.float32)
        self.info[copy] = Info((), torch.float32 if info.dtype is not None else None, True, info.text)
        return copy

    def _changes(self, node: fx.Node) -> bool:
        """Whether a node's unrounded value differs from it."""
        if node.meta.get(ENTRY) or node in self.narrow_nodes.values():
            return True
        info = self.info.get(node, Info())
        if not info.transparent:
            return False
        if _is_cast(node, self.info) and is_low(info.dtype) and not is_low(self._dtype(tensor_operands(node)[0])):
            return True
        return any(self._changes(a) for a in carried_operands(node))

    def _dtype(self, node: fx.Node) -> torch.dtype | None:
        v = node.meta.get("example_value")
        return v.dtype if isinstance(v, torch.Tensor) else None

    def _round(self, operand: fx.Node, edit: UnitEdit) -> fx.Node:
        dtype = self._dtype(operand) or torch.float32
        return self._cast(self._cast(operand, getattr(torch, edit.format)), dtype)

    def _cast_after(self, node: fx.Node) -> fx.Node:
        """An exact upcast, placed where every later reader may use it."""
        at = node
        if node.op == "placeholder":
            at = [n for n in self.gm.graph.nodes if n.op == "placeholder"][-1]
        with self.gm.graph.inserting_after(at):
            return self._cast(node, torch.float32)

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        cast = self.gm.graph.call_method("to", (node, dtype))
        cast.meta = {k: node.meta[k] for k in ("nn_module_stack", "stack_trace", "source_fn_stack") if k in node.meta}
        if isinstance(v := node.meta.get("example_value"), torch.Tensor):
            cast.meta["example_value"] = v.to(dtype)
        return cast

    def _rewrite_output(self, node: fx.Node) -> None:
        """Results that leave the unit unrounded: in place of the rounded ones, or added behind them if they are to travel beside."""
        if not self.exits:
            return
        reached: set[fx.Node] = set()
        inserted: dict[fx.Node, fx.Node] = {}
        added: list[fx.Node] = []

        def left(a: fx.Node) -> set[fx.Node]:
            return {p for p in self._producers_now(a) if p in self.exits}

        def out(a: fx.Node) -> fx.Node:
            if a not in inserted:
                found = {p for p in left(a) if not self.exits[p].source}
                reached.update(found)
                with self.gm.graph.inserting_before(node):
                    inserted[a] = self._wide(a) if found else a
            return inserted[a]

        for position, a in enumerate(node.args[0] if isinstance(node.args[0], tuple | list) else ()):
            if isinstance(a, fx.Node) and any(not self.exits[p].source for p in left(a)):
                self.out.unrounded.append(position)
            found = {p for p in left(a) if self.exits[p].source} if isinstance(a, fx.Node) else set()
            if isinstance(a, fx.Node) and found and is_low(self._dtype(a)):
                reached.update(found)
                with self.gm.graph.inserting_before(node):
                    added.append(self._wide(a))
                self.out.beside.append((position, frozenset(self.exits[p].source for p in found)))
        node.args = fx.map_arg(node.args, out)
        if added:
            node.args = ((*node.args[0], *added),)  # type: ignore[misc]
        for producer, edit in self.exits.items():
            if producer not in reached:
                self.out.done.remove(edit)
                self.out.missing.append(edit)

    def _producers_now(self, node: fx.Node) -> list[fx.Node]:
        if node.meta.get(ENTRY) or not self.info.get(node, Info()).transparent:
            return [node]
        return [p for a in carried_operands(node) for p in self._producers_now(a)]


def _is_producer(key: Key, op: OpKey) -> bool:
    """Whether an op is the one that a key names: an anchor's key says only what it is, `gemm` of a function, or `composite`, a module."""
    if key.op == "composite":
        return not key.module or op.module == key.module or op.module.startswith(f"{key.module}.")
    if key.op == "attention":
        return op.module == key.module and (op.op == OP or op.op in ATTENTIONS)
    same = op.op in MATMULS if key.op == "gemm" else op.op == key.op
    return same and (op.module, op.function, op.ordinal) == (key.module, key.function, key.ordinal)


def _is_cast(node: fx.Node, info: dict[fx.Node, Info]) -> bool:
    """Whether a transparent node only changes the dtype."""
    ops = {k.op for k in info.get(node, Info()).ops}
    if node.op == "call_method" and node.target in ("to", "type_as", "float", "bfloat16", "half", "type", "double"):
        return True
    return ops == {"_to_copy"}


def _replace_operands(node: fx.Node, replaced: dict[int, fx.Node]) -> None:
    """Replace tensor operands by position: the same node may be read twice and edited once."""
    count = -1

    def visit(a: Any) -> Any:
        nonlocal count
        if isinstance(a, fx.Node):
            if isinstance(a.meta.get("example_value"), torch.Tensor) or a.op == "get_attr":
                count += 1
                return replaced.get(count, a)
            return a
        if isinstance(a, list | tuple):
            items = [visit(x) for x in a]
            return type(a)(items) if not hasattr(a, "_fields") else type(a)(*items)
        return a

    args = tuple(visit(a) for a in node.args)
    kwargs = {k: visit(a) for k, a in node.kwargs.items()}
    node.args, node.kwargs = args, kwargs


def _overlap(line: str, text: str) -> bool:
    """Whether a line and a (perhaps longer or shorter) expression share a run of eight characters or all of the shorter."""
    n = min(8, len(line), len(text))
    return any(text[i : i + n] in line for i in range(len(text) - n + 1))


def _show(key: Key | None) -> str:
    return f"{key.module or 'the layer'}.{key.op}#{key.ordinal} in {key.function}" if key else "?"
