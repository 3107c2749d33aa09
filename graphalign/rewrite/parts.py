"""Fused ops of a Dynamo graph taken apart where an edit names one of their steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from graphalign.errors import PatchError
from graphalign.evaluate.aten import base, resolve
from graphalign.evaluate.parts import SEPARATOR, take_apart
from graphalign.rewrite.analyse import Info, OpKey, is_low, run_node

_COPIED = ("nn_module_stack", "stack_trace", "source_fn_stack")


class _Call(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the arguments of one ATen op that a node runs."""

    def __init__(self, op: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op = op
        self.found: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and base(str(func)) == self.op and not kwargs:
            self.found.append((str(func), args))
        return func(*args, **(kwargs or {}))


def replace_by_steps(gm: fx.GraphModule, node: fx.Node, key: OpKey, info: dict[fx.Node, Info]) -> None:
    """Put the steps of a fused op in its place; they compute in FP32, and the result is rounded as the op's was.

    Args:
        gm: the graph; changed in place.
        node: runs the op and nothing else that makes a value.
        key: of the op.
        info: of every node; the new ones are added, the steps with the op's key and theirs, `native_layer_norm:mean`.

    Raises:
        PatchError: the call has a form that is not known.
    """
    recorder = _Call(key.op)
    value = node.meta.get("example_value")
    run_node(gm, node, recorder, getattr(value, "fake_mode", None))
    of = {id(n.meta.get("example_value")): n for n in node.all_input_nodes}
    op, args = recorder.found[0] if len(recorder.found) == 1 else ("", ())
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    fused = take_apart(op, args, lambda a: isinstance(a, torch.Tensor)) if op else None
    if fused is None or not isinstance(value, torch.Tensor) or len(info[node].ops) != 1 or any(id(t) not in of for t in tensors):
        raise PatchError(
            f"{key.op} in {key.function} cannot be taken apart here", where=f"{node.format_node()}\n{info[node].text}",
            hint="it is part of a larger op; leave this edit out, or regenerate the patch with this version",
        )  # fmt: skip
    meta = {k: node.meta[k] for k in _COPIED if k in node.meta}
    text, whole = info[node].text, info[node].ops[0]

    def add(made: fx.Node, example: torch.Tensor, ops: tuple[OpKey, ...]) -> fx.Node:
        made.meta = {**meta, "example_value": example}
        info[made] = Info(ops, example.dtype, not ops, text)
        return made

    def cast(x: fx.Node, dtype: torch.dtype) -> fx.Node:
        example = x.meta["example_value"]
        return x if example.dtype == dtype else add(gm.graph.call_method("to", (x, dtype)), example.to(dtype), ())

    with gm.graph.inserting_before(node), torch.no_grad():
        wide = torch.float32 if is_low(tensors[0].dtype) else tensors[0].dtype
        made = {name: cast(of[id(t)], wide) for name, t in zip(fused.operands, tensors, strict=True)}
        for step in fused.steps:
            given = tuple(made[a] if isinstance(a, str) else a for a in step.args)
            overload = resolve(step.op)
            example = overload(*fx.map_arg(given, lambda n: n.meta["example_value"]))
            own = OpKey(key.module, key.function, f"{key.op}{SEPARATOR}{step.name}", key.ordinal)
            ops = (own, whole) if step is fused.steps[-1] else (own,)
            last = made[step.name] = add(gm.graph.call_function(overload, given), example, ops)
        result = cast(last, value.dtype)
    node.replace_all_uses_with(result)
    gm.graph.erase_node(node)
    del info[node]
