"""Captures the training side: builds or takes a model, runs one forward under the recorder, writes down the regime."""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from graphalign.capture.adapted import no_compiled_kernels, refuse_compiled, without_adapters
from graphalign.capture.attention import composite_attention, one_sequence
from graphalign.capture.finite import refuse_broken, require_numbers
from graphalign.capture.flex import uncompiled_flex
from graphalign.capture.probe import FUNCTION, attach, kind, named_edges, probe, probe_length
from graphalign.capture.recorder import Recorder, Watch, anchor_scope, record
from graphalign.capture.shorter import alike
from graphalign.engines.model_folder import code_left_out, has_weights
from graphalign.engines.products import runner
from graphalign.engines.trainer import build_trainer, parse_dtype
from graphalign.errors import BadInputError, CaptureFailedError, GraphalignError
from graphalign.ir.asked import questions
from graphalign.ir.config import config_digest
from graphalign.ir.frames import file_digest, is_modeling_file, relative_file
from graphalign.ir.training import Header, Mask, Node, TrainingGraph
from graphalign.logprobs import DEFAULT, LogProbabilities, as_trained, find_function, name_of, refuse_nan, take
from graphalign.rewrite.like_cuda import AUTOCAST_DEVICE, SAID, like_cuda

DEFAULT_POSITIONS = 2048
"""Range of positions for a model whose config names none."""


def capture_training(
    model: str | os.PathLike[str] | nn.Module | None,
    *,
    factory: str | None = None,
    layers: int | None = None,
    dtype: str = "bfloat16",
    autocast: str | None = None,
    autocast_device: str | None = None,
    attention: str = "sdpa",
    weights: str | None = None,
    tokens: int = 8,
    grad: bool = True,
    logprobs: str = DEFAULT,
    reach: int | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
    then: Callable[[nn.Module], None] | None = None,
) -> TrainingGraph:
    """Record one eager forward of `tokens` tokens (batch 1).

    Args:
        model: a model folder or a module; with `factory` the folder it is called with, or None.
        factory: `package.module:function` that returns the module, imported with the working directory on the path.
        layers, dtype, attention, weights, trust_remote_code: how a model folder is built, see `build_trainer`.
        autocast: run under `torch.autocast` with this dtype.
        autocast_device: "cuda" if training runs on a GPU: a model on the CPU is then recorded with CUDA's autocast, see `like_cuda`.
        logprobs: name of the trainer's log-probability function, see `find_function`.
        grad: record with gradients enabled, as in training. Some kernels differ without (`matmul` folds batches only with it).
        reach: number of positions to spread the tokens over: the engine's `max_model_len`. RoPE variants switch on the longest position.
            Without it, the model's.
        progress: called with a line per stage.
        then: called with the module after it was recorded.

    Raises:
        BadInputError: a wrong option, folder, config or factory; a quantised or compiled model; NaN in its weights.
        CaptureFailedError: the model could not be built, its forward failed, or its logits are no numbers.
    """
    say = progress or (lambda line: None)
    started, left = time.perf_counter(), ""
    if autocast is not None:
        parse_dtype(autocast)
    if tokens < 2:
        raise BadInputError(f"tokens must be at least 2, not {tokens}")
    if factory is not None:
        say(f"calling {factory}")
        module = call_factory(factory, None if isinstance(model, nn.Module) else model)
        name = factory
    elif isinstance(model, nn.Module):
        module, name = model, type(model).__name__
    elif model is not None:
        say(f"building {Path(model).name}")
        module = build_trainer(model, layers, dtype, attention, weights, trust_remote_code=trust_remote_code, read_only=True)
        name = Path(model).resolve().name
        if weights != "dummy" and has_weights(Path(model)):  # random ones of a large model are not to be read through
            refuse_broken(module)
        left = "" if trust_remote_code else code_left_out(Path(model))
    else:
        raise BadInputError("no model to capture", hint="give a model folder, a module, or factory=package.module:function")
    built = time.perf_counter()
    refuse_compiled(module)
    with without_adapters(module) as (bare, said), no_compiled_kernels():
        say(said or f"recording {tokens} tokens")
        graph = record_forward(
            bare, tokens=tokens, autocast=autocast, grad=grad, name=name, logprobs=logprobs, reach=reach, autocast_device=autocast_device
        )
    header = graph.header
    timings = {"build": built - started, "record": time.perf_counter() - built}
    notes = (*(note for note in (said, left) if note), *header.notes)
    if then is not None:
        then(module)
    return graph.model_copy(update={"header": header.model_copy(update={"timings": timings, "notes": notes})})


