"""The text forms of the files."""

from __future__ import annotations

from pathlib import Path

from graphalign.ir.files import write_bytes, write_json
from graphalign.ir.inference import Attention, Body, Buffer, Graph, Input, Kernel, Node, Parameter, Segment
from graphalign.ir.training import Node as Op
from graphalign.ir.training import Source, Value


def test_training_capture_has_a_line_per_op(stage, tmp_path: Path) -> None:
    source = Source(file="m/modeling.py", function="F.forward", line=7, column=0, end_line=7, end_column=5, text="x *\n  y")
    op = Op(
        op="aten.mul.Tensor", args=({"v": 0}, [1, {"f": "inf"}]), kwargs={"dtype": {"dtype": "bfloat16"}},
        outputs=(Value(id=1, dtype="bfloat16", shape=(2, 3)), None), module="model.norm", source=0,
    )  # fmt: skip
    write_json(tmp_path / "t.json.gz", stage.training.model_copy(update={"nodes": (op,), "sources": (source,), "outputs": (1,)}))
    result = stage.run("show", tmp_path / "t.json.gz")
    assert result.code == 0, result.err
    assert "%1: bfloat16[2, 3], _ = aten.mul.Tensor(%0, [1, inf], dtype=bfloat16)  # model.norm m/modeling.py:7 x * y\n" in result.out
    assert result.out.endswith("outputs %1\n")


def test_inference_capture_has_kernels_and_each_body_once(stage, tmp_path: Path) -> None:
    body = Body(
        var_ranges=(("p0", "s72"),), sizes=(("s72",), ()), indexing={"index0": "p0"},
        ops=(("load", "load", ["b0", {"n": "index0"}], {}), ("mul", "mul", [{"n": "load"}, 2.0], {})),
    )  # fmt: skip
    loop = Node(name="op0", kind="loop", outputs=("buf0",), body="k0", buffers=("arg0", "buf0"), module="model.norm")
    call = Node(name="op1", kind="extern", outputs=("buf1",), op="aten.mm.default", args=(("self", {"b": "buf0"}),))
    graph = Graph(
        name="g0", inputs=(Input(name="arg0", role="tensor", source="hidden", dtype="float32", size=("s72",)),),
        buffers=(Buffer(name="buf0", dtype="bfloat16", size=("s72",), removed=True),), outputs=("buf1",), tokens="s72",
        kernels=(Kernel(name="op0", kind="SchedulerNode", generated="cpp_0", nodes=(loop,)), Kernel(name="op1", kind="X", nodes=(call,))),
    )  # fmt: skip
    weight = Parameter(name="qkv.weight", dtype="bfloat16", shape=(6, 2), segments=(Segment(checkpoint="q.weight", start=0, length=2),))
    update = {"graphs": (graph,), "bodies": {"k0": body}, "parameters": (weight,), "attention": (Attention(layer="attn", scale=0.5),)}
    write_json(tmp_path / "i.json", stage.inference.model_copy(update=update))
    lines = stage.run("show", tmp_path / "i.json").out.splitlines()
    for line in (
        "parameter qkv.weight: bfloat16[6, 2] = q.weight[0:2] along 0",
        "attention attn: scale=0.5",
        "  input arg0: tensor hidden float32[s72]",
        "  kernel op0 SchedulerNode cpp_0",
        "    buf0 = loop k0(arg0, buf0)  # model.norm",
        "      buf0: bfloat16[s72] removed",
        "    buf1 = aten.mm.default(self=buf0)",
        "body k0: p0 < s72",
        "  %mul = mul(%load, 2.0)",
    ):
        assert line in lines


def test_a_sites_file_is_shown_as_its_table(stage, tmp_path: Path) -> None:
    write_json(tmp_path / "sites.json", stage.report)
    assert "TABLE" in stage.run("show", tmp_path / "sites.json").out


def test_another_file_is_refused(stage, tmp_path: Path) -> None:
    write_bytes(tmp_path / "x.json", b'{"format": "other"}')
    result = stage.run("show", tmp_path / "x.json")
    assert result.code == 2
    assert "is neither a capture nor a sites file" in result.err
