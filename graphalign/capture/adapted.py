"""A trainer's module as an engine serves it: without adapter layers, and never compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphalign.capture.recorder import active
from graphalign.errors import BadInputError

EAGERLY = "capture it eagerly: give the module before torch.compile, or take `.compile()` and `torch_compile` out of what builds it"


def refuse_compiled(module: nn.Module) -> None:
    """Refuse a module that is compiled, or has compiled modules inside: fused kernels hide the ops.

    Raises:
        BadInputError: names the first one.
    """
    for name, m in module.named_modules(remove_duplicate=False):
        if _is_compiled(m):
            raise BadInputError(
                "the trainer is compiled (torch.compile), so its ops cannot be recorded",
                where=f"{name or 'the model itself'}, {type(m).__name__}",
                hint=EAGERLY,
            )


def _is_compiled(m: nn.Module) -> bool:
    from torch._dynamo.eval_frame import OptimizedModule

    if isinstance(m, OptimizedModule) or getattr(m, "_compiled_call_impl", None) is not None:
        return True
    # torch.compile(m.forward) leaves this mark on what it returns (torch 2.13)
    return hasattr(vars(m).get("forward"), "_torchdynamo_orig_callable")


@contextmanager
def no_compiled_kernels() -> Iterator[None]:
    """Within the block, code that Inductor compiled refuses to run: functions that are compiled leave no mark on a module.

    Raises:
        BadInputError: such code was called.
    """
    from torch._inductor.output_code import CompiledFxGraph

    before = CompiledFxGraph.__call__

    def refuse(self: Any, inputs: Any) -> Any:
        results = before(self, inputs)
        if active() is None:  # inside an anchor (FlexAttention compiles itself), or behind the recording
            return results
        if not any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in results):
            return results  # FlexAttention's block masks: which blocks are visible, no values
        raise BadInputError(
            "the trainer calls code that torch.compile compiled, so its ops cannot be recorded",
            where="a function or a layer of the trainer, in its forward",
            hint=EAGERLY,
        )

    CompiledFxGraph.__call__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        CompiledFxGraph.__call__ = before  # type: ignore[method-assign]


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The module without PEFT's adapter layers, and a sentence that says so (empty if it has none); put back after the block.

    An engine serves merged weights: one GEMM where the trainer runs the base layer's and the adapter's. What the layers around it round is
    the same, so the base layer alone is what can be compared.

    Raises:
        BadInputError: adapters that cannot be merged into weights (prompt learning).
    """
    if getattr(module, "active_peft_config", None) is not None and getattr(module.active_peft_config, "is_prompt_learning", False):
        raise BadInputError(
            "the trainer's adapter adds tokens (prompt learning) and cannot be merged into weights as an engine serves them",
            where=type(module).__name__,
            hint="give the base model: model.get_base_model()",
        )
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    frozen: list[nn.Parameter] = []
    kinds: dict[str, int] = {}
    try:
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                bare = _bare(child)
                if bare is not child and not _adapts(parent):
                    kinds[type(child).__name__] = kinds.get(type(child).__name__, 0) + 1
                    swapped.append((parent, name, child))
                    parent._modules[name] = bare
        inner: nn.Module = module
        if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
            inner = module.get_base_model()  # type: ignore[operator]
        said = ""
        if swapped:  # PEFT freezes the base; activations have gradients in training all the same, and some kernels depend on it
            frozen += [p for p in inner.parameters() if not p.requires_grad and p.is_floating_point()]
            for p in frozen:
                p.requires_grad_(True)
            what = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
            said = f"PEFT: recorded without its adapter layers ({what}), on the base weights: engines serve adapters merged into them"
        yield inner, said
    finally:
        for p in frozen:
            p.requires_grad_(False)
        for parent, name, child in reversed(swapped):
            parent._modules[name] = child


def _adapts(m: nn.Module) -> bool:
    """Whether PEFT put the module in another's place: a tuner layer, or a wrapper of a module that is trained as a whole."""
    return any(
        c.__module__.split(".")[0] == "peft" and c.__name__ in ("BaseTunerLayer", "AuxiliaryTrainingWrapper") for c in type(m).__mro__
    )


def _bare(m: nn.Module) -> nn.Module:
    """What a tuner layer was put in the place of; the module itself if it is none."""
    while _adapts(m):
        inner = getattr(m, "base_layer", None)
        if inner is None:
            inner = getattr(m, "original_module", None)
        if not isinstance(inner, nn.Module):
            return m
        m = inner
    return m
