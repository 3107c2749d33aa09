"""Capturing modules that are not Transformers models: factories, graph breaks, own attention, compiled parts, bad input."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphalign.capture.recorder import anchor_scope, record
from graphalign.capture.training import capture_training, record_forward, spread_ids, spread_positions
from graphalign.errors import BadInputError, CaptureFailedError
from graphalign.ir.compiled import qualified_name, rebase


class Own(nn.Module):
    """A model with its own attention, a constant, and a forward that Dynamo cannot trace as one graph."""

    def __init__(self, loud: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.tensor(0.5)
        self.loud = loud

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        if self.loud and x.abs().sum().item() > 0:
            print("a graph break")
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + y.transpose(1, 2).flatten(2) * self.scale)


def test_own_attention_and_graph_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    model = Own()
    graph = capture_training(model)
    assert capsys.readouterr().out == "a graph break\n"
    ops = [n.op for n in graph.nodes]
    assert "aten._local_scalar_dense.default" in ops
    assert any("scaled_dot_product" in op for op in ops)
    assert [i.name for i in graph.inputs if i.kind == "parameter"] == ["embed.weight", "qkv.weight", "qkv.bias"]
    assert [i.name for i in graph.inputs if i.kind == "constant"] == ["scale"]
    assert graph.header.model["vocab"] == 32
    assert "the model takes no position_ids" in graph.header.notes[0]
    source = next(graph.sources[n.source] for n in graph.nodes if "scaled_dot" in n.op and n.source is not None)
    assert source.file == Path(__file__).name or source.file.endswith("/" + Path(__file__).name)
    assert source.text == "nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
    assert source.function == "Own.forward"


def test_wrapper_prefixes_stay() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = Own(loud=False)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return (self._orig_mod(*args, **kwargs),)

    graph = record_forward(Wrapper())
    assert "_orig_mod.qkv" in {n.module for n in graph.nodes}
    assert "_orig_mod.embed.weight" in {i.name for i in graph.inputs}


@pytest.mark.parametrize("warm", [True, False], ids=["compiled before", "compiled while recorded"])
def test_pass_through_compiled_code_is_recorded_as_it_runs(warm: bool) -> None:
    torch._dynamo.reset()
    seen: list[int] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        for n in gm.graph.nodes:
            if "scaled_dot_product" in str(n.target):
                with gm.graph.inserting_after(n):
                    double = gm.graph.call_function(torch.mul, (n, 2.0))
                n.replace_all_uses_with(double, delete_user_cb=lambda user: user.target is not torch.mul or user.args[1] != 2.0)
        gm.recompile()
        seen.append(1)
        return gm.forward

    model = Own(loud=False)
    stock = model(torch.tensor([[1, 2, 3]]))
    compiled = torch.compile(model, backend=backend)
    if warm:
        compiled(torch.tensor([[1, 2, 3]]))
    ids = {"input_ids": torch.tensor([[1, 2, 3]])}
    with record(compiled, ids) as recorder:
        out = compiled(**ids)
    recording = recorder.finish([out])
    assert seen == [1], "one graph, compiled once"
    assert not torch.equal(out, stock)
    assert torch.equal(out, compiled(**ids)), "still patched afterwards"
    assert sum(n.op == "aten.mul.Tensor" and n.args[1] == 2.0 for n in recording.nodes) == 1
    linear = next(n for n in recording.nodes if n.op == "aten.addmm.default")
    assert linear.module.endswith("qkv")
    assert linear.source is not None
    assert recording.sources[linear.source].function == "Own.forward"
    torch._dynamo.reset()


def test_one_compiled_graph_for_equal_layers_names_each_layer() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.up(x) * 2
            return out

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x: torch.Tensor = self.embed(input_ids)
            for layer in self.layers:
                x = layer(x)
            return x

    torch._dynamo.reset()
    model = Stack()
    plain = record_forward(model, logprobs=None)
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")  # type: ignore[method-assign]
    compiled = record_forward(model, logprobs=None)
    assert [(n.op, n.module) for n in compiled.nodes] == [(n.op, n.module) for n in plain.nodes]
    functions = [{g.sources[n.source].function for n in g.nodes if n.source is not None} for g in (plain, compiled)]
    assert functions[0] == functions[1] == {Layer.forward.__qualname__, Stack.forward.__qualname__}
    torch._dynamo.reset()


def test_rebase() -> None:
    names = frozenset({"m.layers.0.mlp", "m.layers.7.mlp", "m.layers.7", "head"})
    assert rebase("m.layers.0.mlp", "m.layers.7", names) == "m.layers.7.mlp"
    assert rebase("m.layers.0.mlp", "m.layers.0", names) == "m.layers.0.mlp"
    assert rebase("m.layers.0.mlp", "", names) == "m.layers.0.mlp"
    assert rebase("head", "m.layers.7", names) == "m.layers.7"
    assert rebase("m.layers.0.gone", "m.layers.7", names) == "m.layers.7"


def test_values_computed_out_of_sight_are_an_error() -> None:
    class Stale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.cache = {"h": self.embed(torch.tensor([[1, 2]])) * 2}

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.embed(input_ids).sum() + self.cache["h"]

    with pytest.raises(CaptureFailedError, match="computed out of the recorder's sight") as e:
        record_forward(Stale())
    assert "MulBackward0" in str(e.value)


def test_anchor_scope() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            out: torch.Tensor = anchor_scope("graphalign.experts", lambda: (x * self.w).relu() + 1, (x,), {"w": self.w, "top_k": 2})
            return out * 2

    model = Experts()
    graph = record_forward(model, logprobs=None)
    assert [n.op for n in graph.nodes] == ["aten.embedding.default", "graphalign.experts", "aten.mul.Tensor"]
    node = graph.nodes[1]
    names = {i.value.id: i.name for i in graph.inputs}
    assert (node.kwargs["top_k"], names[node.kwargs["w"]["v"]]) == (2, "w")
    assert torch.equal(model(torch.tensor([[1]])), (model.embed(torch.tensor([[1]])) * model.w).relu().add(1) * 2)


def test_forward_errors_are_named() -> None:
    class Broken(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such shape")

    class Text(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> str:
            return "logits"

    with pytest.raises(CaptureFailedError, match="the model's forward failed: ValueError: no such shape"):
        record_forward(Broken())
    with pytest.raises(CaptureFailedError, match="returned str, without logits"):
        record_forward(Text())


FACTORIES = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(8, 4)
    def forward(self, input_ids):
        return self.e(input_ids) * 2

def plain(): return Tiny()
def takes(model_dir): assert isinstance(model_dir, str); return Tiny()
def optional(model_dir=None): return Tiny()
def two(a, b): return Tiny()
def number(): return 3
def raises(): raise RuntimeError("no weights here")
value = 7
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    package = f"factories_{tmp_path.name.replace('-', '_')}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / "make.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    return f"{package}.make"


@pytest.mark.parametrize(("name", "folder"), [("plain", None), ("plain", "m"), ("takes", "m"), ("optional", None), ("optional", "m")])
def test_factory(factories: str, name: str, folder: str | None) -> None:
    graph = capture_training(folder, factory=f"{factories}:{name}")
    assert graph.header.model["architecture"] == "Tiny"
    assert graph.header.model["name"] == f"{factories}:{name}"
    assert {s.file for s in graph.sources} == {factories.replace(".", "/") + ".py", "graphalign/logprobs.py"}
    assert graph.header.model["sources"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two", "needs arguments: (a, b)"),
        ("takes", "needs arguments: (model_dir)"),
        ("number", "returned int, not a torch.nn.Module"),
        ("raises", "raised RuntimeError: no weights here"),
        ("value", "is not callable but int"),
        ("missing", "has no 'missing'"),
    ],
)
def test_factory_errors(factories: str, name: str, message: str) -> None:
    with pytest.raises((BadInputError, CaptureFailedError)) as e:
        capture_training(None, factory=f"{factories}:{name}")
    assert message in str(e.value)


def test_factory_spelling() -> None:
    for spec, message in (("no_colon", "not of the form"), ("no_such_module_x:f", "cannot be imported")):
        with pytest.raises(BadInputError, match=message):
            capture_training(None, factory=spec)


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({}, {}, "holds no config.json"),
        ({"config.json": "{"}, {}, "cannot read"),
        ({"config.json": json.dumps({"model_type": "no_such_model"})}, {}, "model_type: no_such_model"),
        ({"config.json": json.dumps({"model_type": "t5"})}, {}, "no causal language model for model_type t5"),
        ({"config.json": json.dumps({"model_type": "qwen3", "num_hidden_layers": 2})}, {"layers": 3}, "layers must be 1 to 2, not 3"),
        ({"config.json": json.dumps({"model_type": "qwen3"})}, {"weights": "checkpoint"}, "holds no weight files"),
        ({"config.json": json.dumps({"model_type": "qwen3"})}, {"weights": "none"}, "unknown weights option"),
        ({"config.json": json.dumps({"model_type": "qwen3"})}, {"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"config.json": json.dumps({"model_type": "qwen3"})}, {"autocast": "bf16"}, "unknown dtype 'bf16'"),
        (
            {"config.json": json.dumps({"auto_map": {"AutoConfig": "c.C"}})},
            {},
            "code of its own (c.py), which is run only with --trust",
        ),
    ],
)
def test_bad_model_folders(tmp_path: Path, files: dict[str, str], options: dict[str, Any], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(BadInputError) as e:
        capture_training(tmp_path, **options)
    assert message in str(e.value)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="there is no folder"):
        capture_training(tmp_path / "nowhere")
    with pytest.raises(BadInputError, match="no model to capture"):
        capture_training(None)


@pytest.mark.parametrize(("n", "tokens"), [(2048, 8), (8, 8), (9, 8), (131072, 8), (64, 3), (5, 2)])
def test_spread_positions(n: int, tokens: int) -> None:
    positions = spread_positions(n, tokens)
    assert (positions[0], positions[-1], len(positions)) == (0, n - 1, tokens)
    assert all(a < b for a, b in itertools.pairwise(positions))
    assert len(set(spread_ids(n, tokens))) == tokens or n < 2 * tokens


def test_too_few_positions() -> None:
    with pytest.raises(BadInputError, match="8 tokens do not fit into 4 positions"):
        spread_positions(4, 8)


def test_qualified_name_spells_nested_functions_as_python_does() -> None:
    def inner() -> None: ...

    line = inner.__code__.co_firstlineno
    assert qualified_name(__file__, line) == inner.__code__.co_qualname


def test_the_recorder_needs_no_transformers() -> None:
    code = """
import sys
sys.modules["transformers"] = None
import torch
from graphalign.capture.training import record_forward
m = torch.nn.Embedding(8, 4)
g = record_forward(m, logprobs=None)
assert [n.op for n in g.nodes] == ["aten.embedding.default"], g.nodes
assert "transformers" not in g.header.versions
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
