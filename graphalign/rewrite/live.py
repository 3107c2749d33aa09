"""Putting the rewriter on live modules and taking it off again; a patch that is not live raises."""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphalign.errors import PatchError, PatchNotLiveError
from graphalign.rewrite.alive import Regime, graph_breaks, not_executed, refuse_changed, refuse_dead, refuse_lost, refuse_rounded_input
from graphalign.rewrite.attention import Held, hold, interfaces_of, opaque_attention
from graphalign.rewrite.beside import Path, put, split, substitute
from graphalign.rewrite.caching import HeldCache, hold_cache, index_of
from graphalign.rewrite.capturing import without_idle_hooks
from graphalign.rewrite.checkpointing import one_checkpoint
from graphalign.rewrite.edit import ENTRY, rewrite
from graphalign.rewrite.sharded import entered, is_sharded, keep_unrounded, leave
from graphalign.rewrite.units import UnitEdit
from graphalign.rewrite.wrapped import FULLGRAPH, reduce_ex

RECOMPILE_LIMIT = 256
"""Graphs per patched class: one for each combination of grad mode, train or eval, mask, batch one or more, …"""
ORIGINAL = "_graphalign_original"
"""Attribute of a patched class: the class it was made from."""
_PLAIN = (torch.Tensor, str, int, float, type(None), torch.dtype, torch.device, Held, HeldCache)


class _Running(threading.local):
    """What the innermost patched forward of this thread has done so far."""

    unit: Any = None
    edits: list[int]
    """Edits executed by the unit's forward."""
    unrounded: list[torch.Tensor]
    """Results of the unit's graphs that leave it unrounded."""
    autocast: str | None = None
    """Device type for which autocast is on although the unit's patch is for none."""
    graphs: int = 0
    """Rewritten graphs run, ever."""
    entered: int = 0
    """Patched forwards entered, ever."""
    evaluate: Callable[[torch.fx.GraphModule, tuple[Any, ...]], Any] | None = None
    """Runs a rewritten graph in place of its own code; see `evaluated_by`."""
    units: set[int] | None = None
    """Units that ran since the model around them was called."""

    def __init__(self) -> None:
        self.edits, self.unrounded = [], []


_RUN = _Running()


