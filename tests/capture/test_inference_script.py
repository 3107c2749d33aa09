"""What the engine script records about small compiled functions."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from graphalign.ir.inference import Attention, Body, Graph, Table

spec = importlib.util.spec_from_file_location("compiled", Path(__file__).with_name("compiled.py"))
assert spec is not None
assert spec.loader is not None
compiled = sys.modules.setdefault("compiled", importlib.util.module_from_spec(spec))
spec.loader.exec_module(compiled)
capture_compiled, script = compiled.capture_compiled, compiled.load_script()

BF = torch.bfloat16


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(BF) * w


def loops(graph: dict[str, Any]) -> list[dict[str, Any]]:
    return [n for k in graph["kernels"] for n in k["nodes"] if n["kind"] == "loop"]


def test_a_capture_is_valid_in_the_file_format() -> None:
    graph, bodies, _ = capture_compiled(norm, torch.randn(8, 64, dtype=BF), torch.randn(64, dtype=BF))
    parsed = Graph.model_validate_json(json.dumps(graph))
    known = {k: Body.model_validate_json(json.dumps(b)) for k, b in bodies.items()}
    assert {n.body for k in parsed.kernels for n in k.nodes if n.kind == "loop"} == set(known)
    assert all(k.generated.startswith("cpp_fused") for k in parsed.kernels)
    assert all(i.dtype == "bfloat16" for i in parsed.inputs)
    for body in known.values():
        assert len(body.var_ranges) == sum(map(len, body.sizes))


def test_bodies_show_the_ops_before_the_backend_legalises_them() -> None:
    graph, bodies, _ = capture_compiled(norm, torch.randn(8, 64, dtype=BF), torch.randn(64, dtype=BF))
    last = bodies[loops(graph)[-1]["body"]]
    casts = [op for op in last["ops"] if op[1] == "to_dtype"]
    assert {"dtype": "bfloat16"} in [op[2][1] for op in casts], "the dropped cast must be seen to be judged"


def test_equal_loops_share_one_body() -> None:
    def two(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.mm(norm(a, a[0]), a.T), torch.mm(norm(b, b[0]), b.T)

    graph, bodies, _ = capture_compiled(two, torch.randn(8, 64, dtype=BF), torch.randn(8, 64, dtype=BF))
    nodes = loops(graph)
    assert len(bodies) < len(nodes)
    for n in nodes:
        roles = {op[2][0]["b"] for op in bodies[n["body"]]["ops"] if op[1] in ("load", "store", "store_reduction")}
        assert roles == {f"b{i}" for i in range(len(n["buffers"]))}


def test_an_extern_call_names_its_arguments_and_its_output() -> None:
    graph, _, _ = capture_compiled(lambda a, b: torch.mm(a * 2, b), torch.randn(8, 64, dtype=BF), torch.randn(64, 64, dtype=BF))
    (call,) = [n for k in graph["kernels"] for n in k["nodes"] if n["kind"] == "extern"]
    (produced,) = loops(graph)
    assert call["op"] == "aten.mm.out"
    assert dict(call["args"]) == {"self": {"b": produced["outputs"][0]}, "mat2": {"b": "arg1_1"}, "out": {"b": call["outputs"][0]}}
    assert call["mutates"] == ["out"]


def test_an_input_through_a_view_keeps_its_geometry() -> None:
    def half(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.mm(a, a)
        return whole, torch.mm(whole[:, 32:], b)

    graph, _, _ = capture_compiled(half, torch.randn(64, 64, dtype=BF), torch.randn(32, 64, dtype=BF))
    first, second = [n for k in graph["kernels"] for n in k["nodes"] if n["kind"] == "extern"]
    assert dict(second["args"])["self"] == {"b": first["outputs"][0], "size": ["64", "32"], "stride": ["64", "1"], "offset": "32"}


def test_a_load_served_from_a_register_is_seen_and_is_not_rounded() -> None:
    def chain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x * 1.7
        return a, a * 2.3

    x = torch.randn(64, 256, dtype=BF)
    graph, _, recorder = capture_compiled(chain, x)
    first, second = loops(graph)
    assert (second["forwarded"], second["reloaded"]) == (first["outputs"], [])
    assert torch.equal(recorder.result[1], (x.float() * 1.7 * 2.3).to(BF))
    assert not torch.equal(recorder.result[1], chain(x)[1])


def test_a_load_in_a_later_loop_nest_is_seen_as_a_reload() -> None:
    graph, _, _ = capture_compiled(norm, torch.randn(64, 256, dtype=BF), torch.randn(256, dtype=BF))
    mean, scaled = loops(graph)
    assert (scaled["forwarded"], scaled["reloaded"]) == ([], mean["outputs"])


def test_symbols_carry_their_hint() -> None:
    x = torch.randn(13, 64, dtype=BF)
    torch._dynamo.mark_dynamic(x, 0)
    graph, _, _ = capture_compiled(lambda t: t * 2, x)
    assert list(graph["symbols"].values()) == [13]
    assert graph["tokens"] in graph["symbols"]


def test_the_hooks_come_off_again() -> None:
    from torch._inductor import config
    from torch._inductor.codegen.common import CSEProxy
    from torch._inductor.graph import GraphLowering

    before = (GraphLowering.codegen, CSEProxy.load, config._post_fusion_custom_pass)
    capture_compiled(lambda x: x + 1, torch.randn(4, 64))
    assert (GraphLowering.codegen, CSEProxy.load, config._post_fusion_custom_pass) == before


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("L['self']._modules['layers']._modules['0'].mlp", "layers.0.mlp"),
        ("L['self'].layers[3].norm", "layers.3.norm"),
        ("L['self']", ""),
        ("L['other'].x", None),
    ],
)
def test_module_paths(path: str, short: str | None) -> None:
    assert script.relative_path(path) == short


def test_runs_of_values_become_segments() -> None:
    t = torch.zeros(10, 8)
    t[:4], t[4:7] = 1.5, -2.0
    assert script.segments_of(t) == [((), 0, 0, 4, 1.5), ((), 0, 4, 3, -2.0), ((), 0, 7, 3, 0.0)]
    assert script.segments_of(t.T) == [((), 1, 0, 4, 1.5), ((), 1, 4, 3, -2.0), ((), 1, 7, 3, 0.0)]
    experts = torch.stack([t + 1, t + 3])
    assert script.segments_of(experts)[0] == ((0,), 1, 0, 4, 2.5)
    assert script.segments_of(torch.arange(6.0).reshape(2, 3)) is None


def test_probe_values_are_distinct_and_exact_in_both_half_formats() -> None:
    values = script.probe_values(script.PROBE_BASE)
    assert len(set(values)) == len(values)
    assert 0.0 not in values
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.tensor(values, dtype=dtype).double().tolist() == values


def test_a_probe_finds_merged_and_permuted_weights() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Parameter(torch.empty(12, 8, dtype=BF))
            self.scale = torch.nn.Parameter(torch.ones(3))

        def load_weights(self, weights: Any) -> None:
            rows = {"q": slice(0, 6), "k": slice(6, 9), "v": slice(9, 12)}
            with torch.no_grad():
                for name, w in weights:
                    self.qkv[rows[name]] = w.flip(0) if name == "v" else w

    model, world = Model(), script.World()
    world.describe(model)
    script.Probe(world, model, {"q": ("bfloat16", (6, 8)), "k": ("bfloat16", (3, 8)), "v": ("bfloat16", (3, 8))}).run()
    assert [(s["checkpoint"], s["start"], s["length"]) for s in world.parameters["qkv"]["segments"]] == [
        ("q", 0, 6),
        ("k", 6, 3),
        ("v", 9, 3),
    ]
    assert [s.get("order") for s in world.parameters["qkv"]["segments"]] == [None, None, [(2, -1, 3)]]
    assert world.notes == []
    assert not world.parameters["scale"]["learned"]
    assert model.scale.tolist() == [1.0, 1.0, 1.0], "what no checkpoint tensor fills gets its value back"


def test_a_probe_takes_parameters_without_dimensions() -> None:
    """xIELU's beta and eps are buffers of no dimension that a checkpoint fills."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alpha = torch.nn.Parameter(torch.zeros(1, dtype=BF))
            self.register_buffer("beta", torch.tensor(0.5, dtype=BF))

        def load_weights(self, weights: Any) -> None:
            with torch.no_grad():
                for name, w in weights:
                    getattr(self, name).copy_(w)

    model, world = Model(), script.World()
    world.describe(model)
    script.Probe(world, model, {"alpha": ("bfloat16", (1,)), "beta": ("bfloat16", ())}).run()
    assert {n: [s["checkpoint"] for s in p["segments"]] for n, p in world.parameters.items()} == {"alpha": ["alpha"], "beta": ["beta"]}
    assert world.notes == []


