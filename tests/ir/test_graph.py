"""The dataflow as a networkx graph, and walks over it."""

from __future__ import annotations

import networkx as nx

from graphalign.ir.dataflow import Dataflow, Op, Ref
from graphalign.ir.graph import components, met


def op(i: int, *operands: tuple[Ref, ...], kind: str = "op") -> Op:
    return Op(id=i, name=f"%{i}", kind=kind, target="mul", operands=operands)


# 0 → 2 ← 1, 2 → 3 (twice, once rounded), 3 → 4, 1 → 4 in one operand with 3
FLOW = Dataflow(
    "training",
    (
        op(0, kind="parameter"),
        op(1, kind="anchor"),
        op(2, (Ref(0),), (Ref(1),)),
        op(3, (Ref(2),), (Ref(2).rounded("bfloat16"),)),
        op(4, (Ref(3), Ref(1, via=("buf1",)))),
    ),
)


def test_every_way_into_an_operand_is_an_edge_with_its_roundings() -> None:
    assert isinstance(FLOW.graph, nx.MultiDiGraph)
    found = {(a, b, *key): (ref.roundings, ref.via) for a, b, key, ref in FLOW.graph.edges(keys=True, data="ref")}
    assert found == {
        (0, 2, 0, 0): ((), ()),
        (1, 2, 1, 0): ((), ()),
        (2, 3, 0, 0): ((), ()),
        (2, 3, 1, 0): (("bfloat16",), ()),
        (3, 4, 0, 0): ((), ()),
        (1, 4, 0, 1): ((), ("buf1",)),
    }
    assert FLOW.readers == {0: [(2, 0)], 1: [(2, 1), (4, 0)], 2: [(3, 0), (3, 1)], 3: [(4, 0)]}
    assert FLOW.read_by(4) == [3, 1]
    assert FLOW.read_by(2, [1]) == [1]


def test_a_walk_meets_where_it_stops_and_goes_no_further() -> None:
    assert set(FLOW.above([4], lambda i: i != 3)) == {4, 3, 1}
    assert set(FLOW.above([4], lambda i: True)) == {0, 1, 2, 3, 4}
    assert set(FLOW.below([0], lambda i: i != 3)) == {0, 2, 3}
    assert list(FLOW.below([], lambda i: True)) == []


def test_a_walk_over_everything_misses_nothing() -> None:
    """networkx stops early when it has seen as many nodes as there are; the start is not one of them."""
    assert list(met([0], lambda i: [i + 1] if i < 4 else [], 5)) == [0, 1, 2, 3, 4]
    assert list(met([0, 3], lambda i: [(i + 1) % 5], 5)) == [0, 3, 1, 4, 2]


def test_components_come_in_the_order_of_their_first_node() -> None:
    assert components([5, 1, 2, 0, 4], [(4, 0), (5, 1)]) == [[0, 4], [1, 5], [2]]
