"""Names the engine argument that vLLM does not take: a usage error, told before the model is built.

Works beside `engine_script` in the engine's process, so it needs only the standard library, torch and vLLM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

Arguments = Mapping[str, Any]
LOADED_BY_US = {"auto", "safetensors", "hf"}
"""Load formats that are what graphalign's loader does anyway."""
TRIALS = 8
"""Most arguments that are left out one by one."""
FORM = "change it, or leave it out; VALUE is JSON where it parses, else a string"


def complete(request: dict[str, Any], given: Arguments, cut: Callable[[str, int], dict[str, Any]]) -> dict[str, Any]:
    """All arguments of the engine: a capture's own defaults, and what a user gave; `cut` is `engine_script.layer_overrides`."""
    arguments = {
        "dtype": "bfloat16", "skip_tokenizer_init": True, "max_num_seqs": 8, "max_num_batched_tokens": 512,
        "enable_prefix_caching": False, "seed": 0, **given, "model": request["model"], "load_format": "graphalign",
    }  # fmt: skip
    with open(os.path.join(request["model"], "config.json"), "rb") as f:
        config = json.load(f)
    limit = config.get("max_position_embeddings") or (config.get("text_config") or {}).get("max_position_embeddings") or 512
    arguments.setdefault("max_model_len", min(512, limit) if isinstance(limit, int) else 512)
    if isinstance(most := arguments["max_num_batched_tokens"], int):
        arguments["max_num_batched_tokens"] = max(most, 16)
    return arguments | cut_layers(request, given, cut)


def cut_layers(request: dict[str, Any], given: Arguments, cut: Callable[[str, int], dict[str, Any]]) -> dict[str, Any]:
    """`hf_overrides` that keep the first layers, if so many are asked for; a user's that are no object are left for vLLM to refuse."""
    overrides = given.get("hf_overrides") or {}
    if request.get("layers") is None or not isinstance(overrides, dict):
        return {}
    return {"hf_overrides": {**cut(request["model"], request["layers"]), **overrides}}


def wrong_name(arguments: Arguments) -> tuple[str, str, str] | None:
    """What is wrong with the names of a user's arguments: (what, where, hint), or None.

    Names are those of `EngineArgs`, and what `vllm.LLM` takes beside them.
    """
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    taken = {f.name for f in dataclasses.fields(EngineArgs)}
    beside = inspect.signature(LLM.__init__).parameters.items()
    known = taken | {n for n, p in beside if n != "self" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for name, value in arguments.items():
        where = f"--engine-arg {name}={value}"
        if name == "model":
            return "the model is the command's argument, not the engine's", where, "give it as MODEL"
        if name == "load_format" and value not in LOADED_BY_US:
            hint = "leave it out; for random weights give --weights dummy"
            return f"load_format={value} cannot be had: the capture loads the weights itself", where, hint
        if name not in known:
            other = "arguments are those of vllm.LLM (`vllm serve --help=all` lists them)"
            return f"this vLLM's engine has no argument {name!r}", where, _near(name, known) or other
        inner = _fields_of(EngineArgs, name)
        for key in value if isinstance(value, dict) and inner else ():  # vllm.LLM leaves out what it does not know (0.32)
            if key not in inner:
                return f"this vLLM's {name} has no entry {key!r}", where, _near(str(key), inner) or "see vLLM's documentation of it"
    return None


def _near(name: str, known: set[str]) -> str:
    found = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(found)}?" if found else ""


def _fields_of(owner: Any, name: str) -> set[str]:
    """Names of what a config object that is an argument holds; empty for other arguments."""
    field = next((f for f in dataclasses.fields(owner) if f.name == name), None)
    if field is None or field.default_factory is dataclasses.MISSING:
        return set()
    with contextlib.suppress(Exception):
        default = field.default_factory()
        return {f.name for f in dataclasses.fields(default)} if dataclasses.is_dataclass(default) else set()
    return set()


def make_config(complete: Callable[[dict[str, Any]], dict[str, Any]], arguments: Arguments) -> Any:
    """The engine's config with a user's arguments, which `complete` adds a capture's own to."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    return EngineArgs(**complete(dict(arguments))).create_engine_config(usage_context=UsageContext.LLM_CLASS)


def at_fault(error: BaseException, arguments: Arguments, make: Callable[[Arguments], Any]) -> tuple[str, str, str] | None:
    """Which of a user's arguments makes the engine's config fail: (what, where, hint).

    None if it does not fail, or fails without them too: then they are not what is wrong.

    Args:
        error: what making the config raised.
        arguments: the user's.
        make: makes the config of the engine with some of these arguments.
    """
    if not arguments or _fits(make, arguments) or not _fits(make, {}):
        return None
    alone = [n for n in list(arguments)[:TRIALS] if len(arguments) > 1 and _fits(make, {k: v for k, v in arguments.items() if k != n})]
    names = alone[:1] if alone else list(arguments)
    where = ", ".join(f"--engine-arg {n}={arguments[n]}" for n in names)
    plural = "arguments do" if len(names) > 1 else "argument does"
    return f"the engine's {plural} not fit: {reason(error)}", where, FORM


def _fits(make: Callable[[Arguments], Any], arguments: Arguments) -> bool:
    with contextlib.suppress(Exception):
        make(arguments)
        return True
    return False


def reason(error: BaseException) -> str:
    """vLLM's own words, in one line; of pydantic's message the field and what it wants."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        with contextlib.suppress(Exception):
            first = errors()[0]
            at = ".".join(str(x) for x in first["loc"])
            words = str(first["msg"]).removeprefix("Value error, ").strip()
            return f"{at}: {words}" if at else words
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[0]}"[:400]