def test_tables_are_sampled_over_their_whole_length() -> None:
    table = Table.model_validate_json(json.dumps(script.read_table("t", torch.arange(5000.0).reshape(-1, 1).expand(-1, 2))))
    assert table.rows[:16] == tuple(range(16))
    assert table.rows[-1] == 4999
    assert len(table.rows) < 70
    import base64

    assert struct.unpack(f"<{2 * len(table.rows)}f", base64.b64decode(table.values))[::2] == tuple(map(float, table.rows))
    assert script.read_table("t", torch.zeros(1, 1 << 17)) is None


@pytest.mark.parametrize("shape", [(64,), (4000,), (100, 3)])
def test_vectors_and_short_tables_are_whole(shape: tuple[int, ...]) -> None:
    """Inverse frequencies are read element by element, whatever the positions are."""
    table = Table.model_validate_json(json.dumps(script.read_table("inv_freq", torch.rand(shape))))
    assert table.rows == tuple(range(shape[0]))


def test_attention_layers_are_read_by_what_they_have() -> None:
    class Impl:
        scale, num_heads, num_kv_heads, head_size, sliding_window, logits_soft_cap, sinks = 0.125, 4, 2, 32, (127, 0), 0, None

    class Layer:
        impl = Impl()

    class Recurrent:
        num_k_heads, head_k_dim = 4, 16

    first, second = (Attention.model_validate(a) for a in script.read_attention({"a": Layer(), "b": Recurrent()}))
    assert (first.scale, first.window, first.softcap, first.sinks, first.heads) == (0.125, 128, None, False, 4)
    assert (second.layer, second.backend, second.kv_heads) == ("b", "Recurrent", 4)


def test_fewer_layers_cut_every_list_with_one_entry_per_layer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 3, "layer_types": ["a", "b", "a"], "x": [1]}}))
    assert script.layer_overrides(str(tmp_path), 2) == {"text_config": {"num_hidden_layers": 2, "layer_types": ["a", "b"]}}
    with pytest.raises(script.Refused, match="has 3 layers"):
        script.layer_overrides(str(tmp_path), 4)
    assert [script.within(n, 2) for n in ("model.layers.1.x", "model.layers.2.x", "lm_head.weight")] == [True, False, True]
