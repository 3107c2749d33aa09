"""Captures from other people: whatever the bytes, one clear error with exit code 2, in bounded time, and nothing runs."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from graphalign.cli.app import app
from graphalign.errors import CaptureFileError, GraphalignError
from graphalign.ir.files import MAX_DEPTH, load_raw, read_json
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph
from graphalign.sites.find import diff
from tests.fixtures.recorded import captures, paths
from tests.synthetic import random_pair

SECONDS = 20
"""Most time that any of these may take; each takes well under one on a quiet machine."""


def run_diff(inference: Path, training: Path, out: Path) -> str:
    """`graphalign diff` on two bad files: its message."""
    started = time.perf_counter()
    result = CliRunner().invoke(app, ["diff", str(inference), str(training), "-o", str(out)])
    assert time.perf_counter() - started < SECONDS
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert "error: " in result.stderr
    assert "Traceback" not in result.output
    assert not out.exists()
    return result.stderr


@pytest.mark.parametrize("keep", [0, 1, 2, 9, 10, 50, 0.5, 0.99, -1])
def test_a_truncated_file(tmp_path: Path, keep: float) -> None:
    data = paths("llama")[0].read_bytes()
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    assert str(cut) in run_diff(cut, paths("llama")[1], tmp_path / "sites.json").replace("\n", "")


def test_flipped_bytes_never_crash(tmp_path: Path) -> None:
    data, rng = bytearray(paths("llama")[1].read_bytes()), random.Random(1)
    for _ in range(60):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        path = tmp_path / "flipped.json.gz"
        path.write_bytes(broken)
        with contextlib.suppress(CaptureFileError):
            read_json(path, TrainingGraph, kind="training capture")


@pytest.mark.parametrize(
    "text",
    ["", "null", "3", '"x"', "[]", "{}", "{" * 5, "[1,", '{"format": "graphalign.training"}', "NaN", "1e999", '{"a": ' + "9" * 5000 + "}"],
)
def test_json_of_another_kind(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    run_diff(path, paths("llama")[1], tmp_path / "sites.json")


@pytest.mark.parametrize("unit", ["[", '{"a":', "[[", '[{"x":', ' [ \n{"a" : '])
def test_deep_nesting(tmp_path: Path, unit: str) -> None:
    path = tmp_path / "deep.json"
    close = "".join({"[": "]", "{": "}"}[c] for c in reversed(unit) if c in "[{")
    for depth in (MAX_DEPTH + 1, 1000, 200_000):
        path.write_text(unit * depth + "1" + close * depth)
        with pytest.raises(CaptureFileError, match="nested deeper than"):
            load_raw(path, kind="capture")


@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
def test_brackets_in_strings_are_no_nesting(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphalign.ir.files._CHUNK", chunk)
    path = tmp_path / "flat.json"
    content = {"[" * 500: '"[{' * 100, "b": ['\\"[', "\\", "[" * 90, {"c": "]" * 300}], "d": [[i] for i in range(200)]}
    path.write_text(json.dumps(content))
    assert load_raw(path, kind="capture") == content
    deep: object = "["
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    path.write_text(json.dumps([deep]))
    assert load_raw(path, kind="capture") == [deep]
    path.write_text(json.dumps([[deep]]))
    with pytest.raises(CaptureFileError, match="nested deeper than"):
        load_raw(path, kind="capture")


def test_a_bomb_is_refused_before_it_unfolds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphalign.ir.files.MAX_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * (64 << 20)))
    with pytest.raises(CaptureFileError, match="more than 1 MiB"):
        load_raw(path, kind="capture")


def test_two_models_are_not_compared(tmp_path: Path) -> None:
    message = run_diff(paths("llama")[0], paths("qwen3")[1], tmp_path / "sites.json")
    assert "different models" in message
    assert "LlamaForCausalLM" in message


def test_the_sides_in_the_wrong_order(tmp_path: Path) -> None:
    assert "is not a valid inference capture" in " ".join(run_diff(*paths("llama")[::-1], tmp_path / "sites.json").split())


def test_a_future_version_is_refused(tmp_path: Path) -> None:
    plain = captures("llama")[1].model_dump(mode="json")
    plain["version"] = 2
    path = tmp_path / "future.json"
    path.write_text(json.dumps(plain))
    message = " ".join(run_diff(paths("llama")[0], path, tmp_path / "sites.json").split())
    assert "is a training capture of format version 2; this graphalign reads up to 1" in message
    assert "upgrade graphalign" in message


# ---------------------------------------------------------------------------------------------------------------------
# Valid files with hostile content


def pair() -> tuple[dict[str, Any], dict[str, Any]]:
    _, _, i, t = random_pair(5)
    return i.model_dump(mode="json"), t.model_dump(mode="json")


def refuse(i: dict[str, Any], t: dict[str, Any], *, harmless: bool = False) -> None:
    """A diff of these is a GraphalignError with exit code 2, or a report that calls the place out; never anything else."""
    started = time.perf_counter()
    report, code = None, 0
    try:
        report = diff(InferenceGraph.model_validate(i), TrainingGraph.model_validate(t))
    except GraphalignError as e:
        code = e.exit_code
    if report is None:
        assert code == 2
    elif not harmless:
        assert report.semantic or report.leftovers or report.undetermined or report.unpatchable, "it was taken for a good capture"
    assert time.perf_counter() - started < SECONDS


def loops(i: dict[str, Any]) -> list[dict[str, Any]]:
    return [n for k in i["graphs"][0]["kernels"] for n in k["nodes"] if n["kind"] == "loop"]


def body(i: dict[str, Any]) -> dict[str, Any]:
    return i["bodies"][loops(i)[-1]["body"]]


EXPRESSIONS = [
    "__import__('os').system('touch /tmp/graphalign-was-here')",
    "open('/tmp/graphalign-was-here', 'w')",
    "().__class__.__bases__[0].__subclasses__()",
    "[x for x in (1,)]",
    "lambda: 1",
    "p0 if p0 else p0",
    "10**10**10",
    "2**100000",
    "((((9**4)**4)**4)**4)**4",
    "p0**-1",
    "p0//0",
    "p0 % 0",
    "1/0",
    "nobody + 1",
    "FloorDiv(p0)",
    "ModularIndexing(p0, 0, 0)",
    "Mod()",
    "eval('1')",
    "1e400",
    "True",
    "'text'",
    "p0.real",
    "p0 +",
    "(" * 60 + "9" + "**4)" * 60,
    "(" * 500 + "p0" + ")" * 500,
    "-" * 4000 + "p0",
    "p0+" * 1300 + "p0",
    "9" * 4000,
    "p0*4611686018427387903*4611686018427387903",
    "p0 - 1000",
    "p0 + 100000000000",
    "",
    "\x00",
]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_hostile_index_expressions(text: str) -> None:
    i, t = pair()
    for name in body(i)["indexing"]:
        body(i)["indexing"][name] = text
    refuse(i, t)
    assert not Path("/tmp/graphalign-was-here").exists()


@pytest.mark.parametrize("text", [*EXPRESSIONS[:13], "-5", "99999999999", "3.5", "p0"])
def test_hostile_sizes(text: str) -> None:
    for change in (_sizes_of_buffers, _strides_of_buffers, _extents_of_loops, _sizes_of_inputs):
        i, t = pair()
        change(i, text)
        refuse(i, t)


def _sizes_of_buffers(i: dict[str, Any], text: str) -> None:
    for b in i["graphs"][0]["buffers"]:
        b["size"] = [text] * len(b["size"])


def _strides_of_buffers(i: dict[str, Any], text: str) -> None:
    for b in i["graphs"][0]["buffers"]:
        b["stride"] = [text] * len(b["stride"])


def _extents_of_loops(i: dict[str, Any], text: str) -> None:
    for b in i["bodies"].values():
        b["var_ranges"] = [[v, text] for v, _ in b["var_ranges"]]


def _sizes_of_inputs(i: dict[str, Any], text: str) -> None:
    for x in i["graphs"][0]["inputs"]:
        x["size"] = [text] * len(x["size"])
        x["source"] = "nobody"


def _cycle(i: dict[str, Any], t: dict[str, Any]) -> None:
    buffers = i["graphs"][0]["buffers"]
    for a, b in zip(buffers, buffers[1:] + buffers[:1], strict=True):
        a["view_of"], a["layout"] = b["name"], "NonOwningLayout"


def _no_body(i: dict[str, Any], t: dict[str, Any]) -> None:
    i["bodies"] = {}


def _no_buffers(i: dict[str, Any], t: dict[str, Any]) -> None:
    i["graphs"][0]["buffers"] = []


def _no_inputs(i: dict[str, Any], t: dict[str, Any]) -> None:
    i["graphs"][0]["inputs"] = []


def _no_kernels(i: dict[str, Any], t: dict[str, Any]) -> None:
    i["graphs"][0]["kernels"] = []


def _no_graphs(i: dict[str, Any], t: dict[str, Any]) -> None:
    i["graphs"] = []


def _no_nodes(i: dict[str, Any], t: dict[str, Any]) -> None:
    t["nodes"], t["outputs"] = [], []


def _no_parameters(i: dict[str, Any], t: dict[str, Any]) -> None:
    i["parameters"] = []


def _too_few_buffers(i: dict[str, Any], t: dict[str, Any]) -> None:
    for n in loops(i):
        n["buffers"] = []


def _ops_of_other_forms(i: dict[str, Any], t: dict[str, Any]) -> None:
    body(i)["ops"] = [["x"], ["a", "b", "c"], [1, 2, 3, 4], [None, None, None, None]]


def _ops_without_arguments(i: dict[str, Any], t: dict[str, Any]) -> None:
    body(i)["ops"] = [[name, target, [], {}] for name, target, *_ in body(i)["ops"]]


def _odd_arguments(i: dict[str, Any], t: dict[str, Any]) -> None:
    body(i)["ops"] = [[name, target, [None, {"n": "nobody"}, {"b": "b99"}], {"dtype": 3}] for name, target, *_ in body(i)["ops"]]


def _unknown_loop_ops(i: dict[str, Any], t: dict[str, Any]) -> None:
    body(i)["ops"] = [[name, "__class__" if target == "mul" else target, args, kw] for name, target, args, kw in body(i)["ops"]]


def _unknown_dtypes(i: dict[str, Any], t: dict[str, Any]) -> None:
    for b in i["graphs"][0]["buffers"]:
        b["dtype"] = "Tensor"


def _odd_externs(i: dict[str, Any], t: dict[str, Any]) -> None:
    for k in i["graphs"][0]["kernels"]:
        for n in k["nodes"]:
            if n["kind"] == "extern":
                n["args"] = [["self", {"b": 3}], ["mat2", [[[{"b": "nobody"}]]]], ["out", {"param": 1}]]


def _absurd_segments(i: dict[str, Any], t: dict[str, Any]) -> None:
    for p in i["parameters"]:
        for s in p["segments"]:
            s["dim"], s["start"], s["length"] = 7, -5, 10**18


def _missing_values(i: dict[str, Any], t: dict[str, Any]) -> None:
    for n in t["nodes"][3:]:
        n["args"] = [{"v": 10**6} for _ in n["args"]]


def _values_out_of_order(i: dict[str, Any], t: dict[str, Any]) -> None:
    t["nodes"].reverse()


def _huge_tensors(i: dict[str, Any], t: dict[str, Any]) -> None:
    for n in t["nodes"]:
        for o in n["outputs"]:
            o["shape"] = [1 << 40, 1 << 20]


def _huge_factories(i: dict[str, Any], t: dict[str, Any]) -> None:
    out = {"id": 10**5, "dtype": "float32", "shape": [2]}
    t["nodes"].insert(0, {"op": "aten.zeros.default", "args": [[1 << 30, 1 << 30]], "outputs": [out]})
    t["nodes"].insert(1, {"op": "aten.repeat.default", "args": [{"v": 10**5}, [1 << 30]], "outputs": [{**out, "id": 10**5 + 1}]})
    t["outputs"].append(10**5 + 1)


def _foreign_ops(i: dict[str, Any], t: dict[str, Any]) -> None:
    for n, op in zip(
        t["nodes"], ["aten.set_.source_Storage", "prims.device_put", "aten.__class__.x", "os.system", "a.b.c.d", ""] * 99, strict=False
    ):
        n["op"] = op


def _negative_tokens(i: dict[str, Any], t: dict[str, Any]) -> None:
    t["header"]["tokens"] = -3


def _huge_tokens(i: dict[str, Any], t: dict[str, Any]) -> None:
    t["header"]["tokens"] = 10**12


def _bad_constants(i: dict[str, Any], t: dict[str, Any]) -> None:
    t["inputs"].append({"value": {"id": 10**5, "dtype": "bfloat16", "shape": [4]}, "kind": "buffer", "name": "x", "data": "!!"})
    t["nodes"].insert(
        0, {"op": "aten.neg.default", "args": [{"v": 10**5}], "outputs": [{"id": 10**5 + 1, "dtype": "bfloat16", "shape": [4]}]}
    )


def _bad_tables(i: dict[str, Any], t: dict[str, Any]) -> None:
    name = i["parameters"][0]["name"]
    i["parameters"][0]["segments"], i["parameters"][0]["learned"] = [], False
    i["tables"] = [{"name": name, "dtype": "bfloat16", "shape": [1 << 40, 32], "rows": [0, 1, 1 << 50], "values": "AAAA"}]


CHANGES: list[Callable[[dict[str, Any], dict[str, Any]], None]] = [
    v for k, v in list(globals().items()) if k.startswith("_") and not k.startswith("__") and callable(v) and v.__code__.co_argcount == 2
    and "text" not in v.__code__.co_varnames
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__.strip("_"))
def test_hostile_content(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    i, t = pair()
    change(i, t)
    refuse(i, t, harmless=change is _huge_factories)  # nothing reads what these would make
