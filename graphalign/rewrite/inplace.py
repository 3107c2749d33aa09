"""Ops that write into their first operand, `x.clamp_(…)`, `x += y`, in a Dynamo graph: written out of place where an edit concerns them.

In the graph, whoever reads `x` behind such an op still names the node that made `x`, so neither a value's producer nor a wider result
would be found there.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from graphalign.errors import PatchError

_OPERATORS = {operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul, operator.itruediv: operator.truediv}


def writes(node: fx.Node) -> bool:
    """Whether a node's op writes its result into its first operand."""
    return _other(node) is not None


def out_of_place(gm: fx.GraphModule, node: fx.Node, text: str) -> None:
    """Make a new tensor of what a node writes into its operand, and let all that come after it read that one.

    Args:
        gm: the graph, with `example_value` metadata.
        node: one that `writes`.
        text: of its source line.

    Raises:
        PatchError: the tensor that is written into is also read by another name, or belongs to the module's caller.
    """
    target, written = _other(node), node.args[0]
    assert target is not None
    if not isinstance(written, fx.Node):
        return
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    storage = _storage(written)
    for n in gm.graph.nodes:
        if n is node or storage is None or _storage(n) != storage or order[n] > order[node]:
            continue
        kept = n.op in ("placeholder", "get_attr")
        if kept or (n is not written and any(order[u] > order[node] for u in n.users)):
            raise PatchError(
                f"an edit concerns {node.target}, which writes into a tensor that "
                + ("comes from outside the module" if kept else "is read by another name behind it"),
                where=f"{node.format_node()}\n{text}",
                hint="leave the edit out: `graphalign patch --except SITE`",
            )
    node.target = target
    written.replace_all_uses_with(node, delete_user_cb=lambda u: order[u] > order[node])


def _other(node: fx.Node) -> Any:
    """The target of the same op out of place, None if the node's op does not write into its operand."""
    if node.op == "call_method" and _marked(str(node.target)):
        return str(node.target)[:-1]
    if node.op != "call_function":
        return None
    if node.target in _OPERATORS:
        return _OPERATORS[node.target]
    name = getattr(node.target, "__name__", "")
    return getattr(torch, name[:-1], None) if _marked(name) and getattr(torch, name, None) is node.target else None


def _marked(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) and value.layout is torch.strided else None
