"""The map that a diff finds, applied to the eager graph, gives what really compiled code gives; its negation does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.compiler import modules as m
from tests.compiler.emulate import agreement, emulate, negated
from tests.compiler.ground import Case, build

NEARLY = 0.9995
"""For regions with `exp`, `rsqrt` or a sum: the eager kernel may add in another order or approximate differently, which moves
the last FP32 bit and, in about one of 2^16 / 2 elements, a BF16 rounding. One element in 2048 may differ."""
WRONG = 0.99
"""A map that is wrong in one place leaves fewer elements equal than this in some operand (seen: 0.36 to 0.962)."""


@dataclass(frozen=True)
class Expected:
    """What a case must show."""

    module: type[torch.nn.Module]
    sites: frozenset[str]
    exact: bool = True
    engine: type[torch.nn.Module] | None = None
    shows: Callable[[Case], bool] = lambda case: True
    """Evidence that Inductor did what the case is about."""


def spelled(*edges: str) -> frozenset[str]:
    return frozenset(edges)


CASES = {
    "forwarded within one loop nest": Expected(
        m.WithinOneNest, spelled("keep mul → mul[0]"), shows=lambda c: bool(c.forwarded()) and not c.reloaded()
    ),
    "reloaded across loop nests": Expected(
        m.AcrossNests, spelled("keep mul → mul[0]"), exact=False, shows=lambda c: bool(c.reloaded()) and "float32" in c.dtypes()
    ),
    "recomputed in two kernels": Expected(
        m.Recomputed, spelled("keep add → mul[0]", "keep add → add[0]"), shows=lambda c: len(computing(c, "add")) == 2
    ),
    "an FP32 buffer for a row statistic": Expected(
        m.WideBuffer, spelled("keep mean → add[0]", "keep mul → mul[0]"), exact=False, shows=lambda c: "float32" in c.dtypes()
    ),
    "an FP32 buffer for the stream": Expected(
        m.WideStream, spelled("keep add → add[0]", "keep add → mul[0]"), engine=m.WideStreamEngine, shows=lambda c: "float32" in c.dtypes()
    ),
    "a BF16 buffer that two kernels read": Expected(
        m.TwoReaders, spelled("keep mul → add[1]"), shows=lambda c: set(c.dtypes()) == {"bfloat16"} and len(readers(c)) == 2
    ),
    "rope by cat and split": Expected(m.Rope, spelled("keep mul → add[0]", "keep mul → add[1]")),
    "rope by halves": Expected(m.Rope, spelled("keep mul → add[0]", "keep mul → add[1]"), engine=m.RopeByHalves),
    "softmax": Expected(m.Softmax, spelled("keep mul → mul[0]", "keep mul → _softmax[0]", "keep _softmax → mul[0]"), exact=False),
    "layer norm": Expected(m.LayerNorm, spelled("keep mul → native_layer_norm[0]", "keep native_layer_norm → mul[0]"), exact=False),
    "reductions": Expected(
        m.Reductions,
        spelled("keep mul → mul[0]", "keep mul → sum[0]", "keep mul → mean[0]", "keep mul → sub[0]")
        | spelled("keep mean → sub[1]", "keep sub → mul[0]", "keep mul → add[0]", "keep mul → add[1]"),
        exact=False,
    ),
    "x·(r·w) for (x·r)·w": Expected(m.ScaleLast, spelled("keep mul → mul[0]"), exact=False, engine=m.ScaleFirst),
    "rounded by the engine only": Expected(m.WideProduct, spelled("round mul → mul[1]"), engine=m.NarrowProduct),
    "swiglu": Expected(m.Gated, spelled("keep silu → mul[0]"), exact=False),
    "a decoder layer": Expected(
        m.Decoder, spelled("keep mul → mul[1]", "keep add → pow[0]", "keep add → mul[0]", "keep silu → mul[0]"), exact=False
    ),
}


def computing(case: Case, target: str) -> set[str]:
    """Inference nodes whose body computes `target`."""
    bodies = case.inference.bodies
    nodes = [n for k in case.inference.graphs[0].kernels for n in k.nodes if n.body]
    return {n.name for n in nodes if any(op[1] == target for op in bodies[n.body or ""].ops)}


def readers(case: Case) -> set[str]:
    """Loop nodes that read the buffer that GEMM l1 reads, apart from the one that writes it."""
    nodes = [n for k in case.inference.graphs[0].kernels for n in k.nodes]
    gemm = next(n for n in nodes if any(isinstance(a, dict) and a.get("b") == parameter(case, "l1.weight") for _, a in n.args))
    buffer = dict(gemm.args)["self"]["b"]
    return {n.name for n in nodes if n.kind == "loop" and buffer in n.buffers and buffer not in n.outputs}


def parameter(case: Case, name: str) -> str:
    return next(i.name for i in case.inference.graphs[0].inputs if i.source == name)


@pytest.mark.parametrize("name", CASES)
def test_the_found_map_reproduces_the_compiled_code(name: str) -> None:
    expected = CASES[name]
    case = build(expected.module(), expected.engine() if expected.engine else None)
    assert expected.shows(case), "Inductor fused this module in another way: the case does not test what it says"
    assert case.edges() == expected.sites
    assert case.loose_ends() == {}

    found = emulate(case, case.sites)
    assert found.wrong_gemms == [], "the eager GEMM must equal the engine's on the engine's own operand"
    equal = agreement(case, found)
    assert min(equal.values()) >= (1.0 if expected.exact else NEARLY), equal
    if expected.exact:
        assert torch.equal(found.output, case.truth.output)

    wrong = {"stock": emulate(case, []), "negated": emulate(case, [], kept=negated(case))}
    for site in case.sites:
        wrong[f"without {case.words(site)}"] = emulate(case, [s for s in case.sites if s is not site])
    for what, run in wrong.items():
        assert min(agreement(case, run).values()) < WRONG, what


@pytest.mark.parametrize("module", [m.WithinOneNest, m.AcrossNests, m.Rope])
def test_emulated_casts_leave_no_sites(module: type[torch.nn.Module]) -> None:
    """`emulate_precision_casts=True` makes Inductor round wherever eager does."""
    case = build(module(), emulate_precision_casts=True)
    assert case.sites == []
    assert case.loose_ends() == {}
    stock = agreement(case, emulate(case, []))
    assert min(stock.values()) >= NEARLY, stock
    assert min(agreement(case, emulate(case, [], kept=negated(case))).values()) < WRONG


def test_a_rounding_that_a_maximum_hides_is_no_site() -> None:
    """max(round(x)) = round(max(x)): the rounding moved and nothing can tell, so it is listed and not patched."""
    case = build(m.Maximum())
    assert case.edges() == {"keep mul → sub[1]", "keep sub → mul[0]"}
    assert set(case.loose_ends()) <= {"undetermined"}
    assert all("changes nothing" in e.reason for e in case.report.undetermined)
    assert min(agreement(case, emulate(case, case.sites)).values()) == 1.0
