"""Runs the engine's composite ops (fused experts, mixers) once more, with weights and inputs that anyone can draw again.

Works beside `engine_script` in the engine's process, so it needs only the standard library, torch and vLLM, and reads `ir/drawn.py` by its
path. Before the checkpoint is loaded, the drawn weights of one layer of each kind are: the op's owner is copied with them. When the engine
runs, the graph's own call of the op is repeated with the copy and drawn inputs; what it gives is recorded (`ir.inference.Composite`).

What cannot be copied or run is recorded with the reason: nothing is known about its inside then.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import importlib.util
import math
import os
import re
from typing import Any

TOKENS = 8
"""Tokens of the prompt that the op is run on: those of a training capture."""
NUMBERS = re.compile(r"layer_?(idx|id|index|number|num)$")
"""Attributes that say which layer it is, not what it does."""
_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def _drawn() -> Any:
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "ir", "drawn.py")
    spec = importlib.util.spec_from_file_location("graphalign_drawn", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


drawn = _drawn()


class LayerTensors:
    """Drawn weights of one layer, in the form of a checkpoint.

    They are drawn for the names and shapes that Transformers' model has; what it stores otherwise (experts one by one) is taken apart.
    """

    def __init__(self, directory: str, trust: bool = False) -> None:
        self.directory, self.trust = directory, trust
        self.model: Any = None

    def __call__(self, layer: int) -> tuple[list[tuple[str, tuple[int, ...]]], list[tuple[str, Any]]]:
        """Names and shapes of a layer's parameters, and names and BF16 content of its checkpoint tensors."""
        import torch
        import transformers

        if self.model is None:
            config = transformers.AutoConfig.from_pretrained(self.directory, trust_remote_code=self.trust)
            cls = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
            with torch.device("meta"):
                auto = transformers.AutoModelForCausalLM
                self.model = cls._from_config(config) if cls is not None else auto.from_config(config, trust_remote_code=self.trust)
        shapes = {n: tuple(t.shape) for n, t in self.model.state_dict().items() if (m := _LAYER.search(n)) and int(m.group(1)) == layer}
        if sum(math.prod(s) for s in shapes.values()) > drawn.MOST:
            raise ValueError(f"layer {layer} has more than {drawn.MOST} parameters")
        state = {n: drawn.weight(n, s).to(torch.bfloat16) for n, s in shapes.items()}
        with contextlib.suppress(ImportError, AttributeError):
            from transformers.core_model_loading import revert_weight_conversion

            state = revert_weight_conversion(self.model, state)
        return list(shapes.items()), list(state.items())


