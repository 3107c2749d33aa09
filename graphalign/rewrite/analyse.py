"""What each node of a Dynamo graph is: the ATen ops it runs, its module, its function, and which of these ops it is.

ATen ops are found by running every node on its own fake tensors, so a key made from an eager recording names a node of the
Dynamo graph without a table of spellings (`operator.mul`, `Tensor.mul`, `torch.mul` are all `mul`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphalign.evaluate.aten import ATTENTIONS, MATMULS, TRANSPARENT, base
from graphalign.ir.compiled import STACK_FRAME, module_ids, qualified_name
from graphalign.ir.dataflow import LOW_PRECISION
from graphalign.ir.frames import is_modeling_file
from graphalign.rewrite.attention import OP, is_attention, set_path
from graphalign.rewrite.caching import OP as CACHE
from graphalign.rewrite.caching import is_cache

DEAD = frozenset({"detach", "alias", "lift_fresh"})
"""Ops that autograd may add or leave out; the recorder drops them, so they are not counted."""


@dataclass(frozen=True)
class OpKey:
    """Identity of one ATen op inside a unit."""

    module: str
    """Relative to the unit."""
    function: str
    op: str
    ordinal: int


@dataclass
class Info:
    """What is known of one node."""

    ops: tuple[OpKey, ...] = ()
    dtype: torch.dtype | None = None
    """Of its result, if that is a tensor."""
    transparent: bool = False
    text: str = ""

    @property
    def compute(self) -> OpKey | None:
        """The one value-making op it runs, None if none or several."""
        made = [k for k in self.ops if k.op not in TRANSPARENT]
        return made[0] if len(made) == 1 else None


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.seen.append(str(func))
        elif func.namespace not in ("prim", "prims", "profiler"):
            self.seen.append(f"opaque.{func.namespace}.{func}")
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.dtypes.append(result.dtype)
        return result


def analyse(gm: fx.GraphModule, unit: nn.Module) -> dict[fx.Node, Info]:
    """Information on every node.

    Args:
        gm: graph as Dynamo hands it to a backend, with `example_value` metadata.
        unit: the module whose forward was traced.
    """
    names = {id(m): n for n, m in unit.named_modules()}
    examples = [v for n in gm.graph.nodes if isinstance(v := n.meta.get("example_value"), torch.Tensor)]
    # not detect_fake_mode(): inside a backend that is the mode of the compilation to come (torch 2.13)
    mode = next((m for v in examples if (m := getattr(v, "fake_mode", None)) is not None), None)
    counts: Counter[tuple[str, str, str]] = Counter()
    out: dict[fx.Node, Info] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        info = Info(dtype=value.dtype if isinstance(value, torch.Tensor) else None)
        if node.op in ("call_function", "call_method", "call_module"):
            module, (function, text) = _module(node, names), _function(node)
            keys = []
            if is_attention(node):
                set_path(node, module)
            for op in [OP] if is_attention(node) else [CACHE] if is_cache(node) else _run(gm, node, mode):
                key = (module, function, op)
                if op not in DEAD:
                    keys.append(OpKey(*key, counts[key]))
                    counts[key] += 1
            info.ops, info.text = tuple(keys), text
            info.transparent = (
                (info.dtype is not None or isinstance(value, tuple | list)) and all(k.op in TRANSPARENT for k in keys) and _tensors(node)
            )
        out[node] = info
    return out


def _tensors(node: fx.Node) -> bool:
    return any(isinstance(a.meta.get("example_value"), torch.Tensor | tuple | list) for a in node.all_input_nodes)


def _module(node: fx.Node, names: dict[int, str]) -> str:
    return next((names[i] for i in module_ids(node) if i in names), "")


def _function(node: fx.Node) -> tuple[str, str]:
    """Qualified name of the innermost modeling function, and the text of its line."""
    for m in reversed(list(STACK_FRAME.finditer(str(node.meta.get("stack_trace") or "")))):
        if is_modeling_file(m["file"]):
            return qualified_name(m["file"], int(m["line"])) or m["function"], m["code"].strip()
    return "", ""


def _run(gm: fx.GraphModule, node: fx.Node, mode: Any) -> list[str]:
    """Base names of the ATen ops that a node runs."""
    recorder = _Ops()
    try:
        if not run_node(gm, node, recorder, mode):
            return ["opaque"]
    except Exception:  # a node that fake tensors cannot run (`.item()`, a higher-order op) makes no value that an edit could name
        return [] if not isinstance(node.meta.get("example_value"), torch.Tensor) else ["opaque"]
    return [base(op) if not op.startswith("opaque") else op for op in recorder.seen]


def dtypes_of(gm: fx.GraphModule, node: fx.Node) -> tuple[torch.dtype, ...]:
    """Of each ATen op that a node runs as things are set now (autocast), the dtype of its result; none if fake tensors cannot run it."""
    recorder = _Ops()
    value = next((v for a in node.all_input_nodes if isinstance(v := a.meta.get("example_value"), torch.Tensor)), None)
    try:
        run_node(gm, node, recorder, getattr(value, "fake_mode", None))
    except Exception:  # see `_run`
        return ()
    return tuple(recorder.dtypes)


def run_node(gm: fx.GraphModule, node: fx.Node, recorder: TorchDispatchMode, mode: Any) -> bool:
    """Run a node on its operands' fake tensors under a dispatch mode; False if one of these is not known."""

    def value(n: fx.Node) -> Any:
        if n.op == "get_attr":
            return _attribute(gm, str(n.target))
        return n.meta["example_value"]

    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    except (KeyError, AttributeError):
        return False
    with torch.no_grad(), mode if mode is not None else _nothing(), recorder:
        if node.op == "call_method":
            getattr(args[0], str(node.target))(*args[1:], **kwargs)
        elif node.op == "call_module":
            gm.get_submodule(str(node.target))(*args, **kwargs)
        else:
            node.target(*args, **kwargs)  # type: ignore[operator]
    return True


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    found: Any = gm
    for part in path.split("."):
        found = getattr(found, part)
    return found


