"""`graphalign rules check` and expected counts: the packaged rules hold, and a planted fault in a copy is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from graphalign.errors import BadInputError
from graphalign.rules import rules_dir
from graphalign.rules_check import check_rules, recorded_folders
from graphalign.sites.expected import load_expected, verdict
from tests.drift.data import report
from tests.fixtures.recorded import CAPTURES


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """A copy of the rules that the three examples are enough for."""
    shutil.copytree(rules_dir(), tmp_path / "rules")
    folder = tmp_path / "rules"
    for unused in (
        "ops/moe.yaml",
        "ops/latent.yaml",
        "ops/parallel.yaml",
        "ops/recurrent.yaml",
        "ops/custom.yaml",
        "expected/moe.yaml",
        "expected/layernorm.yaml",
    ):
        (folder / unused).unlink(missing_ok=True)
    (folder / "expected" / "dense.yaml").write_text(
        "- {architecture: Qwen2ForCausalLM, device: cpu,\n"
        "   layer: {norm_weight: 2, residual_rmsnorm: 4, residual_stream: 2, rope: 4, swiglu: 1},\n"
        "   first: {residual_rmsnorm: 2, residual_stream: 1}, outside: {norm_weight: 1, residual_rmsnorm: 2}}\n"
    )
    (folder / "groups" / "groups.yaml").write_text(
        "- {name: residual_stream, producer: {kind: residual_sum}, consumer: {kind: residual_sum}}\n"
        "- {name: rope, region: {reads: table, feeds: attention}}\n"
    )
    (folder / "vectors" / "groups.yaml").write_text(
        "- {group: residual_stream, producer: {kind: [residual_sum]}, consumer: {kind: [residual_sum]}}\n"
        "- {group: rope, region: {reads: [gemm, table], feeds: [attention]}}\n"
    )
    text = (folder / "vectors" / "ops.yaml").read_text().splitlines(keepends=True)
    text = [x if "unrecorded" in x or "aten." not in x else x.replace("}", ", unrecorded: on a GPU}") for x in text]
    text = [
        x
        for x in text
        if not any(
            name in x
            for name in (
                "gdn",
                "moe",
                "mla",
                "rotary",
                "mamba",
                "short_conv",
                "all_gather",
                "all_reduce",
                "flashinfer_trtllm_fused_allreduce_norm",
                "vocab_parallel_embedding",
            )
        )
    ]
    (folder / "vectors" / "ops.yaml").write_text("".join(text))
    return folder


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captures")
    for name in ("qwen2.inf.json.gz", "qwen2.train.json.gz"):
        shutil.copy(CAPTURES / name, folder)
    return folder


def problems(rules: Path, folder: Path) -> list[str]:
    # oneDNN's GEMM occurs in SmolLM2 only, whose diff takes long
    return [p for p in check_rules(rules, [folder]).problems if "onednn_mm" not in p]


def test_the_packaged_rules_hold() -> None:
    assert check_rules(rules_dir(), recorded_folders()).problems == []


def add(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


def test_planted_faults_are_found(rules: Path, qwen2: Path) -> None:
    add(rules / "ops" / "gemm.yaml", "- {op: my.gemm.default, kind: gemm, input: a, weight: b}\n")
    add(rules / "groups" / "groups.yaml", "- {name: never, producer: {op: cosh}}\n")
    add(rules / "vectors" / "groups.yaml", "- {group: rope, region: {reads: [gemm], feeds: [attention]}}\n- {group: lost}\n")
    add(rules / "vectors" / "ops.yaml", "- {op: aten.mm.default, args: [self]}\n")
    add(rules / "expected" / "dense.yaml", "- {architecture: MyForCausalLM, device: cpu, layer: {rope: 4}}\n")
    found = [p for p in problems(rules, qwen2) if not p.startswith("expected sites of Qwen2")]
    advice = "matches nothing in any recorded capture: record one, or say in rules/vectors why none can be (`unrecorded`)"
    assert set(found) == {
        f"op my.gemm.default {advice}",
        "op my.gemm.default has no test vector in rules/vectors",
        f"group never {advice}",
        "group never has no test vector in rules/vectors",
        "group rope: its test vector is named by no rule",
        "vector of lost: there is no such rule",
        "op aten.mm.default: its test vector has no argument mat2",
        f"expected sites of MyForCausalLM on cpu {advice}",
    }


def test_counts_that_are_not_those_of_the_capture_are_found(rules: Path, qwen2: Path) -> None:
    """Without its rule, the name of a group is a generated one."""
    found = problems(rules, qwen2)
    assert "expected sites of Qwen2ForCausalLM on cpu: qwen2.inf.json.gz has swiglu: 0 where 1 are expected (fewer), layers 0-5" in found


def test_a_declaration_must_name_arguments_that_its_op_has(rules: Path, qwen2: Path) -> None:
    (rules / "ops" / "custom.yaml").write_text(
        "- {op: my.rope.default, kind: opaque, computes: {function: rope, values: [q], positions: p, table: t, head_size: n, neox: x}}\n"
    )
    add(rules / "vectors" / "ops.yaml", "- {op: my.rope.default, args: [q, p, t, n], unrecorded: it is made up}\n")
    assert "op my.rope.default: its test vector has no argument x" in problems(rules, qwen2)
    (rules / "ops" / "custom.yaml").write_text("- {op: my.rope.default, kind: opaque, computes: {function: exp}}\n")
    with pytest.raises(BadInputError, match=r"bad rule file custom\.yaml"):
        check_rules(rules, [qwen2])


def test_a_folder_without_rules_is_an_error_here_and_a_warning_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInputError, match="there are no rules in"):
        check_rules(tmp_path, recorded_folders())
    assert rules_dir(tmp_path) == tmp_path
    assert "warning: --rules: there is no rule file in" in capsys.readouterr().err


def test_no_captures_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no recorded captures"):
        check_rules(rules_dir(), [tmp_path])


def test_expected_counts_in_words(tmp_path: Path) -> None:
    assert verdict(report("qwen3"), rules_dir()) == "as many sites as expected for Qwen3ForCausalLM on cpu"
    (tmp_path / "expected").mkdir()
    assert verdict(report("qwen3"), tmp_path).startswith("no expected counts for Qwen3ForCausalLM on cpu in this regime")
    file = tmp_path / "expected" / "a.yaml"
    file.write_text(
        "- {architecture: Qwen3ForCausalLM, device: cpu, layer: {norm_weight: 4, residual_rmsnorm: 4, residual_stream: 2, rope: 9},\n"
        "   first: {residual_rmsnorm: 2, residual_stream: 1}, outside: {norm_weight: 1}, last: {rope: 8}}\n"
    )
    assert verdict(report("qwen3"), tmp_path).splitlines()[:4] == [
        "not the sites expected for Qwen3ForCausalLM on cpu:",
        "  rope: 8 where 9 are expected (fewer), layers 0-4",
        "  swiglu: 1 where 0 are expected (more), layers 0-5",
        "  residual_rmsnorm: 2 where 0 are expected (more), outside the layers",
    ]
    (tmp_path / "expected" / "b.yaml").write_text(file.read_text())
    with pytest.raises(BadInputError, match="counted twice"):
        load_expected(tmp_path)
    file.write_text("- {architecture: 3}\n")
    with pytest.raises(BadInputError, match=r"bad rule file expected/a\.yaml"):
        load_expected(tmp_path)