def record_forward(
    module: nn.Module,
    *,
    tokens: int = 8,
    autocast: str | None = None,
    autocast_device: str | None = None,
    grad: bool = True,
    name: str = "",
    ids: Sequence[int] | None = None,
    watch: Watch | None = None,
    logprobs: str | LogProbabilities | None = DEFAULT,
    reach: int | None = None,
) -> TrainingGraph:
    """Record one forward of a module as it stands. Its mode (train or eval) is not changed; see `capture_training`.

    Args:
        ids: a real prompt's tokens, at positions 0, 1, …; without it, made-up ones spread over the vocabulary and the positions.
        watch: sees the tensors of every op, see `recorder.Watch`.
        logprobs: the trainer's log-probability function or its name, recorded behind the logits; None to end with the logits.
        reach: number of positions, see `capture_training`; without it, the model's.
    """
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocab = int(getattr(text, "vocab_size", 0) or _embedding_size(module) or 256)
    positions = int(getattr(text, "max_position_embeddings", 0) or getattr(text, "n_positions", 0) or DEFAULT_POSITIONS)
    if ids is not None:
        tokens = positions = _checked_length(ids, vocab, positions)
    end = positions if ids is not None else reach or positions
    given, places = (spread_ids(vocab, tokens), spread_positions(end, tokens)) if ids is None else (list(ids), list(range(tokens)))
    anchor = next(module.parameters(), None)
    device = anchor.device if anchor is not None else torch.device("cpu")
    inputs = {
        "input_ids": torch.tensor([given], device=device),
        "position_ids": torch.tensor([places], device=device),
    }
    function = find_function(logprobs) if isinstance(logprobs, str) else logprobs
    args, kwargs, notes = call_arguments(module, inputs)
    cast = torch.autocast(device.type, dtype=parse_dtype(autocast) if autocast else None, enabled=autocast is not None)
    emulated = autocast is not None and autocast_device == "cuda" and device.type == "cpu"
    try:
        with (
            one_sequence(),
            uncompiled_flex(),
            composite_attention(),
            torch.set_grad_enabled(grad),
            like_cuda(emulated),
            cast,
            record(module, inputs, watch, runner(module)) as recorder,
        ):
            output = logits_of(module(*args, **kwargs), module)
            with recorder.paused():
                require_numbers(output, module, lambda: module(*args, **kwargs))
            if function is not None:
                output = _tail(recorder, as_trained(function, autocast), output, inputs["input_ids"])
    except GraphalignError:
        raise
    except Exception as e:
        raise CaptureFailedError(
            f"the model's forward failed: {type(e).__name__}: {e}",
            where=f"{type(module).__name__}, {tokens} tokens, positions 0 to {end - 1}",
            hint="run it once without graphalign on the same inputs; give a factory that returns a module whose forward takes input_ids",
        ) from e
    recording = recorder.finish([output])
    nodes = recording.nodes
    masks: tuple[Mask, ...] = ()
    if ids is None and not recorder.traced:  # a patched model's compiled layers would be compiled again for more tokens
        nodes, masks = _with_masks(module, recording.nodes, text, positions, device)
    shorter: Literal["", "same", "other"] = ""
    if ids is None and questions(recording.inputs, nodes):
        inputs["position_ids"] = torch.arange(tokens, device=device)[None]
        args, kwargs, _ = call_arguments(module, inputs)
        with (
            one_sequence(),
            uncompiled_flex(),
            composite_attention(),
            torch.set_grad_enabled(grad),
            like_cuda(emulated),
            cast,
            record(module, inputs, None, runner(module)) as recorder,
        ):
            output = logits_of(module(*args, **kwargs), module)
        shorter = "same" if alike(recording, recorder.finish([output])) else "other"
    base = _unwrapped(module)
    sources = dict(recording.files)
    file = inspect.getsourcefile(type(base)) if type(base).__module__ != "builtins" else None
    if file and is_modeling_file(file):
        sources.setdefault(relative_file(file), file_digest(file))
    header = Header(
        versions=_versions(),
        regime=regime(module, config, autocast=autocast, grad=grad)
        | ({AUTOCAST_DEVICE: "cuda"} if emulated else {})
        | _tail_regime(logprobs),
        model={
            "name": name or type(base).__name__,
            "architecture": type(base).__name__,
            "config_digest": config_digest(config),
            "layers": getattr(text, "num_hidden_layers", None),
            "max_position_embeddings": positions,
            "vocab": vocab,
            "sources": {k: sources[k] for k in sorted(sources)},
        },
        tokens=tokens,
        shorter=shorter,
        notes=(*notes, *([SAID] if emulated else []), *recording.notes),
    )
    return TrainingGraph(
        header=header, inputs=recording.inputs, nodes=nodes, outputs=recording.outputs, sources=recording.sources, masks=masks
    )