class _nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: Any) -> None:
        return None


def is_low(dtype: torch.dtype | None) -> bool:
    """Whether a dtype is below FP32."""
    return dtype is not None and str(dtype).removeprefix("torch.") in LOW_PRECISION


GUIDES = frozenset({"type_as", "expand_as", "view_as", "reshape_as"})
"""Tensor methods that read of their second operand only how it looks: its dtype or its shape, never its elements."""
ANCHORS = MATMULS | ATTENTIONS | {"convolution", "conv1d", "conv2d", "_scaled_mm", "_weight_int4pack_mm"}
"""ATen ops whose operands' formats a patch never changes."""


def carried_operands(node: fx.Node) -> list[fx.Node]:
    """Of a transparent node, the nodes whose elements it hands on: `x.type_as(y)` hands on those of x."""
    method = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    operands = tensor_operands(node)
    if method in GUIDES or (method == "to" and len(operands) > 1):
        return operands[:1]
    return operands or node.all_input_nodes


def is_anchor(info: Info) -> bool:
    """Whether a node runs a GEMM, an attention kernel or an op that nothing is known of."""
    return any(k.op in ANCHORS or k.op.startswith("opaque") for k in info.ops)


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Tensor operands in argument order, with repeats, as edits count them."""
    flat: list[fx.Node] = []

    def visit(a: Any) -> None:
        if isinstance(a, fx.Node):
            if isinstance(a.meta.get("example_value"), torch.Tensor) or a.op == "get_attr":
                flat.append(a)
        elif isinstance(a, list | tuple):
            for x in a:
                visit(x)

    for a in itertools.chain(node.args, node.kwargs.values()):
        visit(a)
    return flat
