"""What vLLM's compiled engine executes: Inductor's scheduled loop-level IR, as captured.

The same loop body occurs once (`InferenceGraph.bodies`); kernels refer to it and bind its buffers.
Expressions (sizes, strides, indices) are strings in sympy's printed form and are only ever parsed by
`graphalign.ir.indexing`, a closed parser.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FORMAT_VERSION = 1
UNLOWERED = "unlowered"
"""Kind of a kernel that stands for a compiled piece whose inside is unknown."""


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(Frozen):
    """The part of a checkpoint tensor, along one dimension, that one rank of a tensor-parallel engine holds."""

    dim: int
    """Dimension of the checkpoint tensor."""
    start: int
    length: int
    size: int
    """Of the whole checkpoint tensor along `dim`."""


class Segment(Frozen):
    """A piece of an engine parameter that one checkpoint tensor fills (merged QKV has three)."""

    checkpoint: str
    """Name of the checkpoint tensor."""
    dim: int = 0
    """Dimension of the engine parameter that is split."""
    start: int = 0
    length: int = 0
    index: tuple[int, ...] = ()
    """Leading indices before `dim` (expert number in a fused MoE weight)."""
    shards: tuple[Shard, ...] = ()
    """Which part of the checkpoint tensor it is; along all other dimensions it is whole. Several along one dimension are side by side: the
    checkpoint merges what every rank holds a part of (query, key and value)."""
    order: tuple[tuple[int, int, int], ...] = ()
    """Where the engine holds the rows in another order (heads regrouped): the checkpoint's row for each of its rows, as runs of (first,
    step, count). Empty: as they come."""

    def rows(self) -> list[int]:
        """`order`, row by row."""
        return [first + step * k for first, step, count in self.order for k in range(count)]


class Parameter(Frozen):
    """A parameter or buffer of the engine's module tree."""

    name: str
    """Qualified name in the engine's model, `model.layers.0.self_attn.qkv_proj.weight`."""
    dtype: str
    shape: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    """Where its content comes from, in order; empty for a table computed at load time."""
    learned: bool = True
    """False for a buffer that no checkpoint tensor fills (`cos_sin_cache`)."""


class Table(Frozen):
    """Rows of a tensor that the engine computed when it loaded (cos_sin_cache)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    """Which rows of dimension 0 are recorded, ascending."""
    values: str
    """base64 of the rows as little-endian float32, row-major, [len(rows), prod(shape[1:])]."""


class Attention(Frozen):
    """Parameters of one attention layer, read from the layer object (not in the graph)."""

    layer: str
    scale: float | None = None
    window: int | None = None
    """Sliding window in tokens to the left, None if unlimited."""
    softcap: float | None = None
    causal: bool | None = None
    """Whether a token reads none behind it; None if that was not recorded."""
    chunk: int | None = None
    """Tokens of the chunks that attention stays in, None if unlimited."""
    alibi: bool = False
    """Whether it adds a bias that grows with the distance."""
    sinks: bool = False
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    backend: str = ""


class Composite(Frozen):
    """What a composite op (fused experts, a mixer) gives for drawn weights and inputs (`ir.drawn`): its function, as numbers."""

    alike: tuple[str, ...]
    """Modules of the same class, shapes and settings: by the layer's name where the op is called with one, else by path."""
    failed: str = ""
    """Why there is no result; nothing else is given then."""
    op: str = ""
    inputs: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    """(argument, shape, dtype) of every tensor it was given, in the schema's order; the position is the slot that it is drawn for."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    layer: int = 0
    """Of the module that was run: its weights are drawn by their names in that layer."""
    weights: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(name, shape) of the parameters that were drawn, as Transformers' model has them."""
    experts: int = 0
    """Number of experts, if it has any."""
    scales: tuple[float, ...] = ()
    """What the inputs were multiplied by."""
    results: tuple[str, ...] = ()
    """For each scale, base64 of the result as little-endian float32, row-major."""


class Input(Frozen):
    """An input of an Inductor graph, in call order."""

    name: str
    role: Literal["parameter", "symbol", "layer", "tensor", "other"]
    source: str = ""
    """Parameter name, layer name, or the Dynamo placeholder's name for a run-time tensor (`input_ids`, `positions`, `s72`).

    For role `other`: the parameter whose packed form or handle it is (CPU GEMM weights), or the name of a recorded
    table for a constant of the graph.
    """
    dtype: str | None = None
    size: tuple[str, ...] = ()
    stride: tuple[str, ...] = ()


class Buffer(Frozen):
    """A buffer of an Inductor graph."""

    name: str
    dtype: str | None = None
    size: tuple[str, ...] = ()
    stride: tuple[str, ...] = ()
    offset: str = "0"
    layout: str = ""
    """Class of Inductor's layout."""
    view_of: str | None = None
    """The buffer this one is a slice of (`NonOwningLayout`) or is mutated into."""
    removed: bool = False
    """Dropped by Inductor: it lives in registers only."""


class Body(Frozen):
    """One loop body (`LoopBody`), with buffers named by role `b0, b1, …`."""

    var_ranges: tuple[tuple[str, str], ...]
    """Loop variables in order, with their extents."""
    sizes: tuple[tuple[str, ...], tuple[str, ...]]
    """Iteration and reduction extents; the variables of `var_ranges` in this order."""
    indexing: dict[str, str]
    """Named index expressions."""
    ops: tuple[tuple[Any, ...], ...]
    """Root block: `[name, target, args, kwargs]`, args encoded as in `graphalign.ir.args`."""
    subblocks: dict[str, tuple[tuple[Any, ...], ...]] = Field(default_factory=dict)
    """Bodies of `masked` and the like, same encoding."""


