"""What the eager trainer executes: every ATen kernel of one forward, in order, as captured."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from graphalign.ir.inference import Frozen

FORMAT_VERSION = 1


class Source(Frozen):
    """The exact expression an op comes from."""

    file: str
    """Path from the package's root, `transformers/models/qwen3/modeling_qwen3.py`; never absolute."""
    function: str
    """Qualified name, `Qwen3RMSNorm.forward`."""
    line: int
    column: int
    end_line: int
    end_column: int
    text: str
    """The expression's source text."""


class Value(Frozen):
    """A tensor in the graph, numbered by `id`."""

    id: int
    dtype: str
    shape: tuple[int, ...]


class Input(Frozen):
    """A tensor the forward did not compute."""

    value: Value
    kind: Literal["parameter", "buffer", "input", "constant"]
    """`input` is a run-time tensor: `input_ids`, `position_ids`; `constant` was made outside the recorder's sight."""
    name: str
    """Qualified name in the model; for parameters the name under which checkpoints store it."""
    data: str | None = None
    """base64 of the content, little-endian in its own dtype (bfloat16 as its 2 bytes), for everything but parameters, up to 1 MiB."""


class Node(Frozen):
    """One op. `graphalign.attention` is a composite anchor: its inside is not recorded. `graphalign.logprobs` marks the graph's end."""

    op: str
    """`aten.mul.Tensor`, or `graphalign.attention`.

    An in-place op (`aten.add_.Tensor`) reads the old value of what it writes and its output is the new one. The recorder adds
    `aten.as_strided`, `aten.as_strided_scatter` and `aten.permute` where memory is written and read through different views;
    the first two mean indexing of the flattened first argument.
    """
    args: tuple[Any, ...]
    """Encoded as in `graphalign.ir.args`; tensors are `{"v": id}`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    outputs: tuple[Value | None, ...]
    """Leaves of the result, None where one is not a tensor; after them the written arguments that the op does not return."""
    module: str = ""
    """Path of the innermost module whose forward runs, `model.layers.0.mlp`."""
    source: int | None = None
    """Index into `TrainingGraph.sources`: the frame nearest to the op inside the modeling code."""


class Mask(Frozen):
    """What an attention that is no call of an attention function reads, see `capture.visible.visible`."""

    value: int
    """The first output of the node: a softmax's weights, or the result of `scaled_dot_product_attention`'s kernel."""
    visible: dict[str, Any]


class Header(Frozen):
    """Where a capture comes from."""

    versions: dict[str, str]
    regime: dict[str, Any]
    """param_dtype, autocast (None or dtype), attention, experts, hub_kernels, mode, …"""
    model: dict[str, Any]
    """name, architecture (class), config digest, layers, max_position_embeddings."""
    tokens: int
    """Tokens of the recorded forward (batch 1)."""
    shorter: Literal["", "same", "other"] = ""
    """For a trainer that decides by its positions: whether a batch of the first few runs the same. Empty: not tried."""
    notes: tuple[str, ...] = ()
    timings: dict[str, float] = Field(default_factory=dict)


class TrainingGraph(Frozen):
    """The training side, as captured."""

    format: Literal["graphalign.training"] = "graphalign.training"
    version: Literal[1] = 1
    header: Header
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    """Value ids of the forward's outputs (logits)."""
    sources: tuple[Source, ...]
    masks: tuple[Mask, ...] = ()
    """Of attention outside attention functions, and of other softmaxes. Empty: there is none, or it was not recorded."""

    def parameters(self, node: Node) -> dict[str, Any]:
        """An attention node's keyword arguments, with what it reads."""
        first = node.outputs[0] if node.outputs else None
        seen = next((m.visible for m in self.masks if first is not None and m.value == first.id), None)
        return dict(node.kwargs) if seen is None or "visible" in node.kwargs else {**node.kwargs, "visible": seen}
