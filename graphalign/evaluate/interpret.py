"""Interpreting one loop body over index tensors, in float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from graphalign.errors import CaptureFileError
from graphalign.evaluate import aten, loop_ops
from graphalign.evaluate.memory import Memory
from graphalign.evaluate.picks import Conditions, Pick
from graphalign.evaluate.shards import part_of
from graphalign.evaluate.storage import UNKNOWN, Lazy, Rows
from graphalign.evaluate.values import Arithmetic, Val
from graphalign.ir.args import references
from graphalign.ir.dataflow import LOW_PRECISION
from graphalign.ir.indexing import evaluate as index_value
from graphalign.ir.inference import Body, Node, Parameter, Segment

INDIRECT = re.compile(r"indirect\d+")
"""An index that a loop computed, in an index expression."""
PAIR = 2
"""Values of a reduction that goes on from partial results: maxima and sums."""


def single(x: Any) -> Any:
    """A floating operand in FP32: what depends on positions and tables only is computed as the engine computes it."""
    return x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


@dataclass
class Interpreter:
    """One evaluation of a loop body, for one node's buffers."""

    memory: Memory
    body: Body
    binding: dict[str, str]
    """Roles of the body to the node's buffers."""
    node: Node
    constant: Set[tuple[int, str, str]] = frozenset()
    """(graph, node, op of its body) of what depends on run-time inputs and tables only."""
    replace: Callable[[Val], Val] | None = None
    """What every value becomes for those that read it."""
    picks: dict[int, Pick] = field(default_factory=dict)
    """Filled: identity of a value to why what picked it took one side only."""

    def __post_init__(self) -> None:
        self.results: dict[str, Val | str] = {}
        self.stores: list[Any] = []
        self.identities: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []  # an identity is an address: it must stay taken
        self.computed: set[int] = set()
        """Identities of indices that the loop computed from what it loaded."""
        self.pending: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.conditions = Conditions()
        self.lanes: torch.Tensor | None = None
        """Inside a masked block: the lanes that are not masked out."""
        self.env: dict[str, Any] = dict(self.memory.env)
        self.shape: list[int] = []
        self.reduced = tuple(range(len(self.body.sizes[0]), len(self.body.var_ranges)))

    def run(self) -> tuple[dict[str, Val | str], list[Any]]:
        """Interpret it.

        Returns:
            The body's ops to their values, or to why there is none; and what it stores: (role of the buffer, flat index, data, mode,
            identity of the value stored or 0).
        """
        n = len(self.body.var_ranges)
        total = 1
        for d, (name, extent) in enumerate(self.body.var_ranges):
            size = self.memory.size(extent)
            total *= max(size, 1)
            self.shape.append(size)
            self.env[name] = torch.arange(size).view([-1 if i == d else 1 for i in range(n)])
        if total > aten.MAX_ELEMENTS:
            raise CaptureFileError("a loop of the capture is too large to evaluate", where=self.node.name)
        self.block(self.body.ops, {}, "")
        return self.results, self.stores

    def index(self, name: str) -> torch.Tensor:
        text = self.body.indexing.get(name)
        if text is None:
            raise CaptureFileError(f"no index expression called {name}", where=self.node.name)
        x = index_value(text, self.env)
        return x.long() if isinstance(x, torch.Tensor) else torch.full([1] * max(len(self.shape), 1), int(x))

    def block(self, ops: tuple[Any, ...], env: dict[str, Any], prefix: str) -> Any:
        last = None
        for name, target, args, kwargs in ops:
            last = self.op(prefix, name, target, args, kwargs, env)
        return last

    def op(self, prefix: str, name: str, target: str, args: Any, kwargs: Any, env: dict[str, Any]) -> Any:
        def arg(a: Any) -> Any:
            return self.decode(a, env)

        if target == "output":
            vals = [env[n] for a in args for n in references(a, "n") if n in env]
            return vals[0] if vals else None
        if target == "get_index":
            computed = INDIRECT.findall(self.body.indexing.get(args[0], ""))
            if any(self.env.get(symbol, 0) is None for symbol in computed):  # it comes from what could not be evaluated
                env[name] = None
                return None
            env[name] = self.index(args[0])
            if computed:
                self.computed.add(id(env[name]))
                self.alive.append(env[name])
            return env[name]
        if target.startswith("set_indirect"):
            x = arg(args[0])
            symbol = target.replace("set_", "")
            self.env[symbol] = x.long() if isinstance(x, torch.Tensor) else x
            return None
        if target == "check_bounds":
            return None
        if target == "constant":
            c = arg(args[0])
            env[name] = torch.as_tensor(c, dtype=torch.float64 if isinstance(c, float) else None)
            return env[name]
        if target == "index_expr":
            x = arg(args[0])
            dtype = args[1].get("dtype", "int64") if len(args) > 1 and isinstance(args[1], dict) else "int64"
            env[name] = x.double() if dtype.startswith(("float", "bfloat")) else x
            return env[name]
        if target == "load":
            index = arg(args[1])
            if index is None:
                env[name] = None
                return None
            found = self.load(self.binding[args[0]["b"]], index)
            if self.lanes is not None and found.is_floating_point():
                found = torch.where(self.lanes, found, UNKNOWN)  # a masked-out lane reads what is never used
            env[name] = found
            return env[name]
        if target in ("store", "store_reduction"):
            value, index = arg(args[2]), arg(args[1])
            if value is None or index is None:
                return None
            shape = np.broadcast_shapes(tuple(index.shape), tuple(value.shape))
            buffer = self.binding[args[0]["b"]]
            self.pending[buffer] = (index.expand(shape), value)
            mode = next((a for a in args[3:] if isinstance(a, str)), kwargs.get("mode") or "")
            identity = self.identities.get(id(value), 0)
            self.stores.append((args[0]["b"], index.expand(shape), value, mode if isinstance(mode, str) else "", identity))
            return value
        if target == "to_dtype":
            x = arg(args[0])
            dtype = next(
                (a["dtype"] for a in args if isinstance(a, dict) and "dtype" in a),
                kwargs.get("dtype", {}).get("dtype", "float32") if isinstance(kwargs.get("dtype"), dict) else "float32",
            )
            env[name] = self.cast(x, dtype, rounds=kwargs.get("use_compute_types", True) is False)
            return env[name]
        if target == "getitem":
            pair = arg(args[0])
            env[name] = pair[args[1]] if isinstance(pair, list | tuple) else pair
            return env[name]
        if target.startswith("masked_subblock"):
            mask, other = torch.as_tensor(arg(args[0])).bool(), arg(args[1])
            outer, self.lanes = self.lanes, mask if self.lanes is None else mask & self.lanes
            inner = self.block(self.body.subblocks.get(target, ()), dict(env), f"{target}.")
            self.lanes = outer
            if inner is None:
                return None
            fill = torch.as_tensor(float(other) if not isinstance(other, torch.Tensor) else other, dtype=torch.float64)
            env[name] = torch.where(mask, inner.double() if inner.is_floating_point() else inner, fill)
            return env[name]
        if target == "reduction":
            env[name] = self.reduction(prefix, name, args, arg)
            return env[name]
        operands = [arg(a) for a in args]
        if any(o is None for o in operands):
            self.results[prefix + name] = "an operand could not be evaluated"
            return None
        constant = (self.memory.g, self.node.name, prefix + name) in self.constant
        result = loop_ops.apply(target, [single(o) for o in operands] if constant else operands)
        if result is None:
            self.results[prefix + name] = f"loop op {target} is not known"
            env[name] = None
            return None
        env[name] = self.keep(prefix + name, result.double() if constant and result.is_floating_point() else result, constant)
        self.alive.append(env[name])
        pick = None if constant else self.conditions.see(target, operands, env[name])
        if pick is not None and isinstance(kept := self.results[prefix + name], Val):
            self.picks[kept.id] = pick
        return env[name]

    def decode(self, a: Any, env: dict[str, Any]) -> Any:
        """An encoded argument; `env` holds the results of the block so far."""
        if isinstance(a, dict):
            if "n" in a:
                return env.get(a["n"])
            if "f" in a:
                return float(a["f"])
            return index_value(a["e"], self.env) if "e" in a else a
        return [self.decode(x, env) for x in a] if isinstance(a, list | tuple) else a

    def keep(self, name: str, data: torch.Tensor, constant: bool = False) -> torch.Tensor:
        val = self.memory.arithmetic.new(data)
        if self.replace is not None and data.is_floating_point() and not constant:
            val = self.replace(val)
        self.results[name] = val
        self.identities[id(val.data)] = val.id
        self.alive.append(val.data)
        return val.data

    def cast(self, x: Any, dtype: str, *, rounds: bool) -> Any:
        if x is None:
            return None
        if dtype == "bool":
            return x.bool() if isinstance(x, torch.Tensor) else bool(x)
        if dtype.startswith(("int", "uint")):
            return x.trunc().long() if x.is_floating_point() else x
        x = x.double()
        return self.memory.arithmetic.round(x, dtype) if rounds and dtype in LOW_PRECISION else x

    def widen(self, value: torch.Tensor) -> torch.Tensor:
        """A value in all lanes of the reduction."""
        value = value.double() if value.dtype != torch.bool else value
        full = [max(a, b) for a, b in zip(self.shape, [1] * (len(self.shape) - value.dim()) + list(value.shape), strict=True)]
        for d in self.reduced:
            full[d] = self.shape[d]
        return value.expand(full)

    def reduction(self, prefix: str, name: str, args: Any, arg: Any) -> Any:
        kind = next((a for a in args if isinstance(a, str)), "")
        value = arg(args[-1])
        if value is None:
            return None
        result: torch.Tensor | tuple[torch.Tensor, ...] | None
        if isinstance(value, list) and len(value) == PAIR and all(isinstance(x, torch.Tensor) for x in value):
            result = loop_ops.reduce_pairs(kind, self.widen(value[0]), self.widen(value[1]), self.reduced)
        else:
            result = None if isinstance(value, list) else loop_ops.reduce(kind, self.widen(value), self.reduced)
        if result is None:
            self.results[prefix + name] = f"reduction {kind} is not known"
            return None
        if isinstance(result, tuple):
            self.results[prefix + name] = self.memory.arithmetic.new(result[0])
            return list(result)
        return self.keep(prefix + name, result)

    def load(self, buffer: str, index: torch.Tensor) -> torch.Tensor:
        memory = self.memory
        source = memory.source(buffer)
        if isinstance(source, Lazy):
            return self.parameter(source, index)
        _root, offset = memory.root(buffer)
        if buffer in self.pending:
            stored_index, value = self.pending[buffer]
            if stored_index.shape == index.shape and torch.equal(stored_index, index):
                dtype = (memory.buffers[buffer].dtype if buffer in memory.buffers else None) or "float32"
                return value if buffer in self.node.forwarded else memory.arithmetic.round(value, dtype)
        if isinstance(source, Rows):
            memory.read_rows(source, index + offset, self.lanes, computed=id(index) in self.computed)
        out = source.read(index + offset, register=buffer in self.node.forwarded)
        return out.long() if isinstance(source.id, tuple) and source.id[0] in ("positions", "ids") else out

    def parameter(self, source: Lazy, index: torch.Tensor) -> torch.Tensor:
        return parameter(self.memory.arithmetic, source, index)