class Composites:
    """The owners of composite ops, one of each kind, copied with drawn weights."""

    def __init__(self) -> None:
        self.copies: dict[str, Any] = {}
        """Module path to its copy."""
        self.alike: dict[str, list[str]] = {}
        """Module path to the modules that are like it, itself included, as the op's call names them: by layer, or by path."""
        self.layers: dict[str, str] = {}
        """Name under which vLLM's forward context knows a copied module to its path."""
        self.failed: dict[str, str] = {}
        """Module path to why there is no copy."""
        self.weights: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        """Module path to the drawn parameters of its layer."""
        self.records: dict[str, dict[str, Any]] = {}

    # -- before the checkpoint is loaded ----------------------------------------------------------------------------------

    def prepare(self, model: Any, config: Any, tensors: Any) -> None:
        """Copy one owner of each kind.

        Args:
            model: the engine's, before its weights are loaded and processed.
            config: vLLM's config.
            tensors: gives the drawn checkpoint tensors of a layer: a `LayerTensors`.
        """
        kinds: dict[str, str] = {}
        context = getattr(config.compilation_config, "static_forward_context", None) or {}
        names = {id(x): n for n, x in context.items() if hasattr(x, "get_state_shape")}  # mixers; an attention keeps no state
        for path, module in model.named_modules():
            fused = hasattr(module, "w13_weight") and hasattr(module, "w2_weight")
            if not fused and id(module) not in names:
                continue
            first = kinds.setdefault(signature(module), path)
            self.alike.setdefault(first, []).append(names.get(id(module), path))
            if first == path and id(module) in names:
                self.layers[names[id(module)]] = path
        for path in self.alike:
            try:
                self.copies[path] = self._copy(model, path, config, tensors)
            except Exception as e:  # any model's loader, any module's copy
                self.failed[path] = f"it could not be copied with other weights: {type(e).__name__}: {e}"[:300]

    def _copy(self, model: Any, path: str, config: Any, tensors: Any) -> Any:
        import torch
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        module = model.get_submodule(path)
        found = _LAYER.search(path)
        if found is None:
            raise ValueError("its path has no layer number")
        if sum(p.numel() for p in module.parameters()) > drawn.MOST:
            raise ValueError(f"it has more than {drawn.MOST} parameters")
        layer = path[: found.end()]
        saved = {n: t.detach().clone() for n, t in model.get_submodule(layer).state_dict().items()}
        try:
            with torch.no_grad():
                for t in module.parameters():
                    t.fill_(math.nan) if t.is_floating_point() else t.zero_()
                self.weights[path], content = tensors(int(found.group(1)))
                model.load_weights(content)
                unfilled = [n for n, t in module.named_parameters() if t.is_floating_point() and bool(t.isnan().any())]
                if unfilled:
                    raise ValueError(f"{', '.join(unfilled[:3])} is not filled by the checkpoint's tensors of layer {found.group(1)}")
                own = {id(x): x for x in module.modules()}
                memo = {id(m): m for m in model.modules() if id(m) not in own}
                memo |= {id(x): x for x in (config, *vars(config).values()) if x is not None}
                # vLLM's own parameter classes cannot be copied (0.32); their loaders have done their work
                special = [p for p in module.parameters() if type(p) is not torch.nn.Parameter]
                memo |= {id(p): torch.nn.Parameter(p.detach().clone(), requires_grad=False) for p in special}
                result = copy.deepcopy(module, memo)
                process_weights_after_loading(result, config.model_config, next(module.parameters()).device)
        finally:
            with torch.no_grad():
                for n, t in model.get_submodule(layer).state_dict().items():
                    t.copy_(saved[n])
        return result

    # -- when the engine runs -----------------------------------------------------------------------------------------------

    def record(self, llm: Any, world: Any, ops: set[str]) -> list[dict[str, Any]]:
        """Run a prompt of `TOKENS` tokens, and every copied owner's op beside it.

        Args:
            llm: the engine.
            world: knows whose packed form a tensor is.
            ops: names of the graphs' extern ops.

        Returns:
            Records in the form of `ir.inference.Composite`.
        """
        from vllm import SamplingParams

        if self.copies:
            with self._watching(world, ops):
                prompt = {"prompt_token_ids": [3 + 5 * t for t in range(TOKENS)]}
                try:
                    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
                except Exception as e:
                    self.failed |= {
                        p: f"the engine does not run: {type(e).__name__}: {e}"[:300] for p in self.copies if p not in self.records
                    }
        for path in self.copies:
            if path not in self.records:
                self.failed.setdefault(path, "its op was not called")
        return [{"alike": self.alike[path], **self.records.get(path, {}), "failed": self.failed.get(path, "")} for path in self.alike]

    @contextlib.contextmanager
    def _watching(self, world: Any, ops: set[str]) -> Any:
        import torch

        original = torch._ops.OpOverload.__call__
        of_parameter = {id(p): (path, n) for path in self.copies for n, p in world.model.get_submodule(path).named_parameters()}

        def call(op: Any, /, *args: Any, **kwargs: Any) -> Any:
            path = None
            if str(op) in ops:
                given = {**dict(zip([a.name for a in op._schema.arguments], args, strict=False)), **kwargs}
                if (path := self._whose(given, of_parameter)) is not None and path not in self.records and path not in self.failed:
                    try:
                        self.records[path] = self._run(op, original, path, given, of_parameter)
                    except Exception as e:
                        self.failed[path] = f"its op could not be run again: {type(e).__name__}: {e}"[:300]
            try:
                return original(op, *args, **kwargs)
            except RuntimeError:
                if path not in self.failed:
                    raise
                return None  # the op does not run on this machine at all; what the model's output would be matters to nobody

        torch._ops.OpOverload.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch._ops.OpOverload.__call__ = original  # type: ignore[method-assign]

    def _whose(self, given: dict[str, Any], of_parameter: dict[int, tuple[str, str]]) -> str | None:
        for x in given.values():
            if id(x) in of_parameter:
                return of_parameter[id(x)][0]
            if (path := self.layers.get(layer_text(x))) in self.copies:
                return path
        return None

    def _run(self, op: Any, original: Any, path: str, given: dict[str, Any], of_parameter: dict[int, tuple[str, str]]) -> dict[str, Any]:
        """Call an op with the copy's weights and drawn inputs, at every scale."""
        import torch

        module = self.copies[path]
        name = next((n for n, p in self.layers.items() if p == path), "")
        mutated = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        own = dict(module.named_parameters())
        weights = {n: own[of_parameter[id(x)][1]] for n, x in given.items() if id(x) in of_parameter}
        tensors = {n: x for n, x in given.items() if isinstance(x, torch.Tensor) and n not in weights}
        if strange := [n for n, x in tensors.items() if n not in mutated and (not x.dim() or x.shape[0] != TOKENS)]:
            raise ValueError(f"its argument {strange[0]} has the shape {tuple(tensors[strange[0]].shape)}, not one row for each token")
        numbers = {n: x for n, x in tensors.items() if not x.is_floating_point()}
        if len(numbers) > 1:
            raise ValueError(f"it reads {len(numbers)} integer tensors")
        inputs = [n for n, x in tensors.items() if n not in mutated]
        out = [n for n in tensors if n in mutated]
        if len(out) > 1:
            raise ValueError(f"it writes {len(out)} tensors")
        experts = next((p.shape[0] for n, p in own.items() if n.endswith("w13_weight")), 0)
        results = []
        for scale in drawn.SCALES:
            changed: dict[str, Any] = dict(weights)
            for slot, n in enumerate(inputs):
                x = tensors[n]
                if n in numbers:
                    new = drawn.expert_numbers(tuple(x.shape), experts)
                elif any(x.shape == i.shape for i in numbers.values()):
                    new = drawn.routing_weights(tuple(x.shape))
                else:
                    new = drawn.activation(slot, tuple(x.shape), scale)
                changed[n] = new.to(device=x.device, dtype=x.dtype)
            changed |= {n: torch.zeros_like(tensors[n]) for n in out}
            with _swapped(name, module):
                result = original(op, **{**given, **changed})
            made = changed[out[0]] if out else result
            if not isinstance(made, torch.Tensor):
                raise ValueError("it returns no single tensor")
            results.append(base64.b64encode(made.detach().float().cpu().contiguous().numpy().tobytes()).decode())
            shape, dtype = list(made.shape), str(made.dtype).removeprefix("torch.")
        return {
            "op": str(op),
            "inputs": [[n, list(tensors[n].shape), str(tensors[n].dtype).removeprefix("torch.")] for n in inputs],
            "shape": shape,
            "dtype": dtype,
            "layer": int(_LAYER.search(path).group(1)),  # type: ignore[union-attr]
            "weights": [[n, list(s)] for n, s in self.weights[path]],
            "experts": experts,
            "scales": list(drawn.SCALES),
            "results": results,
        }