def _with_masks(
    module: nn.Module, nodes: tuple[Node, ...], config: Any, positions: int, device: torch.device
) -> tuple[tuple[Node, ...], tuple[Mask, ...]]:
    """The nodes, calls of attention functions with the keys that they may read, and what other attention reads."""
    if all(kind(node.op) is None for node in nodes):
        return nodes, ()
    tokens = probe_length(config, positions)
    inputs = {name: torch.arange(tokens, device=device)[None] for name in ("input_ids", "position_ids")}
    args, kwargs, _ = call_arguments(module, {**inputs, "input_ids": torch.zeros_like(inputs["input_ids"])})
    try:
        with one_sequence(), uncompiled_flex(), composite_attention():
            found = attach(nodes, probe(lambda: module(*args, **kwargs), tokens, device, named_edges(config)))
        why = "its attention calls differ with the length"
    except Exception as e:  # any model's forward may need real numbers
        found, why = None, f"the forward of {tokens} tokens failed: {type(e).__name__}: {e}".splitlines()[0][:300]
    if found is None:
        found = [(node, {"unknown": why}) for node in nodes if kind(node.op) is not None]
    known = {id(node): visible for node, visible in found}
    masks = tuple(Mask(value=n.outputs[0].id, visible=known[id(n)]) for n in nodes if n.op != FUNCTION and id(n) in known and n.outputs[0])
    return tuple(
        n.model_copy(update={"kwargs": {**n.kwargs, "visible": known[id(n)]}}) if n.op == FUNCTION and id(n) in known else n for n in nodes
    ), masks


def _tail_regime(logprobs: str | LogProbabilities | None) -> dict[str, Any]:
    """The regime's entry for another log-probability function than vLLM's own."""
    if logprobs is None:
        return {}
    name = logprobs if isinstance(logprobs, str) else name_of(logprobs)
    return {} if name == DEFAULT else {"logprobs": name}


