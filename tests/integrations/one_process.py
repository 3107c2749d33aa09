"""Run in the own environment of OpenRLHF or SkyRL: the stack's own class builds the model, patched by the hook, against the patch by hand.

Arguments: `openrlhf` or `skyrl`, and a folder with the model. `GRAPHALIGN_PATCH` names the patch. FlashAttention, which neither runs on a
CPU nor is needed for attention by `sdpa`, is an empty stand-in; both stacks import it for packing.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from pathlib import Path
from typing import Any

import torch
import typing_extensions

import graphalign
from graphalign.errors import PatchError
from tests.rewrite.tiny import by_hand, tokens


def stand_in_flash_attention() -> None:
    names = {
        "flash_attn": (), "flash_attn.utils": (), "flash_attn.utils.distributed": ("all_gather",),
        "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    }  # fmt: skip
    for name, members in names.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = None
        for member in members:
            setattr(sys.modules[name], member, None)


def builders(stack: str) -> tuple[type, dict[str, Any]]:
    """The class that builds models, hooked, and its arguments."""
    if stack == "openrlhf":
        from graphalign.integrations import openrlhf

        openrlhf.install()
        from openrlhf.models import Actor

        return Actor, {"attn_implementation": "sdpa", "param_dtype": "bf16"}
    # skyrl 0.3.0 asks pydantic for what only TypedDict of Python 3.12 has
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    from graphalign.integrations import skyrl

    skyrl.install()
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper

    return HFModelWrapper, {"bf16": True}


def step(model: Any, x: torch.Tensor) -> list[torch.Tensor | None]:
    """What the stack's own forward returns, and the gradients that it gives."""
    model.train()
    out = model(x, torch.ones_like(x[:, 1:]) if "Actor" in type(model).__name__ else x.shape[1] - 1, torch.ones_like(x))
    out = out[0] if isinstance(out, tuple) else out
    out.sum().backward()
    return [out.detach(), *(p.grad for p in model.model.parameters())]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all((u is None and v is None) or torch.equal(u, v) for u, v in zip(a, b, strict=True))


def main() -> None:
    torch.set_num_threads(1)
    stand_in_flash_attention()
    stack, folder = sys.argv[1], str(Path(sys.argv[2]) / "model")
    cls, options = builders(stack)
    init = cls.__init__
    found = {"hooked": inspect.unwrap(init) is not init}
    for lora in (0, 4):
        options["lora_rank"] = lora
        options["target_modules"] = ["q_proj", "up_proj"] if lora else None
        torch.manual_seed(0)
        model = cls(folder, **options)
        cls.__init__ = inspect.unwrap(init)  # type: ignore[misc]
        torch.manual_seed(0)
        hand, stock = cls(folder, **options), cls(folder, **options)
        cls.__init__ = init  # type: ignore[misc]
        by_hand(hand.model)
        hand.load_state_dict(model.state_dict())
        stock.load_state_dict(model.state_dict())
        for reentrant in (True, False):
            for m in (model, hand, stock):
                m.gradient_checkpointing_enable({"use_reentrant": reentrant})
                m.model.enable_input_require_grads()
                m.zero_grad()
            got, want, plain = (step(m, tokens(2, 11)) for m in (model, hand, stock))
            name = f"LoRA {lora}, reentrant {reentrant}"
            found[name] = same(got, want) and any(g is not None for g in want[1:])
            found[f"{name}, stock differs"] = not torch.equal(plain[0], want[0])  # type: ignore[arg-type]
        found[f"LoRA {lora}, undone"] = graphalign.undo(model) > 0
    import os

    del os.environ["GRAPHALIGN_PATCH"]
    try:
        cls(folder, **options)
    except PatchError as e:
        found["without a patch it is an error"] = "GRAPHALIGN_PATCH is not set" in str(e)
    for what, holds in found.items():
        print(f"{'holds' if holds else 'FAILS'}: {what}")


if __name__ == "__main__":
    main()