def signature(module: Any) -> str:
    """What makes two modules the same kind: class, shapes, and every plain number and text that they and their parts hold."""

    def of(m: Any) -> dict[str, Any]:
        plain = {k: v for k, v in vars(m).items() if isinstance(v, bool | int | float | str) and not NUMBERS.search(k)}
        numbers = {k: v for k, v in plain.items() if not (isinstance(v, str) and _LAYER.search(v))}
        return {"class": type(m).__qualname__, **{k: repr(v) for k, v in sorted(numbers.items())}}

    shapes = [(n, tuple(p.shape), str(p.dtype)) for n, p in module.named_parameters()]
    return repr((shapes, [(n, of(m)) for n, m in module.named_modules()]))


def layer_text(x: Any) -> str:
    """The layer name in an argument, which may be wrapped; empty if there is none."""
    if isinstance(x, str):
        return x
    value = getattr(x, "value", None)
    return value if isinstance(value, str) else ""


@contextlib.contextmanager
def _swapped(name: str, module: Any) -> Any:
    """A copy in the place of the layer that the forward context knows by a name, with that layer's state; nothing without a name."""
    if not name:
        yield
        return
    from vllm.forward_context import get_forward_context

    layers: dict[str, Any] = get_forward_context().no_compile_layers
    before = layers[name]
    module.kv_cache = before.kv_cache
    layers[name] = module
    try:
        yield
    finally:
        layers[name] = before
