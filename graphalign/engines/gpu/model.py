"""Builds vLLM's model without weights: once as fake CUDA tensors, to be compiled, and once as a thin copy on the CPU.

The thin copy answers what fake tensors cannot: which checkpoint tensors fill which parameter, and what tables hold.
A large uninitialised tensor of it (all weights are) keeps one element per row: expanded, with stride 0 along the last dimension.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphalign.capture import engine_arguments
from graphalign.capture import engine_script as script

VALIDATED = re.compile(r"Value error, (.*?) \[type=", re.S)
"""vLLM's own words in pydantic's message."""
LARGE = 1 << 16
"""Elements from which on an uninitialised tensor becomes thin."""
WRITES = frozenset({"copy_", "fill_", "zero_", "mul_", "uniform_", "normal_"})


class Thin(TorchDispatchMode):
    """Makes large uninitialised tensors thin, and lets writes to them pass."""

    last = False
    """Whether of what is written along a thin dimension the last element is kept, not the first."""

    @contextlib.contextmanager
    def at_end(self) -> Any:
        """Keep last elements meanwhile."""
        self.last = True
        try:
            yield
        finally:
            self.last = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in ("aten::empty", "aten::empty.memory_format"):
            size = list(args[0])
            n = 1
            for s in size:
                n *= s
            if n > LARGE and len(size) > 1:
                small = func([*size[:-1], 1], *args[1:], **{k: v for k, v in kwargs.items() if k != "memory_format"})
                return small.expand(size)
        if name.removeprefix("aten::") in WRITES and isinstance(args[0], torch.Tensor):
            dims = [d for d, (n, s) in enumerate(zip(args[0].shape, args[0].stride(), strict=True)) if s == 0 and n > 1]
            if dims:
                return self._write(func, args, kwargs, dims)
        return func(*args, **kwargs)

    def _write(self, func: Any, args: Any, kwargs: Any, dims: list[int]) -> Any:
        """The same write, on the elements that are there."""

        def thinner(t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or t.dim() != args[0].dim():
                return t
            for d in dims:
                t = t.narrow(d, t.shape[d] - 1 if self.last else 0, 1)
            return t

        func(thinner(args[0]), *[thinner(a) for a in args[1:]], **kwargs)
        return args[0]


def make_config(request: dict[str, Any]) -> Any:
    """vLLM's resolved config, as the `LLM` class (`entry: llm`) or the server (`entry: server`) makes it on this platform."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    if bad := engine_arguments.wrong_name(request["engine_args"]):
        raise script.Refused(*bad, usage=True)
    context = UsageContext.OPENAI_API_SERVER if request["entry"] == "server" else UsageContext.LLM_CLASS

    def make(given: Mapping[str, Any]) -> Any:
        arguments = {"dtype": "bfloat16", "skip_tokenizer_init": True, **given, "model": request["model"], "load_format": "dummy"}
        arguments |= engine_arguments.cut_layers(request, given, script.layer_overrides)
        return EngineArgs(**arguments).create_engine_config(usage_context=context)

    try:
        return make(request["engine_args"])
    except Exception as e:
        if bad := engine_arguments.at_fault(e, request["engine_args"], make):
            raise script.Refused(*bad, usage=True) from None
        said = VALIDATED.search(str(e)) if isinstance(e, ValueError) else None
        if said is None:
            raise
        hint = "change the engine's arguments"
        raise script.Refused(f"vLLM refuses this configuration: {said.group(1).rstrip(chr(46))}", "engine arguments", hint) from None


def join_group(config: Any) -> list[str]:
    """Rank 0 of the engine's process group, with a process group that communicates with nobody.

    Returns:
        What was replaced, in words.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import shm_broadcast

    parallel = config.parallel_config
    world = parallel.world_size
    # The tensor-parallel group's queue in shared memory waits for the other ranks' answers (vLLM 0.32).
    shm_broadcast.MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)
    dist.init_process_group(backend="fake", rank=0, world_size=world, store=FakeStore())
    new_group = dist.new_group
    dist.new_group = lambda *a, **k: new_group(*a, **{**k, "backend": "fake"})
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(world, 0, "env://", 0, "fake")
        parallel_state.initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    said = [f"rank 0 of {world}, in torch's fake process group: collectives move nothing"]
    if world > 1:
        said.append("the group has vLLM's base communicator, without NCCL: collectives stay in the graph as vLLM's ops, and are never run")
    return said


def build(config: Any, device: str) -> Any:
    """vLLM's model, by its own loader's first step."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), torch.device(device):
        return initialize_model(vllm_config=config)


def forget_layers(config: Any) -> None:
    """Let a second model be built in the same process: layers register by name, rotary embeddings are shared."""
    from vllm.model_executor.layers import rotary_embedding

    config.compilation_config.static_forward_context.clear()
    rotary_embedding._ROPE_DICT.clear()


def survey(config: Any, request: dict[str, Any], world: script.World) -> dict[str, Any]:
    """Build the thin copy, find what fills its parameters.

    Returns:
        Its parameters and buffers by name, with real content where it is a table.
    """
    from vllm.config import set_current_vllm_config

    with Thin() as thin, set_current_vllm_config(config):
        model = build(config, "cpu")
        world.describe(model)
        quantised = getattr(config.model_config, "quantization", None)
        script.find_segments(world, model, request, quantised=quantised, at_end=thin.at_end)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    forget_layers(config)
    return tensors


def build_fake(config: Any, mode: Any, note: Any) -> Any:
    """The model as fake tensors on `cuda:0`, after vLLM's own preparation of weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    with mode:
        model = build(config, "cuda:0")
    try:
        with mode, set_current_vllm_config(config):
            process_weights_after_loading(model, config.model_config, torch.device("cuda:0"))
    except Exception as e:  # layers look at weight values here
        note(f"vLLM's preparation of weights after loading was not completed: {script.first_reason(e)}")
    return model.eval()


def run_forward(model: Any, config: Any, mode: Any, tokens: int) -> None:
    """One profile run's forward, as the model runner makes it."""
    import vllm.ir.op as ir_op
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    with mode:
        ids = torch.zeros(tokens, dtype=torch.int32, device="cuda:0")
        shape = (3, tokens) if getattr(config.model_config, "uses_mrope", False) else (tokens,)
        positions = torch.zeros(shape, dtype=torch.int64, device="cuda:0")
    ir_op.set_default_torch_wrap(config.compilation_config.ir_enable_torch_wrap)
    config.kernel_config.ir_op_priority.set_default()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(set_forward_context(None, config, num_tokens=tokens))
        model(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)