class Node(Frozen):
    """One scheduler node inside a kernel."""

    name: str
    kind: Literal["loop", "extern", "nop", "template"]
    outputs: tuple[str, ...] = ()
    """Buffers it defines."""
    module: str = ""
    """Innermost module path of the source op, from Dynamo's `nn_module_stack`, `` if unknown."""
    origins: tuple[str, ...] = ()
    """Names of the post-grad FX nodes it comes from."""
    source: str = ""
    """`file:line` and text of the engine's source line, `` if unknown."""
    body: str | None = None
    """Key into `InferenceGraph.bodies` (kind loop)."""
    buffers: tuple[str, ...] = ()
    """What the body's `b0, b1, …` stand for here."""
    forwarded: tuple[str, ...] = ()
    """Buffers whose loads code generation served from a register instead of memory."""
    reloaded: tuple[str, ...] = ()
    """Buffers that an earlier node of the same kernel stores and whose loads really read memory."""
    op: str = ""
    """Qualified overload, `vllm.unified_attention_with_output.default` (kind extern).

    `inductor.multi_output` picks one output of another extern call: args `self` (its buffer) and `indices` (path of
    positions, empty if the call has one output).
    """
    args: tuple[tuple[str, Any], ...] = ()
    """(schema argument name, encoded value) of an extern call; tensors are `{"b": buffer}`."""
    mutates: tuple[str, ...] = ()
    """Argument names the extern call writes into."""


class Kernel(Frozen):
    """What is generated as one function: a fused group of scheduler nodes, in execution order."""

    name: str
    """The scheduler's name, `op26_op27`."""
    kind: str
    """Class of Inductor's scheduler node."""
    generated: str = ""
    """Name of the generated function (`cpp_fused_add_mul_3`), `` if it was not generated."""
    nodes: tuple[Node, ...]


VALUE = "value:"
"""Starts the `source` of an input that is another graph's export, by name."""


TAIL = "tail"
"""Name of the graph that ends with log-probabilities, where the engine's tail was captured."""


class Export(Frozen):
    """A tensor that a graph hands on to later graphs."""

    name: str
    """Name of the value; exporting it again replaces it (a call wrote into it)."""
    tensor: dict[str, Any]
    """`{"b": buffer}`, with `size`, `stride`, `offset` where it is a view, as among the arguments of an extern call."""


class Graph(Frozen):
    """One Inductor graph: the whole model on CPU, one piece between attention ops on CUDA."""

    name: str
    inputs: tuple[Input, ...]
    buffers: tuple[Buffer, ...]
    kernels: tuple[Kernel, ...]
    outputs: tuple[str, ...]
    symbols: dict[str, int] = Field(default_factory=dict)
    """Size hint of every free symbol; the token count is the one in `tokens`."""
    tokens: str = ""
    """The symbol of the token count."""
    exports: tuple[Export, ...] = ()
    """What later graphs read as inputs of source `value:NAME`."""
    range: tuple[int, int] | None = None
    """First and last token count it was compiled for, where a piece was compiled more than once; None if it serves all."""

    def passed(self) -> tuple[Buffer, ...]:
        """The inputs that are other graphs' exports, as buffers: an extern call may write into them."""
        return tuple(
            Buffer(name=i.name, dtype=i.dtype, size=i.size, stride=i.stride, layout="passed")
            for i in self.inputs
            if i.role == "tensor" and i.source.startswith(VALUE)
        )


_PERMUTED = re.compile(r"rows of (\S+) are permuted in ")


class Header(Frozen):
    """Where a capture comes from."""

    versions: dict[str, str]
    target: dict[str, Any]
    """device, isa, gemm dispatch, tp, compile ranges."""
    compile: dict[str, Any]
    """Compile settings that matter (mode, custom_ops, splitting ops, Inductor's options)."""
    model: dict[str, Any]
    """name, architecture, config digest, layers, max_position_embeddings, max_model_len, dtype, weights."""
    simulated: bool = False
    notes: tuple[str, ...] = ()
    """What could not be observed, in words."""
    timings: dict[str, float] = Field(default_factory=dict)
    """Seconds per stage."""

    @property
    def permuted(self) -> frozenset[str]:
        """Checkpoint tensors whose rows the engine holds in an order that is not recorded. The engine script says so in a note."""
        return frozenset(m.group(1) for note in self.notes if (m := _PERMUTED.match(note)))


class InferenceGraph(Frozen):
    """The inference side, as captured."""

    format: Literal["graphalign.inference"] = "graphalign.inference"
    version: Literal[1] = 1
    header: Header
    parameters: tuple[Parameter, ...]
    tables: tuple[Table, ...]
    attention: tuple[Attention, ...]
    composites: tuple[Composite, ...] = ()
    """Empty: not recorded."""
    bodies: dict[str, Body]
    graphs: tuple[Graph, ...]

    @property
    def reach(self) -> int | None:
        """The engine's number of positions, `max_model_len`; None if it is not recorded."""
        found = self.header.model.get("max_model_len")
        return found if type(found) is int and found > 0 else None
