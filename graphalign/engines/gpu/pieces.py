"""vLLM's pieces: what the model's graph was cut into, which of them are equal, and what each became.

`Lowering` runs the unmodified `VllmBackend` and stops each piece after Inductor has generated its code. Equal pieces are
lowered once: they are compared as Dynamo graphs, before ATen tracing, without names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
from typing import Any

import torch

from graphalign.capture import engine_script as script


class Lowered(BaseException):
    """Inductor has generated a piece's code; nothing after that is needed."""


class Finished(BaseException):
    """The backend is done; the engine's forward is not continued."""


UNFOLDED = {"joint_graph_constant_folding": False}
"""Tried where a piece could not be lowered: the folding evaluates `full` on the device (torch 2.13)."""
Range = tuple[int, int]
"""Token counts that vLLM compiles a piece for, first and last; equal for one of `compile_sizes`."""


@dataclasses.dataclass
class Piece:
    """One submodule of the split graph."""

    number: int
    splitting: bool
    """Runs eagerly between compiled pieces (attention)."""
    graph: Any
    inputs: list[str]
    """Names of the outer graph's values, in call order."""
    placeholders: list[str]
    """What the piece itself calls them."""
    outputs: list[str | None]
    """Names of the outer graph's values that take its outputs, in order; None if nothing does."""
    key: str
    """Equal for equal pieces."""
    paths: list[tuple[str, ...]]
    """Module paths of its nodes, in order; inputs are named after wherever they were made."""
    lowered: dict[Range, dict[str, Any]] = dataclasses.field(default_factory=dict)
    failures: dict[Range, str] = dataclasses.field(default_factory=dict)
    alike: Piece | None = None
    """The equal piece that was lowered in its place."""


class PieceReader(script.GraphReader):
    """Also tells which Dynamo placeholder an input is, and which buffers the outputs are."""

    def __init__(self, recorder: PieceRecorder, graph: Any) -> None:
        super().__init__(recorder, graph)
        self.placeholder: dict[str, str] = {}

    def _input(self, name: str, box: Any, dynamo: str) -> dict[str, Any]:
        self.placeholder[name] = dynamo
        return super()._input(name, box, dynamo)

    def outputs(self) -> list[Any]:
        """Encoded tensors, in order."""
        return [self._tensor(x) for x in self.g.graph_outputs]


class PieceRecorder(script.Recorder):
    """The engine script's recorder, one piece at a time."""

    def __init__(self, world: script.World, keep: str | None) -> None:
        super().__init__(world, keep)
        self.piece: Piece | None = None
        self.range: Range = (0, 0)
        self.tokens = 0

    def finish(self, graph: Any) -> None:
        reader = PieceReader(self, graph)
        plain = reader.read()
        self.options = self.options or script.read_inductor()
        self.graphs.append(plain)
        if self.piece is not None and self.range not in self.piece.lowered:
            self.piece.lowered[self.range] = {"graph": plain, "placeholder": reader.placeholder, "outputs": reader.outputs(),
                                              "prefix": (reader.frame.prefix if reader.frame else None) or ""}  # fmt: skip

    def _keep_source(self, result: Any) -> None:
        with self.guard("generated source"):
            wrapper = result[0] if isinstance(result, tuple) else result
            folder = pathlib.Path(self.keep or ".")
            folder.mkdir(parents=True, exist_ok=True)
            name = graph_name(self.piece.number, self.range, self.tokens) if self.piece else f"piece{len(self.graphs)}"
            (folder / f"{name}.py").write_text(str(getattr(wrapper, "value", wrapper)))


def graph_name(number: int, of: Range, tokens: int) -> str:
    """`piece3` for the range that the forward's token count is in, `piece3_1_16` for another."""
    return f"piece{number}" if of[0] <= tokens <= of[1] else f"piece{number}_{of[0]}_{of[1]}"


