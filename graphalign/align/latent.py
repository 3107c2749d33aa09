"""Latent attention (MLA): the engine's op reads the compressed keys and values, the trainer's attention the expanded ones.

The engine absorbs the up-projection of the latent into its op. The trainer's projection and attention become one node with the
operands that the engine's op has: the query, the latent, the rotated part of the key that all heads share.
"""

from __future__ import annotations

from graphalign.evaluate.aten import ATTENTIONS, FACTORIES, MATMULS, TRANSPARENT, VIEWS, base
from graphalign.ir.args import references
from graphalign.ir.training import Node, TrainingGraph

OP = "graphalign.attention"
COPIES_INTO = frozenset({"as_strided_scatter", "slice_scatter", "select_scatter", "copy"})
"""Ops that put one tensor into a part of another."""
UNWRITTEN = FACTORIES | {"new_empty_strided"}
SAME = VIEWS | {"copy", "clone", "contiguous"}
LAYOUT = TRANSPARENT | COPIES_INTO | UNWRITTEN


def attends(node: Node) -> bool:
    """Whether a node is an attention function."""
    return node.op == OP or base(node.op) in ATTENTIONS


def latent(capture: TrainingGraph, inside: list[int], parameters: set[int], readers: dict[int, list[int]]) -> tuple[Node, list[int]] | str:
    """One node for an attention and the projection that its keys and values come from. Or why not.

    Args:
        capture: the training capture.
        inside: the module's own nodes, ascending.
        parameters: values that are parameters, or casts and views of them.
        readers: value id to the nodes that read it.

    Returns:
        The node, with operands query, latent, shared key; and the nodes that it stands for, ascending, the attention last.
    """
    attentions = [n for n in inside if attends(capture.nodes[n])]
    if len(attentions) != 1:
        return f"it calls {len(attentions)} attention functions that the recorder knows, the engine one latent attention"
    attention = capture.nodes[attentions[0]]
    query, key, value = list(references(attention.args, "v"))[:3]
    walk = _Walk(capture)
    projection = walk.projection(value)
    if projection is None or projection != walk.projection(key, allowed=projection):
        return "its keys and values do not come from one projection"
    made = [o.id for o in capture.nodes[projection].outputs if o is not None]
    activation = [v for v in references(capture.nodes[projection].args, "v") if v not in parameters]
    shared = walk.apart(key, made[0])
    if len(activation) != 1 or len(shared) != 1 or walk.apart(value, made[0]):
        return f"the projection reads {len(activation)} activations, and {len(shared)} other values are parts of its keys"
    # what lies between the projection and the attention is nothing but layout; drop what nobody else reads
    dropped, gone = [attentions[0]], {attentions[0]}
    for n in range(attentions[0] - 1, projection - 1, -1):
        node = capture.nodes[n]
        outs = [o.id for o in node.outputs if o is not None]
        used = [r for v in outs for r in readers.get(v, ())]
        if (n == projection or base(node.op) in LAYOUT) and used and all(r in gone for r in used):
            dropped.append(n)
            gone.add(n)
    if projection not in gone or any(v in capture.outputs for v in made):
        return "what its projection returns is read outside"
    kwargs = {"own": True, "parameters": capture.parameters(attention), "heads_first": attention.op != OP}
    args = tuple({"v": v} for v in (query, activation[0], shared[0]))
    return Node(op="graphalign.composite", args=args, kwargs=kwargs, outputs=attention.outputs[:1], module=attention.module,
                source=attention.source), sorted(gone)  # fmt: skip


class _Walk:
    """Ways up through layout ops."""

    def __init__(self, capture: TrainingGraph) -> None:
        self.capture = capture
        self.origin = {o.id: n for n, node in enumerate(capture.nodes) for o in node.outputs if o is not None}
        self.dtype = {i.value.id: i.value.dtype for i in capture.inputs}
        self.dtype.update((o.id, o.dtype) for node in capture.nodes for o in node.outputs if o is not None)
        self._above: dict[int, frozenset[int]] = {}

    def reads(self, value: int) -> list[int]:
        """What a layout op reads to make a value; nothing for any other op."""
        n = self.origin.get(value)
        if n is None or base(self.capture.nodes[n].op) not in TRANSPARENT | COPIES_INTO:
            return []
        read = list(references(self.capture.nodes[n].args, "v"))
        return read[1:2] if base(self.capture.nodes[n].op) == "copy" else read

    def above(self, value: int) -> frozenset[int]:
        """Values at the top of all ways up."""
        if value not in self._above:
            up = self.reads(value)
            self._above[value] = frozenset().union(*(self.above(u) for u in up)) if up else frozenset({value})
        return self._above[value]

    def projection(self, value: int, allowed: int | None = None) -> int | None:
        """The only matrix product above a value (or `allowed`, if it is one of them), by node."""
        found = {n for v in self.above(value) if (n := self.origin.get(v)) is not None and base(self.capture.nodes[n].op) in MATMULS}
        return allowed if allowed in found else found.pop() if len(found) == 1 else None

    def apart(self, value: int, made: int) -> list[int]:
        """The largest parts of a value that nothing of `made` is in, without repeats over heads and what was never written."""
        if made not in self.above(value):
            if all(self._unwritten(v) for v in self.above(value)):
                return []
            while (
                len(up := self.reads(value)) == 1 and base(self.capture.nodes[self.origin[value]].op) in SAME and self._alike(value, up[0])
            ):
                value = up[0]
            return [value]
        return list(dict.fromkeys(x for u in self.reads(value) for x in self.apart(u, made)))

    def _alike(self, a: int, b: int) -> bool:
        """Whether two values have one format."""
        return self.dtype.get(a) == self.dtype.get(b)

    def _unwritten(self, value: int) -> bool:
        n = self.origin.get(value)
        return n is not None and base(self.capture.nodes[n].op) in UNWRITTEN
