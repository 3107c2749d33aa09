"""What attention is given in a forward of many tokens: masks and flags as the model's own code builds them, longer than any window.

The recorded forward has a few tokens, fewer than any window. A second one goes through the model's code with numbers that are never
computed: all that comes from an embedding or a matrix product is a zero of the right shape. Masks depend on positions, not on such
numbers, so they are built as in training, and it costs little. Where a model writes attention out op by op, the product of two
activations is made of real zeros: what reaches the softmax then is the mask.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from graphalign.capture.visible import chosen, visible
from graphalign.evaluate.aten import ATTENTIONS, base
from graphalign.ir.training import Node

FUNCTION = "graphalign.attention"
"""Op of the node that stands for a call of an attention function."""
SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
LEAST, MOST = 64, 8194
"""Tokens of the probe: as many as exceed the windows that the config names, by two."""
LARGEST = 1 << 28
"""Bytes of the scores of one attention that is written out op by op."""
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "embedding", "_grouped_mm", "convolution"})
_FACTORS = {"mm": (0, 1), "bmm": (0, 1), "matmul": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""Products to the positions of their factors."""

Event = dict[str, Any]
"""Something that may be attention: `kind` (`function`, `op`) and `visible`, see `visible.visible`."""


@dataclass
class Probe:
    """A forward of many tokens, as far as it got."""

    queries: list[int]
    """Which queries are looked at."""
    events: list[Event] = field(default_factory=list)
    known: dict[Any, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    """What masks that were looked at let through, by their identity and the flags; with the mask, so that it stays taken."""

    def visible(self, tokens: int, keys: int, mask: Any, given: dict[str, Any]) -> dict[str, Any]:
        """See `visible.visible`. Layers share their masks, which are looked at once."""
        flags = [given.get(k) for k in ("implementation", "is_causal", "window")]
        version = mask._version if isinstance(mask, torch.Tensor) else None
        key = (tokens, keys, id(mask), version, repr(flags), given.get("position_bias") is None)
        if key not in self.known:
            self.known[key] = mask, visible(tokens, keys, mask, given, self.queries if tokens == self.queries[-1] + 1 else None)
        return self.known[key][1]


_PROBE: list[Probe] = []


def probing() -> bool:
    """Whether a probe runs: attention functions are asked for their masks only."""
    return bool(_PROBE)


def kind(op: str) -> str | None:
    """What sort of event a node of a training graph is, None for what is no attention."""
    if op == FUNCTION:
        return "function"
    return "op" if base(op) in SOFTMAX | ATTENTIONS else None


def named_edges(config: Any) -> tuple[int, ...]:
    """The windows and chunks that a config names."""
    fields = vars(config).items() if config is not None else ()
    return tuple(sorted({x for k, x in fields if ("window" in k or "chunk" in k) and type(x) is int and x > 0}))


def probe_length(config: Any, positions: int) -> int:
    """Tokens that cover both edges of every window and chunk that a config names, as far as the positions reach."""
    return max(2, min(max([LEAST, *(n + 2 for n in named_edges(config) if n + 2 <= MOST)]), positions))


def probe(forward: Callable[[], Any], tokens: int, device: torch.device, edges: tuple[int, ...] = ()) -> list[Event]:
    """Run a forward of so many tokens without computing the model's numbers, and list what may be attention, in order.

    Args:
        forward: the model's.
        tokens: number of tokens that it is given.
        device: where the model is.
        edges: windows and chunks that its config names.
    """
    drawing = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with _listening(Probe(chosen(tokens, edges))) as found, drawing, torch.no_grad(), _Zeros(tokens, device):
        forward()
    return found.events


def attach(nodes: tuple[Node, ...], seen: list[Event]) -> list[tuple[Node, dict[str, Any]]] | None:
    """Which node each event is, with what was seen; None if they are not the same calls."""
    at = [(node, k) for node in nodes if (k := kind(node.op)) is not None]
    if [k for _, k in at] != [e["kind"] for e in seen]:
        return None
    return [(node, e["visible"]) for (node, _), e in zip(at, seen, strict=True)]


@contextmanager
def _listening(found: Probe) -> Iterator[Probe]:
    _PROBE.append(found)
    try:
        yield found
    finally:
        _PROBE.pop()


def note_call(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, given: dict[str, Any]
) -> tuple[torch.Tensor, None]:
    """Write one call of an attention function down; `given` is what `attention.attributes` says of it. Returns a result of its shape."""
    note("function", lambda: seen_by(query.shape[2], key.shape[2], mask, given))
    out = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return query.new_zeros(()).expand(out), None


def note(kind: str, look: Callable[[], dict[str, Any]]) -> None:
    """Add an event, with what `look` finds or why it fails."""
    try:
        found = look()
    except Exception as e:  # masks come from the model's own code
        found = {"unknown": f"{type(e).__name__}: {e}".splitlines()[0][:200]}
    _PROBE[-1].events.append({"kind": kind, "visible": found})


def seen_by(tokens: int, keys: int, mask: Any, given: dict[str, Any]) -> dict[str, Any]:
    """`visible.visible` of the probe that runs."""
    return _PROBE[-1].visible(tokens, keys, mask, given)


class _Zeros(TorchDispatchMode):
    """Results of embeddings and matrix products, and all that is made of them, are zeros without memory; scores are zeros with."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        super().__init__()
        self.tokens, self.device = tokens, device
        self.made: dict[torch.dtype, torch.Tensor] = {}
        self.known: set[int] = set()
        self.written: list[weakref.ref[torch.Tensor]] = []
        """Real tensors that something that was not computed was written into: they are no numbers any more."""
        self.scores: Any = WeakTensorKeyDictionary()
        """Tensors that are made of products of two activations, masks and constants, and of nothing else: as if all products were 0."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        name = base(func._schema.name.replace("::", "."))
        if name in SOFTMAX | ATTENTIONS:
            self._attend(name, func, args, kwargs)
        live = any(self._is_made(t) or t in self.scores for t in tensors)
        product = name in _PRODUCTS and any(t.is_floating_point() for t in tensors)
        if not product and not live:
            return func(*args, **kwargs)
        if name in _FACTORS and all(self._is_made(args[i]) or args[i] in self.scores for i in _FACTORS[name]):
            if (made := self._product(name, func, args, kwargs)) is not None:
                return made
        elif not product and not any(self._is_made(t) for t in tensors) and all(_bytes(t) <= LARGEST for t in tensors):
            return self._score(func(*args, **kwargs))
        if func._schema.is_mutable:
            target = args[0] if args else kwargs.get("out")
            if isinstance(target, torch.Tensor) and not self._is_made(target):
                self.written = [r for r in self.written if r() is not None] + [weakref.ref(target)]
                self.scores.pop(target, None)
            return target
        meta = self._meta(func, args, kwargs)
        return func(*args, **kwargs) if meta is None else pytree.tree_map_only(torch.Tensor, self._zero, meta)

    def _meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result on the meta device; None where its size depends on numbers."""
        try:
            meta = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (args, kwargs))
            if "device" in meta[1]:
                meta[1]["device"] = torch.device("meta")
            return func(*meta[0], **meta[1])
        except Exception:
            return None

    def _product(self, name: str, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Zeros for a product of two activations, with what is added to it; None if that is too large or not known."""
        like = self._meta(func, args, kwargs)
        if not isinstance(like, torch.Tensor) or _bytes(like) > LARGEST:
            return None
        made = torch.zeros(like.shape, dtype=like.dtype, device=self.device)
        if name in ("addmm", "baddbmm"):
            if self._is_made(args[0]):
                return None
            made += args[0] * kwargs.get("beta", 1)
        self.scores[made] = True
        return made

    def _score(self, result: Any) -> Any:
        for t in pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                self.scores[t] = True
        return result

    def _attend(self, name: str, func: Any, args: Any, kwargs: Any) -> None:
        given = {**dict(zip([a.name for a in func._schema.arguments], args, strict=False)), **kwargs}
        if name in SOFTMAX:
            x = given.get("self", args[0])
            note("op", lambda: self._softmax(x, given.get("dim", -1)))
            return
        query, key = args[0], args[1]
        mask = given.get("attn_mask", given.get("attn_bias"))

        def look() -> dict[str, Any]:
            if mask is not None and self._is_made(mask):
                return {"unknown": "its mask is computed with the model's numbers"}
            found = seen_by(query.shape[-2], key.shape[-2], _four(mask), {"implementation": "sdpa", "is_causal": given.get("is_causal")})
            return found | ({"dropout": p} if (p := given.get("dropout_p")) else {})

        note("op", look)

    def _softmax(self, x: torch.Tensor, dim: int) -> dict[str, Any]:
        """What a softmax's operand says of masks."""
        if x not in self.scores:
            return {"unknown": "its scores are not made of products, masks and constants alone, or are too many"}
        if x.shape[-2:] != (self.tokens, self.tokens) or dim not in (-1, x.dim() - 1):
            return {"unknown": f"scores of the shape {list(x.shape)} for {self.tokens} tokens"}
        return visible(self.tokens, self.tokens, _four(x), {"implementation": "eager"}, _PROBE[-1].queries)

    def _is_made(self, t: torch.Tensor) -> bool:
        if t.is_meta or t.layout != torch.strided:
            return False
        at = t.untyped_storage().data_ptr()
        return at in self.known or any((w := r()) is not None and w.untyped_storage().data_ptr() == at for r in self.written)

    def _zero(self, like: torch.Tensor) -> torch.Tensor:
        if like.dtype not in self.made:
            self.made[like.dtype] = torch.zeros((), dtype=like.dtype, device=self.device)
            self.known.add(self.made[like.dtype].untyped_storage().data_ptr())
        return self.made[like.dtype].expand(like.shape)


def _bytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def _four(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask as [1, heads, queries, keys]."""
    return mask if mask is None else mask.reshape(1, -1, *mask.shape[-2:])
