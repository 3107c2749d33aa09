"""Replay: the live training model, with the engine's real anchor outputs in place of its own GEMMs and attention.

Every region then gets exactly what the engine's region got, and what it hands to the next anchor is compared with what the
engine's region handed over: region outputs only, never a GEMM's or an attention's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphalign.align.align import Pair
from graphalign.align.positions import Decisions, recorded_at
from graphalign.align.regions import tail_ops
from graphalign.errors import AlignmentError
from graphalign.evaluate.aten import ATTENTIONS, base
from graphalign.ir.dataflow import Op
from graphalign.ir.training import TrainingGraph
from graphalign.proof.composites import Ends, composite_ends
from graphalign.proof.values import EngineValues

_GEMMS = frozenset({"mm", "addmm"})


@dataclass
class Score:
    """Agreement of one anchor operand."""

    module: str
    slot: int
    equal: float
    """Share of bitwise equal elements."""
    ulp: int
    """Largest distance, in units of the last place of the format."""
    elements: int
    distance: float
    """Euclidean distance divided by the engine's norm."""


@dataclass
class Anchor:
    """What the engine's anchor read and wrote, for one training anchor."""

    key: tuple[Any, ...]
    output: torch.Tensor | None
    """[tokens, features], the slice that belongs to this training anchor."""
    operands: dict[int, torch.Tensor]


def engine_anchors(pair: Pair, values: EngineValues) -> dict[tuple[Any, ...], Anchor]:
    """The engine's values by anchor identity, a merged GEMM cut into its checkpoint tensors."""
    nodes = {n.name: n for g in pair.capture_i.graphs for k in g.kernels for n in k.nodes}
    rules = pair.inference.rules
    out: dict[tuple[Any, ...], Anchor] = {}
    for op in pair.flow_i.ops:
        if op.kind != "anchor" or op.name not in values.writes:
            continue
        node, rule = nodes[op.name], rules.get(nodes[op.name].op)
        names = [rule.input] if rule and rule.kind == "gemm" else list(rule.operands) if rule else [n for n, _ in node.args]
        operands = {i: t for i, n in enumerate(names) if (t := values.reads.get((op.name, n))) is not None}
        written = values.writes[op.name]
        if op.target == "gemm":
            for checkpoint, start, length in op.detail["segments"]:
                part = written.reshape(-1, written.shape[-1])[:, start : start + length]
                if (order := op.detail["orders"].get(checkpoint)) is not None:  # the checkpoint's row for each of the engine's
                    part = part[:, torch.tensor(order).argsort()]
                out["gemm", checkpoint, op.key[-1]] = Anchor(op.key, part, operands)
        else:
            out[op.key] = Anchor(op.key, written, operands)
    return out


