"""Makes a Transformers attention call one node, `graphalign.attention`.

Transformers (4.48 and later; seen on 5.19) models look their attention function up in `AttentionInterface`, by `get_interface` or, in
older remote code, by subscript. While a recorder is active both return the function wrapped as a composite anchor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphalign.capture.flash_calls import kernel_call
from graphalign.capture.probe import FUNCTION, note, note_call, probing
from graphalign.capture.recorder import active, anchor_scope
from graphalign.engines.flash import stands_in

_RENAMED = {"s_aux": "sinks"}
_KEPT = frozenset({"sliding_window", "softcap", "s_aux", "sinks", "dropout", "position_bias", "num_key_value_groups"})
_SDPA_DROPS = frozenset({"softcap", "s_aux", "sinks"})
"""What `sdpa_attention_forward` takes in `**kwargs` and never reads (Transformers 5.19): Gemma 2 under `sdpa` has no soft-cap."""


@contextmanager
def composite_attention() -> Iterator[None]:
    """Within the block, attention functions looked up by models are composite anchors. Undone on any exit.

    Does nothing if Transformers is not installed.
    """
    try:
        from transformers.modeling_utils import AttentionInterface as cls
    except ImportError:
        yield
        return
    saved = {name: cls.__dict__.get(name) for name in ("get_interface", "__getitem__")}
    get_interface, getitem = cls.get_interface, cls.__getitem__

    def patched_get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return wrap(get_interface(self, attn_implementation, default), attn_implementation)

    def patched_getitem(self: Any, key: str) -> Callable[..., Any]:
        return wrap(getitem(self, key), key)

    cls.get_interface = patched_get_interface
    cls.__getitem__ = patched_getitem
    try:
        yield
    finally:
        for name, original in saved.items():
            if original is None:
                delattr(cls, name)
            else:
                setattr(cls, name, original)


@contextmanager
def one_sequence() -> Iterator[None]:
    """Within the block, jumps in `position_ids` are not taken for the borders of packed sequences.

    Transformers 5 (seen on 5.19) looks for position steps other than 1 when there is no attention mask, and builds a block-diagonal
    mask; so does its function for FlashAttention. Recorded positions are spread, not packed; without this every attention call would take
    a mask it does not take in training.
    """
    try:
        from transformers import masking_utils, modeling_flash_attention_utils
    except ImportError:
        yield
        return
    saved = getattr(masking_utils, "find_packed_sequence_indices", None)
    if saved is None:  # before packed detection existed
        yield
        return
    flash: Any = modeling_flash_attention_utils
    packed = flash._is_packed_sequence
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    flash._is_packed_sequence = lambda position_ids, batch_size: False
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = saved
        flash._is_packed_sequence = packed


def wrap(fn: Callable[..., Any], implementation: str | None) -> Callable[..., Any]:
    """`fn(module, query, key, value, attention_mask, **kwargs)` as a composite anchor.

    Query, key and value are (B, H, T, D) as the model passes them; the first result is (B, T, H, D).
    """
    if torch.compiler.is_compiling():  # Dynamo traces this lookup: compiled code must hold the model's own function
        return fn
    if (active() is None and not probing()) or getattr(fn, "_graphalign_original", None) is not None:
        return fn

    @functools.wraps(fn)
    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if probing():
            if "flash" in str(implementation):
                result, found = kernel_call(
                    functools.partial(fn, module, query, key, value, *args, **kwargs), str(implementation), query.shape[2], key.shape[2]
                )
                note("function", lambda: found)
                return result
            given = args[0] if args else kwargs.get("attention_mask")
            return note_call(module, query, key, value, given, attributes(module, query, key, given, kwargs, implementation))
        if stands_in(implementation) and (recorder := active()) is not None:
            recorder.note(f"{implementation} is not installed here: a stand-in attends, with the same operands and parameters")
        run = functools.partial(fn, module, query, key, value, *args, **kwargs)
        mask = args[0] if args else kwargs.get("attention_mask")
        operands = _as_autocast_does(fn, module, (query, key, value), args, kwargs)
        return anchor_scope(FUNCTION, run, operands, attributes(module, query, key, mask, kwargs, implementation))

    attention._graphalign_original = fn  # type: ignore[attr-defined]
    return attention


def _as_autocast_does(
    fn: Callable[..., Any], module: Any, operands: tuple[torch.Tensor, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Under autocast, the operands as the kernel inside reads them: the cast is part of the anchor's inside and would not be recorded.
    They are for the record only: the model runs on what it passes.

    Whether autocast casts there is tried: with operands cast beforehand the result must be bitwise the same.
    """
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    if all(x.dtype == dtype for x in operands):
        return operands
    recorder = active()
    assert recorder is not None
    with recorder.paused():
        plain, cast = (_first(fn(module, *given, *args, **kwargs)) for given in (operands, tuple(x.to(dtype) for x in operands)))
        alike = plain.dtype == cast.dtype and torch.equal(plain, cast)
    if not alike:
        recorder.note(f"attention under autocast does not cast its operands to {dtype}; they are taken as the model passes them")
        return operands
    return tuple(x.to(dtype) for x in operands)


def _first(result: Any) -> torch.Tensor:
    found = result[0] if isinstance(result, tuple | list) else result
    assert isinstance(found, torch.Tensor)
    return found


def attributes(
    module: Any, query: torch.Tensor, key: torch.Tensor, mask: object, kwargs: dict[str, Any], implementation: str | None
) -> dict[str, Any]:
    """The node's keyword arguments.

    Always `implementation`, `attention_mask` (given or not), `scaling`, `is_causal`, `enable_gqa`; if the model passed them and the
    implementation uses them `sliding_window`, `softcap`, `sinks` (a value reference), `position_bias`, `dropout`. `ignored` lists
    what the model asks for and the implementation drops.
    """
    scaling = kwargs.get("scaling")
    causal = kwargs.get("is_causal")
    attrs: dict[str, Any] = {
        "implementation": implementation,
        "attention_mask": mask is not None,
        "scaling": float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        "is_causal": bool(causal if causal is not None else getattr(module, "is_causal", True)),
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    ignored: list[str] = []
    for name, x in kwargs.items():
        if name in attrs or x is None or (name == "dropout" and not x):
            continue
        if implementation == "sdpa" and name in _SDPA_DROPS:
            ignored.append(_RENAMED.get(name, name))
        elif name in _KEPT:
            attrs[_RENAMED.get(name, name)] = x
    if ignored:
        attrs["ignored"] = ignored
        recorder = active()
        if recorder is not None:
            recorder.note(f"attention implementation {implementation} ignores {', '.join(ignored)}, which the model asks for")
    return attrs
