"""Transformers' factory of models, with a patch on what it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def patched_auto(put_on: Callable[[nn.Module, str], None], what: str, module: str) -> Any:
    """A subclass of `AutoModelForCausalLM` whose `from_pretrained` puts the patch on the model before it returns it.

    Args:
        put_on: called with the model and `what`.
        what: the model's name in messages.
        module: the module that the class is found in, for pickles by name.
    """
    from transformers import AutoModelForCausalLM

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(*args, **kwargs)
        put_on(model, what)
        return model

    body = {"__module__": module, "__qualname__": "AutoModelForCausalLM", "from_pretrained": classmethod(from_pretrained)}
    return type("AutoModelForCausalLM", (AutoModelForCausalLM,), body)
