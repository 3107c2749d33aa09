"""FlexAttention without Inductor, while a trainer is captured: its block masks and its kernel are compiled where they are first called.

What is compiled there is no part of the model's graph. Uncompiled they compute the same; attention is an anchor, so its numbers are not
compared. On the CPU it refuses operands with gradients (torch 2.13); no backward runs while recording, so it gets them without, and its
result has one again: some kernels behind it depend on that.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def uncompiled_flex() -> Iterator[None]:
    """Within the block, FlexAttention and its masks run uncompiled, and no dispatch mode sees the masks' making. Undone on any exit."""
    try:
        from torch.nn.attention import flex_attention as flex
    except ImportError:  # before torch 2.5
        yield
        return
    make, attend = flex.create_block_mask, flex.flex_attention

    def create_block_mask(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return make(*args, **{**kwargs, "_compile": False})

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, training: bool = False, **kwargs: Any) -> Any:
        graded = torch.is_grad_enabled() and query.device.type == "cpu" and any(x.requires_grad for x in (query, key, value))
        if not graded:
            return attend(query, key, value, **kwargs)
        result = attend(query.detach(), key.detach(), value.detach(), **kwargs)
        return result.requires_grad_() if isinstance(result, torch.Tensor) else result

    swapped: list[tuple[Any, str, Any]] = [(flex, "create_block_mask", create_block_mask)]
    try:
        from transformers import masking_utils
        from transformers.integrations import flex_attention as integration
    except ImportError:
        pass
    else:
        swapped += [(masking_utils, "create_block_mask", create_block_mask), (integration, "compile_friendly_flex_attention", attention)]
    saved = [(module, name, getattr(module, name, None)) for module, name, _ in swapped]
    try:
        for module, name, new in swapped:
            if hasattr(module, name):
                setattr(module, name, new)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            yield
    finally:
        for module, name, old in saved:
            if old is not None:
                setattr(module, name, old)