class Lowering:
    """Hooks vLLM's backend; after the forward, `pieces` holds what it did.

    Args:
        recorder: records Inductor graphs; already installed.
        tokens: number of tokens of the forward, the size hint of what is compiled for a range.
    """

    def __init__(self, recorder: PieceRecorder, tokens: int) -> None:
        self.recorder, self.tokens = recorder, tokens
        recorder.tokens = tokens
        self.pieces: list[Piece] = []
        self.outer: Any = None
        self.sources: dict[str, Any] = {}
        """Names of the outer graph's placeholders to their example values."""
        self.results: list[str] = []
        self.ranges: list[Range] = []
        """In the order of compilation."""
        self.overrides = {"benchmark_combo_kernel": False, "triton.autotune_at_compile_time": False, "shape_padding": False}
        """Settings of Inductor that would run kernels on the device; the last: whether to pad a GEMM of odd sizes (no rounding moves)."""
        self._classes: dict[str, Piece] = {}

    @contextlib.contextmanager
    def installed(self) -> Any:
        import vllm.compilation.backends as backends
        from torch._inductor.graph import GraphLowering

        saved = [(owner, name, getattr(owner, name)) for owner, name in (
            (GraphLowering, "codegen"), (backends.CompilerManager, "compile"), (backends.VllmBackend, "__call__"),
            (backends.PiecewiseCompileInterpreter, "run"), (backends, "wrap_with_cudagraph_if_needed"))]  # fmt: skip
        codegen, compile_piece, call, run = (s[2] for s in saved[:4])

        def stop_after_codegen(graph: Any, *args: Any, **kwargs: Any) -> Any:
            codegen(graph, *args, **kwargs)
            raise Lowered

        def compile_once(manager: Any, graph: Any, inputs: Any, extra: Any, config: Any, compile_range: Any,
                         graph_index: int = 0, *args: Any, **kwargs: Any) -> Any:  # fmt: skip
            self.compile(lambda more: compile_piece(manager, graph, inputs, {**extra, **more}, config, compile_range, graph_index,
                                                    *args, **kwargs), graph_index, compile_range)  # fmt: skip
            return lambda *_: None

        def look_first(interpreter: Any, *args: Any) -> Any:
            self.survey(interpreter.module, set(interpreter.compile_submod_names))
            return run(interpreter, *args)

        def call_and_stop(backend: Any, graph: Any, inputs: Any) -> Any:
            call(backend, graph, inputs)
            raise Finished

        replaced = (stop_after_codegen, compile_once, call_and_stop, look_first, lambda runnable, *_, **__: runnable)
        for (owner, name, _), new in zip(saved, replaced, strict=True):
            setattr(owner, name, new)
        try:
            yield self
        finally:
            for owner, name, old in saved:
                setattr(owner, name, old)

    # -- surveying ------------------------------------------------------------------------------------------------------

    def survey(self, outer: Any, compiled: set[str]) -> None:
        """Describe all pieces before any of them is lowered (lowering consumes their graphs)."""
        self.outer = outer
        for node in outer.graph.nodes:
            if node.op == "placeholder":
                self.sources[node.name] = node.meta.get("example_value")
            elif node.op == "call_module":
                self.pieces.append(self._piece(node, getattr(outer, node.target), node.target not in compiled))
            elif node.op == "output":
                self.results = [n.name for n in node.all_input_nodes]

    def _piece(self, node: Any, graph: Any, splitting: bool) -> Piece:
        returned = graph.graph.output_node().args[0]
        count = len(returned) if isinstance(returned, tuple | list) else 1
        outputs: list[str | None] = [None] * count
        if isinstance(returned, tuple | list):
            for user in node.users:
                if user.op == "call_function" and len(user.args) == 2 and isinstance(user.args[1], int):
                    outputs[user.args[1]] = user.name
        else:
            outputs = [node.name]
        placeholders = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
        paths = [tuple(p for path, _ in (n.meta.get("nn_module_stack") or {}).values() if (p := script.relative_path(path)) is not None)
                 for n in graph.graph.nodes if n.op != "placeholder"]  # fmt: skip
        names = [a.name if isinstance(a, torch.fx.Node) else "" for a in node.args]
        return Piece(int(str(node.target).rpartition("_")[2]), splitting, graph, names, placeholders, outputs, piece_key(graph), paths)

    # -- lowering -------------------------------------------------------------------------------------------------------

    def compile(self, lower: Any, index: int, compile_range: Any) -> None:
        """Lower one piece for one range, unless an equal one was lowered."""
        of = (int(compile_range.start), int(compile_range.end))
        if of not in self.ranges:
            self.ranges.append(of)
        compiled = [p for p in self.pieces if not p.splitting]
        piece = compiled[index]
        if of in piece.lowered or piece.alike is not None:
            return
        known = self._classes.setdefault(piece.key, piece)
        if known is not piece and renaming(known, piece) is not None:
            piece.alike = known
            return
        self.recorder.piece, self.recorder.range = piece, of
        script.say(stage="compile", fraction=min(0.95, 0.4 + 0.5 * index / max(len(compiled), 1)))
        try:
            for more in ({}, UNFOLDED):
                try:
                    lower({**self.overrides, **more})
                    piece.failures[of] = "vLLM's compiler returned before Inductor generated code"
                except Lowered:
                    piece.failures.pop(of, None)
                    if more:
                        self.recorder.note(f"piece {piece.number} was lowered without Inductor's joint_graph_constant_folding, which "
                                           "makes tensors on the device")  # fmt: skip
                    return
                except Exception as e:  # any op may be missing here; the other pieces go on
                    piece.failures.setdefault(of, script.first_reason(e))
        finally:
            self.recorder.piece = None


def renaming(a: Piece, b: Piece) -> dict[str, str] | None:
    """Module paths of `a` to those of an equal piece `b`; None if they don't correspond one to one."""
    out: dict[str, str] = {}
    for x, y in zip(a.paths, b.paths, strict=True):
        if len(x) != len(y):
            return None
        for here, there in zip(x, y, strict=True):
            if out.setdefault(here, there) != there:
                return None
    return out


def piece_key(graph: Any) -> str:
    """A digest of a piece's graph without node, parameter and layer names."""
    order: dict[Any, int] = {}
    lines: list[str] = []

    def text(x: Any) -> str:
        if isinstance(x, torch.fx.Node):
            return f"%{order[x]}"
        if isinstance(x, list | tuple):
            return "[" + ",".join(text(y) for y in x) + "]"
        if isinstance(x, slice):
            return f"slice({text(x.start)},{text(x.stop)},{text(x.step)})"
        if isinstance(x, dict):
            return "{" + ",".join(f"{k}:{text(v)}" for k, v in sorted(x.items())) + "}"
        return "layer" if script.layer_name(x) is not None else repr(x)

    for i, node in enumerate(graph.graph.nodes):
        order[node] = i
        if node.op == "placeholder":
            value = node.meta.get("example_value")
            kind = f"{type(value).__name__} {'' if script.layer_name(value) is not None else str(value)[:20]}"
            if isinstance(value, torch.Tensor):
                kind = f"{tuple(value.shape)} {value.stride()} {value.storage_offset()} {value.dtype} {value.device}"
            lines.append(f"{i} placeholder {kind}")
            continue
        target = node.target
        if node.op == "call_function":
            target = f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"
        elif node.op == "get_attr":
            target = f"{target} {id(getattr(graph, str(target), None))}"
        lines.append(f"{i} {node.op} {target} {text(node.args)} {text(node.kwargs)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