class Replay(TorchDispatchMode):
    """Replaces the results of anchors and compares their operands, in one forward of the live model.

    With `inject` off nothing is replaced: the comparison then shows how far the two have drifted apart.
    """

    def __init__(
        self, model: nn.Module, pair: Pair, values: EngineValues, *, inject: bool = True, capture: TrainingGraph | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inject = inject
        self.anchors = engine_anchors(pair, values)
        self.names = {p.data_ptr(): n for n, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
        self.checkpoint = {n.replace("_graphalign", ""): n for n in self.names.values()}
        self.attention = [op for op in pair.flow_t.ops if op.kind == "anchor" and op.target == "attention"]
        self.by_weight: dict[str, list[Op]] = defaultdict(list)
        for op in pair.flow_t.ops:
            if op.kind == "anchor" and op.target == "gemm":
                self.by_weight[str(op.key[1])].append(op)
        ends = composite_ends(capture, pair) if capture is not None else {}
        self.composites = Ends(ends, self.names, len(values.tokens))
        self.used: dict[str, int] = defaultdict(int)
        self.next_attention = 0
        self.scores: list[Score] = []
        self.output = values.output
        self.tokens = len(values.tokens)
        self.far = far_position(pair, self.tokens)
        """Where the last token is put, which then is not compared; None: all stand where the engine had them."""
        self.tail = tail_ops(pair.flow_t)
        self.replaced = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Patched layers run their Dynamo graphs under this mode as they do without it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = base(str(func)) if func.namespace == "aten" else ""
        if name in _GEMMS:
            result = self._gemm(func, args, kwargs)
        elif name in ATTENTIONS:
            result = self._attend(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        op = self.composites.follow(name, args, result)
        return result if op is None else self._end(op, result)

    def _end(self, op: Op, result: torch.Tensor) -> torch.Tensor:
        """The engine's result of a composite anchor; its operands are compared where other anchors read them too."""
        anchor = self.anchors.get(op.key)
        if anchor is None or anchor.output is None or anchor.output.numel() != result.numel():
            return result
        self.replaced += 1
        return anchor.output.to(result.dtype).reshape(result.shape).clone() if self.inject else result

    def _gemm(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, w = args[-2:]
        weight = self.names.get(w.data_ptr())
        ops = self.by_weight.get(weight or "", [])
        n = self.used[weight or ""]
        self.used[weight or ""] += 1
        if n >= len(ops):
            return func(*args, **kwargs)
        op = ops[n]
        anchor = self.anchors.get(op.key)
        if anchor is None and op.id in self.tail and self.output is not None:
            self._compare(op, 0, x, self.output)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if anchor is None or anchor.output is None:
            return result
        self._compare(op, 0, x, anchor.operands.get(0))
        self.replaced += 1
        if not self.inject:
            return result
        self.on_gemm(op, anchor, func, args, kwargs)
        return anchor.output.to(result.dtype).reshape(result.shape).clone()

    def _attend(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if self.next_attention >= len(self.attention):
            return result
        op = self.attention[self.next_attention]
        self.next_attention += 1
        anchor = self.anchors.get(op.key)
        if anchor is None or anchor.output is None:
            return result
        for slot in range(3):
            self._compare(op, slot, args[slot].transpose(1, 2), anchor.operands.get(slot))
        self.replaced += 1
        if not self.inject:
            return result
        self.on_attention(op, anchor, func, args, kwargs)
        first = result[0] if isinstance(result, tuple | list) else result
        b, h, t, d = first.shape
        replaced = anchor.output.to(first.dtype).reshape(b, t, h, d).transpose(1, 2)
        return (replaced, *result[1:]) if isinstance(result, tuple | list) else replaced

    def on_gemm(self, op: Op, anchor: Anchor, func: Any, args: Any, kwargs: Any) -> None:
        """Called for every GEMM whose result is replaced."""

    def on_attention(self, op: Op, anchor: Anchor, func: Any, args: Any, kwargs: Any) -> None:
        """Called for every attention whose result is replaced."""

    def _compare(self, op: Op, slot: int, mine: torch.Tensor, theirs: torch.Tensor | None) -> None:
        if theirs is None:
            return
        a, b = mine.reshape(-1), theirs.reshape(-1)
        if a.numel() != b.numel() and a.numel() % b.numel() == 0 and mine.dim() == 4:
            a = mine[:, :, :: a.numel() // b.numel()].reshape(-1)  # key and value heads repeated before the kernel
        if a.numel() != b.numel():
            return
        if self.far is not None and a.numel() % self.tokens == 0:
            a, b = (x.view(self.tokens, -1)[:-1].reshape(-1) for x in (a, b))
        same = a.dtype == b.dtype
        equal = float((a == b).double().mean()) if same else 0.0
        self.scores.append(Score(op.module, slot, equal, ulp_distance(a, b) if same else -1, a.numel(), distance(a, b)))


def far_position(pair: Pair, tokens: int) -> int | None:
    """The last position that the trainer was recorded at, if it decides otherwise in a batch of so many tokens; else None.

    Transformers picks LongRoPE's factors by a batch's longest position. Its last token stands there in a replay, so that the trainer runs
    as it was compared: every other token is where the engine had it, and no region mixes tokens.
    """
    recorded = recorded_at(pair.capture_t)
    if recorded is None or pair.capture_t.header.shorter == "same" or tokens < len(recorded):
        return None
    spread = [round(i * (tokens - 1) / max(len(recorded) - 1, 1)) for i in range(len(recorded))]
    return max(recorded) if Decisions(pair.capture_t, pair.training).changed(spread) else None


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖a − b‖ / ‖b‖, in FP64; 0 for two zero tensors."""
    x, y = a.double(), b.double()
    norm = float(y.norm())
    return float((x - y).norm()) / norm if norm else float((x - y).norm() > 0)


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance of two equal-dtype tensors in units of the last place (monotonic integer order of floats)."""
    integer = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}[a.dtype]
    sign = -(2 ** (torch.iinfo(integer).bits - 1))

    def order(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(integer).long()
        return torch.where(bits < 0, sign - bits, bits)

    return int((order(a) - order(b)).abs().max()) if a.numel() else 0


def replay(
    model: nn.Module, pair: Pair, values: EngineValues, *, autocast: str | None = None, capture: TrainingGraph | None = None
) -> list[Score]:
    """Run the model on the recorded prompt with the engine's anchor outputs.

    Args:
        model: the trainer's model, stock or patched, in eval mode.
        pair: both captures, of the stock model.
        values: the engine's recorded values for one prompt.
        autocast: dtype of `torch.autocast` around the forward.
        capture: the stock model as recorded, to find where composite anchors end; without it they are not replaced.

    Returns:
        One score per anchor operand, in execution order.

    Raises:
        AlignmentError: not one anchor could be replaced.
    """
    return run_replay(model, Replay(model, pair, values, capture=capture), values, autocast=autocast)


def run_replay(model: nn.Module, mode: Replay, values: EngineValues, *, autocast: str | None = None) -> list[Score]:
    """The same with a mode of one's own."""
    from graphalign.capture.attention import one_sequence

    given = {"input_ids": torch.tensor([values.tokens])}
    if mode.far is not None:
        given["position_ids"] = torch.tensor([[*range(len(values.tokens) - 1), mode.far]])
    cast = torch.autocast("cpu", dtype=getattr(torch, autocast) if autocast else None, enabled=autocast is not None)
    with torch.no_grad(), cast, one_sequence():
        model(**given, use_cache=False)  # compile what is patched before the mode is on
        mode.scores.clear()
        mode.composites.reset()
        with mode:
            model(**given, use_cache=False)
    if not mode.replaced:
        raise AlignmentError(
            "not one anchor of the training model took the engine's values", hint="record the values with the same checkpoint"
        )
    return mode.scores


def shares(scores: Sequence[Score]) -> dict[str, float]:
    """Anchor operand (`module[slot]`) to its share of bitwise equal elements, the lowest if it was read more than once."""
    out: dict[str, float] = {}
    for s in scores:
        at = f"{s.module}[{s.slot}]"
        out[at] = min(s.equal, out.get(at, 1.0))
    return out


@dataclass
class Summary:
    """Scores of one variant, by group."""

    equal: dict[str, float] = field(default_factory=dict)
    lowest: dict[str, float] = field(default_factory=dict)
    ulp: dict[str, int] = field(default_factory=dict)
    operands: dict[str, int] = field(default_factory=dict)


def summarise(scores: Sequence[Score], reaches: dict[str, set[str]]) -> Summary:
    """Mean and lowest share of equal elements, and the largest ULP distance, per group.

    Args:
        scores: from `replay`.
        reaches: group to the anchor operands (`module[slot]`, layer as in the model) that its sites change.
    """
    out = Summary()
    for group, operands in reaches.items():
        mine = [s for s in scores if f"{s.module}[{s.slot}]" in operands]
        if mine:
            out.equal[group] = sum(s.equal for s in mine) / len(mine)
            out.lowest[group] = min(s.equal for s in mine)
            out.ulp[group] = max(s.ulp for s in mine)
            out.operands[group] = len(mine)
    return out