@contextmanager
def evaluated_by(evaluate: Callable[[torch.fx.GraphModule, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Within the block this thread's rewritten graphs are run by `evaluate(graph, arguments)`."""
    outer, _RUN.evaluate = _RUN.evaluate, evaluate
    try:
        yield
    finally:
        _RUN.evaluate = outer


def entry_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Narrow a value that another unit left unrounded; edits that keep it bypass this cast."""
    return x.to(dtype)


def patched_class(
    cls: type[nn.Module],
    edits: Sequence[UnitEdit],
    dtype: torch.dtype,
    autocast: str | None,
    regime: Regime = (),
    masters: bool = False,
    cuda: bool = False,
) -> type[nn.Module]:
    """A subclass of `cls` whose forward runs with the edits, or raises PatchNotLiveError.

    Args:
        cls: the module's class.
        edits: the unit's edits.
        dtype: the format in which the stock module receives activations.
        autocast: the autocast dtype of the regime, None for none.
        regime: what must stay as it was when the patch was applied, see `alive.regime_of`.
        masters: whether the weights are FP32 outside of a forward.
        cuda: whether the regime's autocast is CUDA's.
    """
    expected = sorted(e.id for e in edits)
    entering = [e for e in edits if e.consumer is not None and e.producer is None and e.kind == "keep"]
    carried, wanted = any(not e.source for e in entering), frozenset(e.source for e in entering if e.source)
    crosses = carried or any(e.consumer is None and not e.source for e in edits)
    names = list(inspect.signature(cls.forward).parameters)[1:]
    find = functools.partial(_find, names)
    problems: list[PatchError | PatchNotLiveError] = []
    near: dict[int, str] = {}
    broken = graph_breaks()

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        if _RUN.unit is None:
            raise PatchError("a patched layer was compiled outside its own forward")
        try:
            if entering:
                _mark_entry(gm)
            result = rewrite(gm, _RUN.unit, edits, _RUN.autocast)
        except Exception as e:
            if not isinstance(e, PatchError | PatchNotLiveError):
                e = PatchError(f"{cls.__name__} could not be rewritten: {type(e).__name__}: {e}").with_traceback(e.__traceback__)
            problems.append(e)
            raise problems[-1] from e
        done = [e.id for e in result.done]
        near.update(result.near)
        forward = gm.forward

        def run(*args: Any) -> Any:
            _RUN.graphs += 1
            _RUN.edits += done
            results = forward(*args) if _RUN.evaluate is None else _RUN.evaluate(gm, args)
            _RUN.unrounded += [results[i] for i in result.unrounded]
            return split(results, result.beside) if result.beside else results

        return run

    def graphalign_forward(self: Any, places: tuple[Path, ...], *args: Any, **kwargs: Any) -> Any:
        for path in places:
            args, kwargs = put(args, kwargs, path, lambda x: entry_cast(x, dtype))
        return cls.forward(self, *args, **kwargs)

    def compiled_forward() -> Callable[..., Any]:
        # a code object of its own, so that Dynamo's cache is not shared between patched classes
        code = graphalign_forward.__code__.replace(co_name=f"graphalign_{cls.__name__}")
        own = types.FunctionType(
            code,
            graphalign_forward.__globals__,
            graphalign_forward.__name__,
            graphalign_forward.__defaults__,
            graphalign_forward.__closure__,
        )
        # recompile_limit and isolate_recompiles are in torch 2.13 but not in its stubs
        options: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
        return torch.compile(own, backend=backend, dynamic=True, **options)

    shared = compiled_forward()
    attentions = sorted({str(value) for _, setting, value in regime if setting == "_attn_implementation" and value is not None})
    interfaces: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()
    indices: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
    single: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()

    def pick(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        # With a state object (a KV cache) Dynamo specialises on the layer's index in it: one graph per layer. In a cache of its
        # own, else every call tries all layers' guards and the recompile limit is reached by depth.
        if all(map(_plain, args)) and all(map(_plain, kwargs.values())):
            return shared
        if self not in single:
            single[self] = compiled_forward()
        return single[self]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        at, x = find(args, kwargs)
        if carried and at is not None and (kept := entered(self, x, dtype)) is not None:
            args, kwargs = put(args, kwargs, (at,), lambda _: kept)
            x = kept
        device = "cpu" if x is None else x.device.type
        idle = refuse_dead(cls, autocast, device, cuda)
        refuse_changed(cls, self, regime, masters)
        places: tuple[Path, ...] = ()
        if wanted:
            args, kwargs, places, found = substitute(args, kwargs, wanted)
            refuse_lost(cls, wanted - found)
        if carried:
            refuse_rounded_input(cls, x, dtype)
            places = (*places, (at,)) if at is not None and (at,) not in places else places
        _RUN.entered += 1
        graphs = _RUN.graphs
        problems.clear()
        outer = _RUN.unit, _RUN.edits, _RUN.unrounded, _RUN.autocast
        _RUN.unit, _RUN.edits, _RUN.unrounded, _RUN.autocast = self, [], [], device if idle else None
        try:
            if self not in interfaces:
                interfaces[self] = interfaces_of(self)
            with without_idle_hooks(self), one_checkpoint(self), opaque_attention(self, interfaces[self], attentions):
                args, kwargs = hold(args), hold(kwargs)
                if x is not None and x.dim() > 1 and not (all(map(_plain, args)) and all(map(_plain, kwargs.values()))):
                    if self not in indices:
                        indices[self] = index_of(self)
                    if (index := indices[self]) is not None:
                        args = tuple(hold_cache(a, index, x.shape[1]) for a in args)
                        kwargs = {k: hold_cache(a, index, x.shape[1]) for k, a in kwargs.items()}
                run = pick(self, args, kwargs)
                result = run(self, places, *args, **kwargs)
            executed = sorted(_RUN.edits)
            if crosses:
                leave(self, result, _RUN.unrounded)
        except torch._dynamo.exc.BackendCompilerFailed:
            if not problems:
                raise
            if new := list(graph_breaks() - broken):  # what the rest of a broken graph lacks is not the cause
                not_executed(cls, self, edits, sorted(_RUN.edits), problems, near, traced=True, compiled=True, breaks=new)
            raise problems[-1] from None  # what failed, where and what to do, without Dynamo's wrapping
        finally:
            _RUN.unit, _RUN.edits, _RUN.unrounded, _RUN.autocast = outer
        if executed != expected:
            compiled = hasattr(run, "_torchdynamo_orig_callable")
            new = list(graph_breaks() - broken)
            not_executed(cls, self, edits, executed, problems, near, traced=_RUN.graphs > graphs, compiled=compiled, breaks=new)
        if _RUN.units is not None:
            _RUN.units.add(id(self))
        return result

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _RUN.entered
        if crosses and is_sharded(self):
            keep_unrounded(self, find if carried else _nothing, dtype)
        result = cls.__call__(self, *args, **kwargs)
        if _RUN.entered == before:
            raise PatchNotLiveError(
                f"{cls.__name__} ran without its patch: its forward was replaced",
                where=f"forward is {getattr(vars(self).get('forward'), '__qualname__', 'inherited')}",
                hint="undo the replacement, or make it call the forward that it replaced",
            )
        return result

    return _subclass(cls, {"forward": functools.wraps(cls.forward)(forward), "__call__": functools.wraps(cls.__call__)(call)})


def root_class(cls: type[nn.Module], count: int, names: Sequence[str]) -> type[nn.Module]:
    """A subclass of the module around all units whose forward raises unless every one of them ran.

    Args:
        cls: the module's class.
        count: number of units in it.
        names: their paths from the module, for the message.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, _RUN.units = _RUN.units, set()
        try:
            result = cls.forward(self, *args, **kwargs)
            ran = _RUN.units
        finally:
            _RUN.units = outer
        if len(ran) < count:
            here = dict(self.named_modules())
            lost = [n for n in names if id(here.get(n)) not in ran]
            raise PatchNotLiveError(
                f"{cls.__name__} ran {len(ran)} of its {count} patched modules",
                where=f"not run, or replaced since the patch was applied: {', '.join(lost[:4]) or 'unknown'}",
                hint="undo the patch, replace the modules, then apply it",
            )
        return result

    return _subclass(cls, {"forward": functools.wraps(cls.forward)(forward)})


class _Kind(type):
    """Of patched classes: those made from one class are one class to `isinstance`, because trainers choose layers to shard by the class of
    the first (accelerate's FSDP2 policy)."""

    def __instancecheck__(cls, x: Any) -> bool:
        return super().__instancecheck__(x) or getattr(type(x), ORIGINAL, type) is vars(cls).get(ORIGINAL)


def _subclass(cls: type[nn.Module], methods: dict[str, Callable[..., Any]]) -> type[nn.Module]:
    """A subclass with the same name, whose methods an outer torch.compile calls instead of tracing them."""
    body: dict[str, Any] = {
        "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, ORIGINAL: cls,
        "__reduce_ex__": reduce_ex(cls),
    }  # fmt: skip
    for name, method in methods.items():
        body[name] = torch._dynamo.disable(method, recursive=False, reason=FULLGRAPH)  # type: ignore[no-untyped-call]
    made: type[nn.Module] = types.new_class(cls.__name__, (cls,), {"metaclass": _Kind}, exec_body=lambda namespace: namespace.update(body))
    return made


def _plain(x: Any) -> bool:
    return isinstance(x, _PLAIN) or (isinstance(x, tuple | list) and all(map(_plain, x)))


def _find(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, torch.Tensor] | tuple[None, None]:
    """The layer's input: the first floating tensor in the order of its parameters."""
    for i, a in enumerate(args):
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            return i, a
    for k in names:
        a = kwargs.get(k)
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            return k, a
    return None, None


def _nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[None, None]:
    """For a unit whose input the patch does not carry unrounded."""
    return None, None


def _mark_entry(gm: torch.fx.GraphModule) -> None:
    """Find the entry casts: traced in `entry_cast`."""
    for node in gm.graph.nodes:
        if node.op == "call_method" and node.target == "to" and "in entry_cast" in str(node.meta.get("stack_trace")):
            node.meta[ENTRY] = True
