"""Two captures, traced: what an alignment starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from graphalign.align.composite import fold, rename
from graphalign.align.dropped import Drawn, take_out
from graphalign.align.nodes import HEADS_FIRST
from graphalign.align.opwise import fold_attention
from graphalign.align.positions import choose_positions, recorded_at, refuse_other_branch
from graphalign.align.regions import Regions, cut, stream_terms
from graphalign.dataflow import trace_inference, trace_training
from graphalign.dataflow.identity import anchor_name
from graphalign.dataflow.opaque import load_opaque_ops
from graphalign.dataflow.ranges import decode_range
from graphalign.dataflow.returns import unwrap
from graphalign.errors import BadInputError
from graphalign.evaluate.aten import ATTENTIONS, base
from graphalign.evaluate.parts import Made
from graphalign.evaluate.shards import Shards, read_shards
from graphalign.evaluate.values import Arithmetic, Layers
from graphalign.ir.args import references
from graphalign.ir.dataflow import Dataflow
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.paths import layer_of
from graphalign.ir.training import TrainingGraph
from graphalign.ir.verify import verify_inference, verify_training

SHALLOW = 12
"""Most layers of a model whose check gives every layer values of its own. The cost of more would grow with their number."""


@dataclass
class Pair:
    """Two captures, traced, with everything an evaluation needs."""

    capture_i: InferenceGraph
    capture_t: TrainingGraph
    inference: trace_inference.Tracer
    training: trace_training.Tracer
    flow_i: Dataflow
    flow_t: Dataflow
    regions: Regions
    unfolded: dict[str, str] = field(default_factory=dict)
    """Modules that the engine runs as one op and that are no single anchor on the training side, with the reason."""
    share: bool = True
    """Whether equal work is done once, see `Arithmetic.share`."""
    factors: dict[str, float] = field(default_factory=dict)
    """Found by the alignment (the check finds its own): experts whose routing weights the trainer multiplies by a constant and the engine
    their result, by name."""
    shards: Shards = field(default_factory=Shards)
    """What the engine's rank holds of the trainer's values."""
    ranges: tuple[str, ...] = ()
    """In words, which of several compile ranges this is, and where the others round differently."""
    whole: TrainingGraph = field(kw_only=True)
    """The training capture before composite anchors were made of its modules."""
    drawn: tuple[Drawn, ...] = ()
    """Where the trainer's values depend on random numbers."""
    shallow: int = SHALLOW
    """Up to this many layers, every layer has values of its own in the check; in more layers they take turns."""
    steps: dict[int, Made] = field(default_factory=dict)
    """By value id, what the steps of training ops make that were taken apart (`align.finer`)."""
    positions: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Positions chosen so far, by `shift`."""

    @property
    def checked(self) -> Layers:
        """How layers' values differ in the check."""
        layers = {n for op in self.flow_t.ops if (n := layer_of(op.module)) is not None}
        return "own" if len(layers) <= self.shallow else "turns"

    def arithmetic(
        self, seed: int, *, rounds: bool = False, layers: Layers = "alike", shift: int = 0, scales: Mapping[str, float] | None = None
    ) -> Arithmetic:
        """Values for one evaluation; positions are taken from the rows that the engine's tables record."""
        tokens = self.capture_t.header.tokens
        positions = self._positions(shift)
        vocabulary = min(
            (i.value.shape[0] for i in self.capture_t.inputs if i.kind == "parameter" and len(i.value.shape) == 2 and "embed" in i.name),
            default=64,
        )
        ids = tuple((7 + 13 * shift + 11 * t) % vocabulary for t in range(tokens))
        held = [part.length for name, parts in self.shards.parameters.items() if "embed" in name and (part := parts.get(0)) is not None]
        if held:  # what other ranks hold comes from them
            ids = tuple(i % min(held) for i in ids)
        stream = stream_terms(self.flow_t, self.regions) if layers == "turns" else {}
        return Arithmetic(seed, positions, ids, rounds, layers, stream, self.share, self.factors, self._heads(), scales or {}, self.shards)

    def _positions(self, shift: int) -> tuple[int, ...]:
        if shift not in self.positions:
            recorded = recorded_at(self.capture_t)
            end = max(recorded) + 1 if recorded else None
            tokens = self.capture_t.header.tokens
            chosen = choose_positions(self.capture_i, self.inference, tokens, shift, end)
            refuse_other_branch(
                self.capture_t, self.training, chosen, lambda: max(choose_positions(self.capture_i, self.inference, tokens, 0)) + 1
            )
            self.positions[shift] = chosen
        return self.positions[shift]

    def _heads(self) -> dict[str, tuple[int, int]]:
        """Number and size of the heads that every attention of the trainer returns, by the anchor's name."""
        found: dict[str, tuple[int, int]] = {}
        for op in self.flow_t.ops:
            if op.target != "attention":
                continue
            node = self.capture_t.nodes[op.detail["node"]]
            shape = tuple(node.outputs[0].shape) if node.outputs and node.outputs[0] is not None else ()
            if len(shape) == HEADS_FIRST:
                found[anchor_name(op.key)] = (shape[1] if base(node.op) in ATTENTIONS else shape[2], shape[3])
        return found


