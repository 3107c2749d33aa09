"""Records one eager forward: every ATen op that runs, in order, with its module and its source expression.

The recorder is a `TorchDispatchMode`, below autograd and autocast: casts that autocast inserts appear as
`aten._to_copy`, a linear layer as `t`, `view`, `mm`. It watches an ordinary eager run, so Dynamo graph breaks (`print`, `.item()`,
data-dependent branches) do not matter; such a branch is recorded the way it went. The forward's results are bitwise those without it.
"""

from __future__ import annotations

import base64
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphalign.capture.tensors import TensorTable
from graphalign.engines.products import Run, call
from graphalign.errors import CaptureFailedError
from graphalign.ir.compiled import GeneratedCode, module_ids, rebase, trace_source
from graphalign.ir.frames import SourceTable, caller
from graphalign.ir.training import Input, Node, Source, Value

MAX_DATA = 1 << 20
"""Largest content, in bytes, that is recorded for an input."""

Watched = Callable[[Sequence[Value | None], Sequence[Any]], None]
Watch = Callable[[str, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Watched | None]
"""Called with (op, function, arguments, keyword arguments) before an op runs; what it returns is called with the node's
outputs and the tensors that they stand for. What either runs is not recorded. A composite anchor's function takes no arguments."""


@dataclass
class Recording:
    """What `Recorder.finish` returns: the graph's parts, without a header."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    sources: tuple[Source, ...]
    notes: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    """Relative source file to SHA-256."""


class Recorder(TorchDispatchMode):
    """Records the ops of `module`'s forwards that run inside `with recorder:`.

    Args:
        module: the model; names of parameters, buffers and modules are its qualified names, wrappers' prefixes as they are.
            A parameter that has several names (tied) is one input, under the first.
        inputs: run-time tensors by name (`input_ids`, `position_ids`).
        watch: sees the tensors of every op that is recorded.
        run: calls every op that is recorded, with the same result as the op itself.
    """

    def __init__(self, module: nn.Module, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None, run: Run = call) -> None:
        super().__init__()
        self._watch, self._run = watch, run
        self._unnamed = False
        self._values: list[Value] = []
        self._inputs: list[Input] = []
        self._nodes: list[Node] = []
        self._notes: dict[str, None] = {}
        self._sources = SourceTable()
        self._generated = GeneratedCode() if "torch._dynamo" in sys.modules else None
        self._tensors = TensorTable(self._emit_synthetic, self.note)
        self._modules = {id(m): name for name, m in reversed(list(module.named_modules(remove_duplicate=False)))}
        self._names = frozenset(self._modules.values())
        self._stack: list[str] = []
        self._hooks: list[Any] = []
        self._suspended = False
        self._source: int | None = None
        self._placed = ""
        self._known = _named_tensors(module, inputs)
        self.traced = False
        """Whether ops ran that Dynamo had traced: the model has compiled parts."""
        self._keep = module  # ids in the tables above stay valid

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let `torch.compile`d parts of the model run compiled, as they do without the recorder (torch 2.13).

        Otherwise Dynamo would skip their frames, for good, and an eager fallback would be recorded.
        """
        return True

    # ---- context ----

    def __enter__(self) -> Self:
        if "torch._dynamo" in sys.modules:
            # Dynamo would compile the hooks of an already compiled module as frames of their own (torch 2.13).
            for hook in (Recorder._push, Recorder._pop):
                torch._dynamo.eval_frame.skip_code(hook.__code__)
        hooks = nn.modules.module
        self._hooks = [
            hooks.register_module_forward_pre_hook(self._push),
            hooks.register_module_forward_hook(self._pop, always_call=True),
        ]
        super().__enter__()
        _ACTIVE.append(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        _ACTIVE.remove(self)
        for h in self._hooks:
            h.remove()
        self._hooks.clear()
        self._stack.clear()
        super().__exit__(*exc)

    # Dynamo inlines these hooks into modules that it compiles while the recorder is active: nothing of them may stay there.

    def _push(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        outer = self._stack[-1] if self._stack else ""
        self._stack.append(self._modules.get(id(module), outer))

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._stack:
            self._stack.pop()

    # ---- recording ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._suspended:
            return func(*args, **kwargs)
        self._placed, self._source = self._place(caller(1))
        # Arguments first: the op may write into them.
        enc_args, enc_kwargs = tuple(self.encode(a) for a in args), {k: self.encode(v) for k, v in kwargs.items()}
        done = self._watch(str(func), func, args, kwargs) if self._watch is not None else None
        out = self._run(func, args, kwargs)
        written = _written(func, args, kwargs)
        ids = {id(t) for t in written}
        results = _flat(out)
        returned = {id(t) for t in results}
        results += [t for t in written if id(t) not in returned]  # void ops: the written arguments follow the results
        outputs = [self._new(t) if isinstance(t, torch.Tensor) else None for t in results]
        place = {"module": self._placed, "source": self._source}
        self._nodes.append(Node(op=str(func), args=enc_args, kwargs=enc_kwargs, outputs=tuple(outputs), **place))
        if done is not None:
            done(outputs, results)
        for t, v in zip(results, outputs, strict=True):
            if v is not None:
                (self._tensors.write if id(t) in ids else self._tensors.bind)(t, v.id)
        return out

    def _place(self, frame: FrameType | None) -> tuple[str, int | None]:
        """Module path and source of the op that the frame runs."""
        if self._unnamed:
            return self.module, None
        node = self._generated.node(frame) if self._generated is not None else None
        if node is None:
            return self.module, self._sources.locate(frame)
        self.traced = True
        traced = next((self._modules[i] for i in module_ids(node) if i in self._modules), self.module)
        module = rebase(traced, self.module, self._names)
        source = trace_source(node)
        return module, self._sources.add(*source) if source is not None else None

    @property
    def module(self) -> str:
        """Path of the innermost module that runs."""
        return self._stack[-1] if self._stack else ""

    @property
    def recording(self) -> bool:
        """False inside a composite anchor."""
        return not self._suspended

    def note(self, text: str) -> None:
        """Add a sentence to the header's notes, once."""
        self._notes.setdefault(text)

    @contextmanager
    def unnamed(self) -> Iterator[None]:
        """Within the block, ops have no source: what runs is neither the model's code nor the trainer's."""
        self._unnamed = True
        try:
            yield
        finally:
            self._unnamed = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block nothing is recorded, and no dispatch mode is seen."""
        before, self._suspended = self._suspended, True
        try:
            with _disable_current_modes():
                yield
        finally:
            self._suspended = before

    def composite(
        self, op: str, fn: Callable[[], Any], tensors: Sequence[torch.Tensor | None], attrs: Mapping[str, Any], *, outputs: int = 1
    ) -> Any:
        """Run `fn` as one opaque node.

        Args:
            op: name of the node, `graphalign.attention`.
            fn: does the work; what it runs is not recorded and sees no dispatch mode.
            tensors: the node's positional arguments.
            attrs: the node's keyword arguments; tensors in them become references.
            outputs: how many leaves of the result are values of the graph; later leaves are recorded as None.

        Returns:
            What `fn` returns.
        """
        if self._suspended:
            return fn()
        source = None if self._unnamed else self._sources.locate(caller(1))
        self._placed = self.module
        args = tuple(self.encode(t) for t in tensors)
        kwargs = {k: self.encode(v) for k, v in attrs.items()}
        operands = [t for t in (*tensors, *_flat(list(attrs.values()))) if isinstance(t, torch.Tensor)]
        versions = [t._version for t in operands]
        with self.paused():
            done = self._watch(op, fn, tensors, attrs) if self._watch is not None else None
            result = fn()
        if any(t._version != v for t, v in zip(operands, versions, strict=True)):
            self.note(f"{op} in {self.module} writes into an argument; later reads of it show the older value")
        leaves = _flat(result)
        values = [self._new(t) if isinstance(t, torch.Tensor) and i < outputs else None for i, t in enumerate(leaves)]
        self._nodes.append(Node(op=op, args=args, kwargs=kwargs, outputs=tuple(values), module=self.module, source=source))
        if done is not None:
            with _disable_current_modes():
                done(values, leaves)
        for t, v in zip(leaves, values, strict=True):
            if v is not None:
                self._tensors.bind(t, v.id)
        return result

    def finish(self, outputs: Sequence[torch.Tensor]) -> Recording:
        """The recorded graph with the given outputs. Ops without effect that only autograd made are left out."""
        for t in outputs:
            if self._tensors.value(t) is None:
                raise CaptureFailedError(
                    "the model's output was not computed by any op that was recorded",
                    where=f"output of shape {list(t.shape)}, {t.dtype}",
                    hint="record the model before torch.compile, and let its forward return the logits tensor itself",
                )
        out = tuple(self._read(t) for t in outputs)
        return Recording(
            tuple(self._inputs), _drop_dead_detach(self._nodes, out), out, tuple(self._sources.sources), tuple(self._notes),
            self._sources.digests(),
        )  # fmt: skip

    # ---- values ----

    def encode(self, x: Any) -> Any:
        """An argument as `graphalign.ir.args` writes it."""
        if isinstance(x, torch.Tensor):
            return {"v": self._read(x)}
        if x is None or isinstance(x, bool | int | str):
            return x
        if isinstance(x, float):
            return x if x - x == 0 else {"f": repr(x)}
        if isinstance(x, list | tuple):
            return [self.encode(y) for y in x]
        for kind, cls in _TORCH_KINDS:
            if isinstance(x, cls):
                return {kind: str(x).removeprefix("torch.")}
        return {"opaque": type(x).__qualname__}

    def _read(self, t: torch.Tensor) -> int:
        value = self._tensors.value(t)
        return value if value is not None else self._lift(t)

    def _lift(self, t: torch.Tensor) -> int:
        """A tensor the forward did not compute becomes an input of the graph."""
        kind, name = self._known.get(id(t), ("constant", f"constant_{sum(i.kind == 'constant' for i in self._inputs)}"))
        if kind == "constant" and t.grad_fn is not None:
            raise CaptureFailedError(
                f"{self.module or 'the model'} reads a tensor that was computed out of the recorder's sight (by {t.grad_fn.name()})",
                where=f"shape {list(t.shape)}, {t.dtype}",
                hint="record the model before torch.compile; it must not reuse activations of an earlier forward",
            )
        v = self._new(t)
        data = None
        if kind != "parameter":
            data = _content(t)
            if data is None:
                self.note(f"the content of {kind} {name} is not recorded: {t.numel() * t.element_size()} bytes")
        self._inputs.append(Input(value=v, kind=kind, name=name, data=data))
        self._tensors.bind(t, v.id)
        return v.id

    def _new(self, t: torch.Tensor) -> Value:
        return self._value(t.dtype, tuple(t.shape))

    def _value(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Value:
        v = Value(id=len(self._values), dtype=str(dtype).removeprefix("torch."), shape=shape)
        self._values.append(v)
        return v

    def _emit_synthetic(self, op: str, args: tuple[object, ...], dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        v = self._value(dtype, shape)
        self._nodes.append(Node(op=op, args=args, outputs=(v,), module=self._placed, source=self._source))
        return v.id


_ACTIVE: list[Recorder] = []

_TORCH_KINDS = (
    ("dtype", torch.dtype),
    ("device", torch.device),
    ("layout", torch.layout),
    ("memory_format", torch.memory_format),
)


def active() -> Recorder | None:
    """The recorder whose `with` block runs, None outside of one or inside a composite anchor."""
    return _ACTIVE[-1] if _ACTIVE and _ACTIVE[-1].recording else None


def anchor_scope(
    op_name: str, fn: Callable[[], Any], tensor_args: Sequence[torch.Tensor | None], attrs: Mapping[str, Any], *, outputs: int = 1
) -> Any:
    """Run `fn` as one composite anchor if a recorder is active, else just run it. See `Recorder.composite`."""
    recorder = active()
    return fn() if recorder is None else recorder.composite(op_name, fn, tensor_args, attrs, outputs=outputs)


@contextmanager
def record(module: nn.Module, inputs: Mapping[str, torch.Tensor], watch: Watch | None = None, run: Run = call) -> Iterator[Recorder]:
    """Record what runs inside the `with` block. Call `finish` on the recorder after it."""
    recorder = Recorder(module, inputs, watch, run)
    with warnings.catch_warnings():
        # An OptimizedModule warns that global hooks fire once more for itself; that push and pop is harmless (torch 2.13).
        warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
        with recorder:
            yield recorder


def _flat(tree: Any) -> list[Any]:
    return list(pytree.tree_leaves(tree))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors an op writes into, by its schema."""
    out: list[torch.Tensor] = []
    for i, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            x = kwargs.get(a.name) if a.kwarg_only or i >= len(args) else args[i]
            out += [t for t in _flat(x) if isinstance(t, torch.Tensor)]
    return out


def _content(t: torch.Tensor) -> str | None:
    """base64 of a tensor's elements, row-major and little-endian; None if it is too large or has no memory to read."""
    if t.numel() * t.element_size() > MAX_DATA or t.is_meta or t.layout != torch.strided:
        return None
    flat = t.detach().to("cpu", copy=True).resolve_conj().resolve_neg().contiguous().reshape(-1)
    flat = flat.as_strided((flat.numel(),), (1,))  # one element may have any stride, and keeps it (torch 2.13)
    return base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode() if flat.numel() else ""


def _named_tensors(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[int, tuple[str, str]]:
    """Kind and name of every tensor that exists before the forward. The first name wins."""
    known: dict[int, tuple[str, str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        known.setdefault(id(p), ("parameter", name))
    for name, b in module.named_buffers(remove_duplicate=False):
        known.setdefault(id(b), ("buffer", name))
    for prefix, m in module.named_modules():
        for key, x in vars(m).items():
            if isinstance(x, torch.Tensor):  # neither parameter nor buffer: a constant, but one with a name
                known.setdefault(id(x), ("constant", f"{prefix}.{key}" if prefix else key))
    for name, t in inputs.items():
        known[id(t)] = ("input", name)
    return known


def _drop_dead_detach(nodes: list[Node], outputs: tuple[int, ...]) -> tuple[Node, ...]:
    """Without the `aten.detach` nodes whose result nobody reads: autograd makes them when it saves results (torch 2.13)."""
    read = set(outputs)
    kept: list[Node] = []
    for n in reversed(nodes):
        if n.op == "aten.detach.default" and not any(v is not None and v.id in read for v in n.outputs):
            continue
        read.update(_references((n.args, n.kwargs)))
        kept.append(n)
    return tuple(reversed(kept))


def _references(x: Any) -> Iterator[int]:
    if isinstance(x, dict):
        if len(x) == 1 and "v" in x:
            yield x["v"]
        else:
            for y in x.values():
                yield from _references(y)
    elif isinstance(x, list | tuple):
        for y in x:
            yield from _references(y)