def parameter(arithmetic: Arithmetic, source: Lazy, index: torch.Tensor) -> torch.Tensor:
    """Elements of an engine's parameter at flat indices."""
    p = source.parameter
    if len(p.segments) == 1 and p.segments[0].start == 0 and not (p.segments[0].index or p.segments[0].shards or p.segments[0].order):
        return arithmetic.parameter(p.segments[0].checkpoint, index, source.dtype)
    strides = [1]
    for extent in reversed(p.shape[1:]):
        strides.insert(0, strides[0] * extent)
    out = torch.full(index.shape, UNKNOWN, dtype=torch.float64)
    for s in p.segments:
        at = (index // strides[s.dim]) % p.shape[s.dim]
        inside = (at >= s.start) & (at < s.start + s.length)
        if s.shards:
            local = _in_checkpoint(p, s, index, strides)
        else:
            local = (index - s.start * strides[s.dim]) if s.dim == 0 else index
            if s.order:
                local = torch.tensor(s.rows())[(at - s.start).clamp(0, s.length - 1)] * strides[0] + index % strides[0]
        out = torch.where(inside, arithmetic.parameter(s.checkpoint, local, source.dtype), out)
    return out


def _in_checkpoint(p: Parameter, s: Segment, index: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """Flat indices of a parameter as those of the checkpoint tensor that a piece of it is a part of."""
    lead = len(s.index)
    local, stride = torch.zeros_like(index), 1
    for dim in reversed(range(lead, len(p.shape))):
        at = (index // strides[dim]) % p.shape[dim] - (s.start if dim == s.dim else 0)
        if (part := part_of(s, dim - lead)) is not None:
            at = torch.tensor(part.places())[at.clamp(0, part.length - 1)]
        local = local + at * stride
        stride *= part.size if part else s.length if dim == s.dim else p.shape[dim]
    return local