def prepare(inference: InferenceGraph, training: TrainingGraph, rules: Path, *, share: bool = True, shallow: int = SHALLOW) -> Pair:
    """Trace both captures and cut the training graph into regions. `share` and `shallow` are for tests, see `Pair`.

    Of an engine that compiled the model for several ranges of token counts, the decode range is taken, here and nowhere else: all that
    compare captures start here, and graphs of two ranges traced as one model would be no model.

    Raises:
        BadInputError: the captures are of different models.
    """
    verify_inference(inference)
    verify_training(training)
    check_same_model(inference, training)
    inference, ranges = decode_range(inference, rules, training.header.tokens)
    inference = rename(inference, training)
    training, drawn = take_out(_learned_buffers(inference, training))
    known = load_opaque_ops(rules)
    inference = unwrap(inference, known)
    ti = trace_inference.Tracer(inference, known)
    flow_i = ti.run()
    if any(op.target == "attention" or op.detail.get("latent") for op in flow_i.ops):
        training = fold_attention(training)
    folded = fold(training, flow_i)
    tt = trace_training.Tracer(folded.capture)
    flow_t = tt.run()
    shards = shards_of(inference, flow_i, folded.capture, flow_t)
    regions = cut(flow_t, flow_i)
    return Pair(
        inference,
        folded.capture,
        ti,
        tt,
        flow_i,
        flow_t,
        regions,
        folded.failed,
        share,
        shards=shards,
        ranges=ranges,
        drawn=drawn,
        shallow=shallow,
        whole=training,
    )


def shards_of(inference: InferenceGraph, flow_i: Dataflow, training: TrainingGraph, flow_t: Dataflow) -> Shards:
    """What the engine's rank holds of the trainer's values."""
    return read_shards(inference, flow_i, flow_t, _head_counts(training, flow_t))


def _head_counts(capture: TrainingGraph, flow: Dataflow) -> dict[int, tuple[int, int, int]]:
    """Training attention to its numbers of heads of query, key and value."""
    shapes = {o.id: o.shape for node in capture.nodes for o in node.outputs if o is not None}
    found: dict[int, tuple[int, int, int]] = {}
    for op in flow.ops:
        if op.target == "attention":
            read = [shapes.get(v, ()) for v in references(capture.nodes[op.detail["node"]].args, "v")][:3]
            if len(read) == 3 and all(len(s) == HEADS_FIRST for s in read):
                found[op.id] = (read[0][1], read[1][1], read[2][1])
    return found


def _learned_buffers(inference: InferenceGraph, training: TrainingGraph) -> TrainingGraph:
    """Buffers that checkpoints fill (and the engine therefore lists as learned) are parameters on both sides."""
    filled = {s.checkpoint for p in inference.parameters if p.learned for s in p.segments}
    inputs = tuple(i.model_copy(update={"kind": "parameter"}) if i.kind == "buffer" and i.name in filled else i for i in training.inputs)
    return training if inputs == training.inputs else training.model_copy(update={"inputs": inputs})


def check_same_model(inference: InferenceGraph, training: TrainingGraph) -> None:
    """Refuse captures whose headers name different models."""
    a, b = inference.header.model, training.header.model
    for key in ("architecture", "layers", "max_position_embeddings"):
        if a.get(key) and b.get(key) and a[key] != b[key]:
            raise BadInputError(
                f"these captures are of different models: {key} is {a[key]} in inference and {b[key]} in training",
                hint="capture both sides from the same model folder, with the same --layers",
            )
