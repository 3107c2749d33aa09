"""The real engine on the examples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from graphalign.capture.inference import capture_inference
from graphalign.engines.examples import resolve_model
from graphalign.errors import BadInputError, CaptureFailedError
from graphalign.ir.inference import TAIL

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("example:qwen3", tmp_path_factory.mktemp("cache"))


def test_a_capture_names_weights_modules_and_layers(qwen3: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    found = capture_inference(
        qwen3, tmp_path / "c.json.gz", layers=2, progress=lambda s, _: stages.append(s), keep_kernels=tmp_path / "kernels"
    )
    assert list(dict.fromkeys(stages)) == ["start", "probe", "load", "compile", "write"]
    assert found.header.notes == ()
    assert found.header.model["layers"] == 2
    assert found.header.model["weights"] == "real"
    graph, tail = found.graphs
    assert tail.name == TAIL
    (lm_head,) = [v["param"] for k in tail.kernels for n in k.nodes for _, v in n.args if isinstance(v, dict) and "param" in v]
    assert lm_head == "lm_head.weight"
    assert graph.outputs == ()
    assert [e.name for e in graph.exports] == [TAIL]
    by_name = {p.name: p for p in found.parameters}
    merged = by_name["model.layers.1.self_attn.qkv_proj.weight"]
    assert [(s.checkpoint, s.start, s.length) for s in merged.segments] == [
        ("model.layers.1.self_attn.q_proj.weight", 0, 128),
        ("model.layers.1.self_attn.k_proj.weight", 128, 64),
        ("model.layers.1.self_attn.v_proj.weight", 192, 64),
    ]
    assert not any(p.name.startswith("model.layers.2") for p in found.parameters)
    assert all(p.segments for p in found.parameters if p.learned)
    calls = [n for k in graph.kernels for n in k.nodes if n.kind == "extern"]
    gemms = [v["param"] for n in calls for _, v in n.args if isinstance(v, dict) and "param" in v]
    assert sorted(gemms) == sorted(n for n in by_name if n.endswith("proj.weight"))
    assert all(n.module == name.removesuffix(".weight") for n in calls for _, v in n.args for name in [_param(v)] if name)
    layers = [v["layer"] for n in calls if "unified_attention" in n.op for _, v in n.args if isinstance(v, dict) and "layer" in v]
    assert layers == [a.layer for a in found.attention] == [f"model.layers.{i}.self_attn.attn" for i in range(2)]
    assert found.attention[0].scale == pytest.approx(32**-0.5)
    assert [t.name for t in found.tables] == ["model.layers.0.self_attn.rotary_emb.cos_sin_cache"]
    assert {"input_ids", "positions"} <= {i.source for i in graph.inputs if i.role == "tensor"}
    assert graph.tokens in graph.symbols
    assert all(n.module and n.source for k in graph.kernels for n in k.nodes if n.kind == "loop")
    generated = {k.generated for k in graph.kernels if any(n.kind == "loop" for n in k.nodes)}
    source = (tmp_path / "kernels" / "graph_0.py").read_text()
    assert "" not in generated
    assert all(name in source for name in generated)


def _param(value: object) -> str:
    return str(value["param"]) if isinstance(value, dict) and "param" in value else ""


def test_a_config_is_enough(qwen3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "config_only"
    folder.mkdir()
    shutil.copy(qwen3 / "config.json", folder)
    found = capture_inference(folder, tmp_path / "c.json", layers=1)
    assert found.header.model["weights"] == "dummy"
    assert all(p.segments for p in found.parameters if p.learned)


def test_a_model_that_vllm_does_not_know_is_refused(qwen3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "unknown"
    folder.mkdir()
    config = json.loads((qwen3 / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NobodyForCausalLM"]}))
    with pytest.raises(CaptureFailedError, match="NobodyForCausalLM"):
        capture_inference(folder, tmp_path / "c.json")


def test_an_engine_that_does_not_compile_is_an_error(qwen3: Path, tmp_path: Path) -> None:
    with pytest.raises(CaptureFailedError, match="compiled no graph") as failure:
        capture_inference(qwen3, tmp_path / "c.json", layers=1, engine_args={"enforce_eager": True})
    assert "enforce_eager" in failure.value.hint


def test_an_engine_whose_logits_are_no_numbers_is_an_error(qwen3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "overflow"
    shutil.copytree(qwen3, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1e6
    weights["model.layers.1.mlp.down_proj.weight"] *= 1e37
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CaptureFailedError, match="the engine's logits are no numbers: NaN for 57 of 57 tokens") as failure:
        capture_inference(folder, tmp_path / "c.json", layers=2)
    assert "first seen at model.layers.1.mlp.down_proj" in failure.value.where
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"max_modl_len": 64}, "this vLLM's engine has no argument 'max_modl_len'"),
        ({"max_num_seqs": 4, "max_model_len": "many"}, "the engine's argument does not fit: "),
    ],
)
def test_an_argument_that_vllm_does_not_take_is_bad_input(qwen3: Path, tmp_path: Path, arguments: dict[str, object], what: str) -> None:
    with pytest.raises(BadInputError, match=what) as failure:
        capture_inference(qwen3, tmp_path / "c.json", layers=1, engine_args=arguments)
    assert failure.value.where == f"--engine-arg {list(arguments)[-1]}={list(arguments.values())[-1]}"
