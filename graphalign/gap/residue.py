"""What no patch of roundings can remove: kernels that add up in another order, compared bitwise on the engine's own operands."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from graphalign.align.align import Pair
from graphalign.ir.dataflow import Op
from graphalign.ir.paths import layer_of
from graphalign.proof.replay import Anchor, Replay, run_replay
from graphalign.proof.values import EngineValues


class Agreement(BaseModel):
    """Bitwise agreement of a class of results."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    equal: float
    """Share of elements that are bitwise equal."""
    lowest: float
    """The lowest such share of one result."""
    results: int
    """How many results were compared."""
    elements: int


class Residue(BaseModel):
    """Bitwise agreement by class of kernel, on one prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int
    gemm: Agreement | None
    """The trainer's GEMMs on the engine's operands, at equal shapes, against the engine's results."""
    gemm_rows: dict[int, Agreement]
    """The engine's GEMMs on their first n rows only, against the same rows of the whole: what another batch size changes."""
    attention: Agreement | None
    """The trainer's attention on the engine's operands against the engine's."""
    regions: Agreement | None
    """What the patched regions hand to the next anchor: where this is below 1, sums are added up in another order."""


class Measure(Replay):  # type: ignore[no-untyped-call]
    """A replay that also runs the trainer's own kernels on the engine's operands."""

    def __init__(self, model: nn.Module, pair: Pair, values: EngineValues) -> None:
        super().__init__(model, pair, values)
        self.found: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def on_gemm(self, op: Op, anchor: Anchor, func: Any, args: Any, kwargs: Any) -> None:
        x, mine = anchor.operands.get(0), args[-2]
        if x is None or anchor.output is None or x.numel() != mine.numel():
            return
        own = func(*args[:-2], x.to(mine.dtype).reshape(mine.shape), args[-1], **kwargs)
        self._note("gemm", own, anchor.output)

    def on_attention(self, op: Op, anchor: Anchor, func: Any, args: Any, kwargs: Any) -> None:
        operands = []
        for slot in range(3):
            x, mine = anchor.operands.get(slot), args[slot]
            if x is None:
                return
            _, heads, tokens, width = mine.shape
            x = x.to(mine.dtype).reshape(1, tokens, -1, width).transpose(1, 2)
            if heads % x.shape[1]:
                return
            operands.append(x.repeat_interleave(heads // x.shape[1], 1))
        result = func(*operands, *args[3:], **kwargs)
        first = result[0] if isinstance(result, tuple | list) else result
        if anchor.output is not None:
            self._note("attention", first.transpose(1, 2), anchor.output)

    def _note(self, kind: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        a, b = mine.reshape(-1), theirs.reshape(-1)
        if a.shape == b.shape and a.dtype == b.dtype:
            self.found[kind].append((float((a == b).double().mean()), a.numel()))


def measure_residue(model: nn.Module, pair: Pair, values: EngineValues, *, autocast: str | None = None) -> Residue:
    """Compare kernels and regions on the engine's recorded values.

    Args:
        model: the trainer's model with the whole patch on it, in eval mode.
        pair: both captures, of the stock model.
        values: the engine's recorded values for one prompt.
        autocast: dtype of `torch.autocast` around the forward.

    Raises:
        AlignmentError: see `replay`.
    """
    mode = Measure(model, pair, values)
    scores = run_replay(model, mode, values, autocast=autocast)
    rows: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for name, shares in values.rows.items():
        for count, share in shares.items():
            rows[count].append((share, count * values.writes[name].shape[-1] if name in values.writes else 1))
    return Residue(
        tokens=len(values.tokens),
        gemm=_agreement(mode.found["gemm"]),
        gemm_rows={n: a for n, found in sorted(rows.items()) if (a := _agreement(found)) is not None},
        attention=_agreement(mode.found["attention"]),
        regions=_agreement([(s.equal, s.elements) for s in scores]),
    )


def drift_by_layer(model: nn.Module, pair: Pair, values: EngineValues, *, autocast: str | None = None) -> dict[int, float]:
    """How far the trainer's values are from the engine's when nothing is replaced: layer to the root mean square, over the layer's anchor
    operands, of ‖trainer − engine‖ / ‖engine‖."""
    found: dict[int, list[float]] = defaultdict(list)
    for s in run_replay(model, Replay(model, pair, values, inject=False), values, autocast=autocast):
        layer = layer_of(s.module)
        if layer is not None:
            found[layer].append(s.distance)
    return {k: (sum(x * x for x in v) / len(v)) ** 0.5 for k, v in sorted(found.items())}


def _agreement(found: list[tuple[float, int]]) -> Agreement | None:
    if not found:
        return None
    elements = sum(n for _, n in found)
    equal = sum(share * n for share, n in found) / elements
    return Agreement(equal=equal, lowest=min(share for share, _ in found), results=len(found), elements=elements)
