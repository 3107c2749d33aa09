"""For an experiment: the trainer's forward with vLLM's own CPU kernels for GEMMs or attention, to see what share of a gap is theirs.

Forward only, and only on vLLM's CPU engine of this environment.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphalign.errors import CaptureFailedError
from graphalign.ir.inference import Parameter

_GEMMS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})
_ATTENTION = frozenset(
    {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, torch.ops.aten._scaled_dot_product_attention_math.default}
)
KERNELS = ("gemm", "attention")


class SharedKernels(TorchDispatchMode):
    """Calls vLLM's CPU kernels where the trainer calls its own. Reusable: entered once per forward.

    Args:
        model: the trainer's model, BF16. GEMMs whose right operand is one of its parameters are replaced, each parameter packed once.
        merged: per parameter, the names of those that the engine keeps in one matrix with it, in order (see `merged_parameters`); vLLM
            picks the kernel by the matrix's size, so a part is computed as a slice of the whole.
        gemm: replace GEMMs.
        attention: replace causal attention without a mask; `skipped` counts what was left alone.
        block_size: tokens per block of the engine's KV cache: the kernel adds up in blocks.

    Raises:
        CaptureFailedError: this environment's vLLM has no such kernels.
    """

    def __init__(
        self,
        model: nn.Module,
        merged: Mapping[str, Sequence[str]] | None = None,
        *,
        gemm: bool = False,
        attention: bool = False,
        block_size: int = 128,
    ) -> None:
        super().__init__()
        self.gemm, self.attention, self.block_size = gemm, attention, block_size
        self.replaced, self.skipped = dict.fromkeys(KERNELS, 0), dict.fromkeys(KERNELS, 0)
        self.vllm = _load()
        named = dict(model.named_parameters())
        self.weights = {p.data_ptr(): (n, p) for n, p in named.items() if p.dim() == 2}
        self.merged = {n: [named[m] for m in names] for n, names in (merged or {}).items() if n in named and all(m in named for m in names)}
        self.packed: dict[tuple[int, ...], Any] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Patched layers run their Dynamo graphs under this mode as they do without it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.gemm and func in _GEMMS:
            return self._multiply(func, args, kwargs)
        if self.attention and func in _ATTENTION:
            return self._attend(func, args, kwargs)
        return func(*args, **kwargs)

    def _multiply(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, w = args[-2:]
        name, parameter = self.weights.get(w.data_ptr(), ("", None))
        # vLLM adds a bias inside its kernel, to the FP32 sum: an addition after it would round twice, so that GEMM is left alone
        if parameter is None or len(args) == 3 or x.dtype != torch.bfloat16 or w.shape != parameter.shape[::-1]:
            self.skipped["gemm"] += 1
            return func(*args, **kwargs)
        self.replaced["gemm"] += 1
        parts = self.merged.get(name, [parameter])
        out = self._linear(parts)(x.contiguous())
        start = 0
        for part in parts:
            if part is parameter:
                break
            start += part.shape[0]
        return out[:, start : start + parameter.shape[0]].contiguous()

    def _linear(self, parts: list[nn.Parameter]) -> Any:
        key = tuple(p.data_ptr() for p in parts)
        if key not in self.packed:
            layer = nn.Module()
            layer.weight = nn.Parameter(
                torch.cat([p.detach() for p in parts]) if len(parts) > 1 else parts[0].detach(), requires_grad=False
            )
            self.vllm.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
            self.packed[key] = layer
        layer = self.packed[key]
        return lambda x: layer.cpu_linear(x, layer.weight, None)

    def _attend(self, func: Any, args: Any, kwargs: Any) -> Any:
        q, k, v = args[:3]
        given = {**dict(zip([a.name for a in func._schema.arguments], args, strict=False)), **kwargs}
        causal, mask = bool(given.get("is_causal")), given.get("attn_mask")
        if not causal or mask is not None or q.shape[0] != 1 or q.shape[2] != k.shape[2] or q.dtype != torch.bfloat16:
            self.skipped["attention"] += 1
            return func(*args, **kwargs)
        scale = given.get("scale")
        self.replaced["attention"] += 1
        out = self._kernel(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), scale or q.shape[-1] ** -0.5)
        out = out.transpose(0, 1)[None]
        if len(func._schema.returns) == 1:
            return out
        return out, torch.zeros(out.shape[:3], dtype=torch.float32)  # the logsumexp is read by backward only

    def _kernel(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """One causal sequence through the KV cache, as `CPUAttentionBackendImpl.forward` does it (vLLM 0.32.0).

        q: [tokens, heads, head_dim]; k and v the same, with repeated or with fewer heads.
        """
        ops, tokens, heads, width = self.vllm.ops, q.shape[0], q.shape[1], q.shape[2]
        repeats = _repeats(k, heads)
        k, v = k[:, ::repeats].contiguous(), v[:, ::repeats].contiguous()
        kv_heads = k.shape[1]
        blocks = -(-tokens // self.block_size)
        cache = torch.zeros(blocks, kv_heads, self.block_size * 2, width, dtype=q.dtype)
        keys, values = cache.chunk(2, dim=2)
        isa = self.vllm.isa(q.dtype, self.block_size, width)
        ops.cpu_attn_reshape_and_cache(k, v, keys, values, torch.arange(tokens), isa)
        starts, lengths = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=width, seq_lens=lengths, dtype=q.dtype,
            query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=self.vllm.split,
        )  # fmt: skip
        out = torch.empty(tokens, heads, width, dtype=q.dtype)
        ops.cpu_attention_with_kv_cache(
            query=q.contiguous(), key_cache=keys, value_cache=values, output=out, query_start_loc=starts, seq_lens=lengths,
            scale=scale, causal=True, alibi_slopes=None, sliding_window=-1,
            block_table=torch.arange(blocks, dtype=torch.int32)[None], softcap=0.0, scheduler_metadata=metadata, s_aux=None,
        )  # fmt: skip
        return out


def merged_parameters(parameters: Sequence[Parameter]) -> dict[str, list[str]]:
    """Checkpoint tensor to all tensors of the engine's matrix that it lies in, in order, where they are its rows."""
    out: dict[str, list[str]] = {}
    for p in parameters:
        parts = sorted((s for s in p.segments if not s.index), key=lambda s: s.start)
        if len(parts) > 1 and all(s.dim == 0 for s in parts) and len(parts) == len(p.segments) and p.name.endswith("weight"):
            out |= {s.checkpoint: [x.checkpoint for x in parts] for s in parts}
    return out


def _repeats(k: torch.Tensor, heads: int) -> int:
    """How often each key head was repeated before the kernel (Transformers' `repeat_kv`); 1 if it was not."""
    have = k.shape[1]
    for n in range(heads, 1, -1):
        if have == heads and have % n == 0:
            groups = k.view(k.shape[0], have // n, n, k.shape[2])
            if torch.equal(groups, groups[:, :, :1].expand_as(groups)):
                return n
    return 1


def _load() -> Any:
    try:
        from vllm import _custom_ops as ops
        from vllm import envs
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        if not current_platform.is_cpu():
            raise ImportError("the platform is not the CPU")
        current_platform.import_kernels()
    except Exception as e:  # a vLLM without them may fail in many ways while it is imported
        raise CaptureFailedError(
            f"this environment has no CPU kernels of vLLM: {type(e).__name__}: {e}", hint="use the environment of the engine"
        ) from None
    return types.SimpleNamespace(
        ops=ops, dispatch_cpu_unquantized_gemm=dispatch_cpu_unquantized_gemm, isa=_get_attn_isa, split=envs.VLLM_CPU_ATTN_SPLIT_KV
    )
