"""Drift between recorded captures: engine versions, settings, and what must not look like drift."""

from __future__ import annotations

import pytest

from graphalign.drift.compare import Drift, drift
from graphalign.drift.snapshot import of_inference, of_report
from graphalign.errors import BadInputError
from graphalign.rules import rules_dir
from graphalign.sites.expected import verdict
from graphalign.sites.find import diff
from tests.drift.data import CAPTURES, capture, renamed, report, sites, structure, undeclared
from tests.fixtures import recorded


def topics(d: Drift) -> set[str]:
    return {i.topic for i in d.items if i.moved}


def settings(d: Drift) -> dict[str, str]:
    return {i.what: i.new for i in d.items if i.topic == "setting"}


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "qwen3.rotary"])
def test_a_capture_has_not_moved_against_itself(name: str) -> None:
    d = drift(structure(name), structure(name))
    assert (d.items, d.moved, d.verdict) == ((), False, "none")


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "qwen3.rotary"])
def test_names_and_order_are_no_drift(name: str) -> None:
    other = renamed(capture(name))
    assert other.graphs != capture(name).graphs
    assert drift(structure(name), of_inference(other, "renamed", rules_dir())).items == ()


def test_names_and_order_are_no_drift_of_sites() -> None:
    again = diff(renamed(capture("qwen2")), recorded.captures("qwen2")[1])
    d = drift(sites("qwen2"), of_report(again, "renamed"))
    assert (d.items, d.verdict, d.reasons) == ((), "right", ())


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
def test_another_torch_moves_the_gemm_and_thresholds_and_no_rounding(name: str) -> None:
    d = drift(structure(f"{name}.v0.25.1"), structure(f"{name}.v0.28.0"))
    assert (d.old.versions["torch"], d.new.versions["torch"]) == ("2.11.0+cu130", "2.13.0+cpu")
    assert {i.what for i in d.items if i.moved} == {
        "inductor.realize_acc_reads_threshold",
        "inductor.realize_opcount_threshold",
        "target.gemm._C.onednn_mm.default",
        "target.gemm._C.weight_packed_linear.default",
    }


def test_a_patch_from_another_torch_is_right() -> None:
    assert drift(sites("qwen3.v0.25.1"), sites("qwen3")).verdict == "right"


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize(("old", "new"), [("v0.28.0", "v0.30.0"), ("v0.30.0", "v0.31.0"), ("v0.31.0", "")])
def test_between_neighbouring_versions_nothing_moved(name: str, old: str, new: str) -> None:
    """Same torch, and vLLM's native forwards of norms, RoPE and SiLU compute the same: see graphalign/drift/DRIFT.md."""
    d = drift(structure(f"{name}.{old}"), structure(f"{name}.{new}" if new else name))
    assert not d.moved
    assert d.old.versions["vllm"] == old.removeprefix("v")
    said = {i.what: (i.old, i.new) for i in d.items}
    if old == "v0.28.0":
        was, now = said["arguments of op _C.weight_packed_linear.default"]
        assert (was, now) == ("mat1, mat2, bias, is_vnni", "out, mat1, mat2, bias, is_vnni")


def test_an_op_that_returned_its_result_in_an_older_version_has_the_same_sites() -> None:
    d = drift(sites("qwen2.v0.28.0"), sites("qwen2"))
    assert (d.moved, d.verdict) == (False, "right")
    assert report("qwen2.v0.28.0").stats["check"]["lowest_with_sites"] == 1.0


@pytest.mark.parametrize("setting", ["rms_norm", "silu"])
def test_a_custom_op_that_falls_back_on_the_cpu_moves_settings_only(setting: str) -> None:
    """On CPU RMSNorm has no kernel of its own, and SiluAndMul.forward_cpu is forward_native (vLLM 0.32)."""
    d = drift(structure("qwen3"), structure(f"qwen3.{setting}"))
    assert topics(d) == {"setting"}
    assert "custom_ops" in settings(d)


def test_the_custom_rotary_kernel_rounds_what_it_reads() -> None:
    d = drift(sites("qwen3"), sites("qwen3.rotary"), {"_C.rotary_embedding.default": "does it so"})
    assert d.verdict == "wrong"
    said = next(i for i in d.items if i.what == "custom op _C.rotary_embedding.default")
    assert (said.change, said.new) == ("appeared", "compared as rules/ops declares it: does it so")
    assert settings(d) == {"custom_ops": "['none', '+rotary_embedding']"}
    moved = [i for i in d.items if i.topic == "site"]
    assert len(moved) == 4
    assert all(i.change == "vanished" and i.what.startswith("rope: `self.weight * hidden_states.to(input_dtype)` → ") for i in moved)
    assert drift(sites("qwen3.rotary"), sites("qwen3")).verdict == "safe"
    back = drift(structure("qwen3.rotary"), structure("qwen3"))
    assert [i.change for i in back.items if i.what == "custom op _C.rotary_embedding.default"] == ["vanished"]