def _tail(recorder: Recorder, logprobs: LogProbabilities, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The trainer's log-probabilities of some tokens, one for each position."""
    with recorder.unnamed():
        row, tokens = logits[0], ids[0]
    found = take(logprobs, row, tokens)
    with recorder.paused():
        refuse_nan(found, getattr(logprobs, "__name__", "the log-probability function"))
    with recorder.unnamed():
        return anchor_scope("graphalign.logprobs", found.clone, (found,), {})  # type: ignore[no-any-return]


def _checked_length(ids: Sequence[int], vocab: int, positions: int) -> int:
    """The length of a prompt that fits the model."""
    if not 0 < len(ids) <= positions:
        raise BadInputError(f"a prompt of {len(ids)} tokens does not fit into {positions} positions", hint="give a shorter prompt")
    if not 0 <= min(ids) <= max(ids) < vocab:
        raise BadInputError(
            f"token id {max(ids)} is not one of the model's {vocab}", hint="tokenise the prompt with the model's own tokenizer"
        )
    return len(ids)


def spread_positions(n: int, tokens: int) -> list[int]:
    """`tokens` strictly increasing positions, geometrically spread over 0 … n-1: the first is 0, the last n-1.

    Long-context RoPE variants switch on the position, so a few tokens must reach both ends of the range.
    """
    if n < tokens:
        raise BadInputError(f"{tokens} tokens do not fit into {n} positions", hint="record fewer tokens")
    out = [0]
    for i in range(1, tokens):
        ideal = round((n - 1) ** (i / (tokens - 1)))
        out.append(min(max(ideal, out[-1] + 1), n - tokens + i))
    return out


def spread_ids(vocab: int, tokens: int) -> list[int]:
    """`tokens` token ids spread over the vocabulary, the same on every run."""
    return [(i * vocab // tokens + 7 * i + 3) % vocab for i in range(tokens)]


def call_factory(spec: str, model_dir: str | os.PathLike[str] | None) -> nn.Module:
    """Import `package.module:function` and call it, with the model folder if it takes an argument."""
    name, _, attribute = spec.partition(":")
    if not name or not attribute:
        raise BadInputError(f"factory {spec!r} is not of the form package.module:function")
    cwd = os.getcwd()
    if cwd not in sys.path:
        sys.path.insert(0, cwd)
    try:
        function = getattr(importlib.import_module(name), attribute)
    except ImportError as e:
        raise BadInputError(f"factory {spec!r} cannot be imported: {e}", hint="run from the folder its package lies in") from e
    except AttributeError:
        raise BadInputError(f"factory module {name!r} has no {attribute!r}") from None
    if not callable(function):
        raise BadInputError(f"factory {spec!r} is not callable but {type(function).__name__}")
    try:
        takes = [p for p in inspect.signature(function).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except ValueError:
        takes = []
    if len([p for p in takes if p.default is p.empty]) > (model_dir is not None):
        raise BadInputError(
            f"factory {spec!r} needs arguments: {inspect.signature(function)}", hint="it is called as function() or function(model_dir)"
        )
    try:
        module = function(os.fspath(model_dir)) if takes and model_dir is not None else function()
    except Exception as e:
        raise CaptureFailedError(f"factory {spec!r} raised {type(e).__name__}: {e}") from e
    if not isinstance(module, nn.Module):
        raise BadInputError(f"factory {spec!r} returned {type(module).__name__}, not a torch.nn.Module")
    return module


def call_arguments(module: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[list[Any], dict[str, Any], list[str]]:
    """How to call a module's forward: token ids by name or as its first argument, positions and `use_cache` if it takes them."""
    parameters = inspect.signature(module.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    if "input_ids" in parameters or anything:
        kwargs["input_ids"] = inputs["input_ids"]
    else:
        args.append(inputs["input_ids"])
    notes: list[str] = []
    spelled = next((p for p in ("position_ids", "positions") if p in parameters), "position_ids" if _takes_positions(module) else None)
    if spelled:
        kwargs[spelled] = inputs["position_ids"]
    else:
        notes.append("the model takes no position_ids; it numbers its tokens itself")
    if "use_cache" in parameters or (anything and hasattr(module, "config")):
        kwargs["use_cache"] = False
    return args, kwargs, notes


def _takes_positions(module: nn.Module) -> bool:
    """Whether a forward that hides its arguments (a wrapper's `*args, **kwargs`) leads to one that takes `position_ids`."""
    parameters = inspect.signature(module.forward).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return False
    return any("position_ids" in inspect.signature(m.forward).parameters for m in module.modules() if m is not module)


def logits_of(result: Any, module: nn.Module) -> torch.Tensor:
    """The logits in what a forward returned: the tensor itself, `.logits`, `["logits"]`, or the first element."""
    found = getattr(result, "logits", None)
    if found is None and isinstance(result, dict):
        found = result.get("logits")
    if found is None and isinstance(result, list | tuple) and result:
        found = result[0]
    if found is None:
        found = result
    if not isinstance(found, torch.Tensor):
        raise CaptureFailedError(
            f"the forward of {type(module).__name__} returned {type(result).__name__}, without logits",
            hint="return the logits tensor, an object with .logits, or a tuple that starts with it",
        )
    return found


def regime(module: nn.Module, config: Any, *, autocast: str | None, grad: bool) -> dict[str, Any]:
    """How training runs, as far as it can be read off the module."""
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters()})
    return {
        "param_dtype": dtypes[0] if len(dtypes) == 1 else dtypes,
        "autocast": autocast,
        "attention": getattr(config, "_attn_implementation", None),
        "experts": getattr(config, "_experts_implementation", None),
        "mode": "train" if module.training else "eval",
        "grad": grad,
        "device": next((p.device.type for p in module.parameters()), "cpu"),
        "hub_kernels": sorted({type(m).__name__ for m in module.modules() if type(m).__module__.split(".")[0] == "kernels"}),
        "liger": sorted({type(m).__name__ for m in module.modules() if _is_liger(m)}),
    }


def _is_liger(m: nn.Module) -> bool:
    """Liger replaces classes, or only the `forward` of an instance or class."""
    return "liger_kernel" in type(m).__module__ or "liger_kernel" in (getattr(getattr(m, "forward", None), "__module__", "") or "")


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module that brings the config: what peft, DDP or `torch.compile` wrap."""
    for m in module.modules():
        if type(m).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
            return m
    return module


def _embedding_size(module: nn.Module) -> int:
    return next((m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)), 0)


def _versions() -> dict[str, str]:
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        versions["transformers"] = transformers.__version__
    return versions