def test_without_its_declaration_the_kernel_is_opaque_and_the_old_patch_unknown() -> None:
    d = drift(sites("qwen3"), of_report(undeclared(), "new"), {"_C.rotary_embedding.default": "does it so"})
    assert d.verdict == "unknown"
    assert next(i for i in d.items if i.what == "opaque op _C.rotary_embedding.default").new.endswith("rules/ops: does it so")
    rope = [i for i in d.items if i.topic == "site" and i.what.startswith("rope")]
    assert len(rope) == 8
    assert {i.change for i in rope} == {"vanished"}


def test_a_rewritten_trainer_leaves_open_what_its_module_leaves_open() -> None:
    old, new = sites("qwen3"), of_report(undeclared(), "new")
    old.keys = {k: (p.model_copy(update={"text": "a"}), c.model_copy(update={"text": "b"})) for k, (p, c) in old.keys.items()}
    assert drift(old, new).verdict == "wrong", "the same file, and yet no such expression"
    old.sources = dict.fromkeys(old.sources, "0" * 64)
    assert drift(old, new).verdict == "unknown"


def test_emulated_casts_make_the_old_patch_wrong() -> None:
    d = drift(sites("qwen3"), sites("qwen3.casts"))
    assert d.verdict == "wrong"
    assert all("inference no longer differs there" in r for r in d.reasons)
    assert settings(d)["inductor.emulate_precision_casts"] == "True"
    assert [g.name for g in report("qwen3.casts").groups] == ["residual_rmsnorm"], "the sum is FP32 in vLLM's own source"
    moved = {i.what: (i.old, i.new) for i in drift(structure("qwen3"), structure("qwen3.casts")).items if i.topic == "edge"}
    assert moved["truediv in model.layers.*.mlp.act_fn → operand 0 of mul in model.layers.*.mlp.act_fn"] == ("unrounded", "bfloat16")
    assert drift(sites("qwen3.casts"), sites("qwen3")).verdict == "safe"


def test_another_fusion_limit_moves_kernels_and_no_site() -> None:
    d = drift(structure("qwen3"), structure("qwen3.fusion"))
    assert topics(d) == {"setting", "kernel"}
    assert settings(d)["inductor.max_fusion_size"] == "2"
    assert drift(sites("qwen3"), sites("qwen3.fusion")).verdict == "right"


def test_fixtures_are_small() -> None:
    files = list(CAPTURES.iterdir())
    assert len(files) >= 14
    assert max(p.stat().st_size for p in files) <= 25_000


def test_between_versions_on_a_simulated_gpu_one_entry_of_a_list_moved() -> None:
    d = drift(structure("qwen3.h100.v0.31.0"), structure("qwen3.h100"))
    assert [(i.topic, i.what, i.old, i.new) for i in d.items if i.moved] == [
        ("setting", "splitting_ops", "without", "vllm::qwen4_exp_qsa_prepare_with_output")
    ]
    d = drift(sites("qwen3.h100.v0.31.0"), sites("qwen3.h100"))
    assert (d.verdict, {i.topic for i in d.items if i.moved}) == ("right", {"setting"})


def test_a_list_in_another_order_is_no_drift() -> None:
    old, new = structure("qwen3.rotary"), structure("qwen3.rotary")
    new.compile = {**new.compile, "custom_ops": new.compile["custom_ops"][::-1]}
    (note,) = drift(old, new).items
    assert (note.moved, note.what) == (False, "told otherwise, but no setting: custom_ops")


def test_a_simulated_gpu_has_its_own_map() -> None:
    assert not drift(structure("qwen3.h100"), of_inference(renamed(capture("qwen3.h100")), "renamed", rules_dir())).moved
    assert verdict(report("qwen3.h100"), rules_dir()) == "as many sites as expected for Qwen3ForCausalLM on cuda (simulated)"
    with pytest.raises(BadInputError, match="different targets: device is cpu in one and cuda in the other"):
        drift(sites("qwen3"), sites("qwen3.h100"))
