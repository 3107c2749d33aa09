"""Where the casts go: recorded models' files, not run with the patch."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from graphalign.errors import PatchError
from graphalign.source.generate import Generated, generate
from graphalign.source.ids import MARK
from graphalign.source.verify import Reference, differing, execute, in_place, refuse_imports, runs
from graphalign.source.write import STYLES, changed, files, moved, write
from tests.breadth import models
from tests.source.generated import spec


@functools.cache
def file(name: str) -> Generated:
    return generate(models.build(name), spec(name))


def added(name: str) -> list[str]:
    """Added lines without the comments that name their sites."""
    return [x[1:].partition(MARK)[0].strip() for x in file(name).diff.splitlines() if x.startswith("+") and not x.startswith("+++")]


def test_qwen3_is_nine_lines() -> None:
    assert added("qwen3_tail") == [
        "return self.weight * hidden_states",
        "down_proj = self.down_proj((self.act_fn(self.gate_proj(x).float()) * self.up_proj(x)).to(torch.bfloat16))",
        "q_embed = ((q * cos) + (rotate_half(q) * sin)).to(torch.bfloat16)",
        "k_embed = ((k * cos) + (rotate_half(k) * sin)).to(torch.bfloat16)",
        '_expect_unrounded(hidden_states, self.self_attn.layer_idx > 0, "hidden_states")',
        "hidden_states = self.input_layernorm(hidden_states).to(torch.bfloat16)",
        "hidden_states = residual.float() + hidden_states",
        "hidden_states = self.post_attention_layernorm(hidden_states).to(torch.bfloat16)",
        "hidden_states = self.norm(hidden_states).to(torch.bfloat16)",
    ]


@pytest.mark.parametrize("name", ["qwen3_tail", "llama_odd", "gemma2_eager"])
def test_diffs_fit_on_a_screen(name: str) -> None:
    assert 0 < file(name).changed_lines <= 15


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["qwen3_tail", "gemma2_eager", "arcee"])
def test_files_pass_ruff_and_need_nothing_of_ours(name: str, style: str, tmp_path: Path) -> None:
    path = tmp_path / "modeling_aligned.py"
    write(files(file(name), path, style))
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    named = {n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
    named |= {a.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import) for a in n.names}
    assert not [n for n in named if n.startswith("graphalign") or "_dynamo" in n]
    assert "use_kernel" not in "\n".join(x for x in path.read_text().splitlines() if not x.startswith("#"))


def test_the_same_input_gives_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "modeling_aligned.py"
    contents = files(file("qwen3_tail"), path, "module")
    write(contents)
    again = generate(models.build("qwen3_tail", seed=3), spec("qwen3_tail"))
    assert moved(files(again, path, "module")) == []
    path.write_text(path.read_text().replace("residual.float()", "residual"))
    assert "residual.float()" in moved(files(again, path, "module"))[0]


def test_what_is_viewed_is_rounded_before_the_view() -> None:
    """GLM 4 MoE: all experts read one tensor, where their gradients are added up in its format; the router reads it unrounded."""
    lines = added("glm4_moe")
    assert "hidden_states = _rounded_once(hidden_states).view(-1, hidden_states.shape[-1])" in lines
    assert any("self.gate_proj(_rounded_once(x))" in x and "self.up_proj(_rounded_once(x))" in x for x in lines)


def test_autocast_is_refused_before_anything_runs() -> None:
    with pytest.raises(PatchError, match="whose casts are in no expression"):
        Reference(models.build("qwen3_autocast"), spec("qwen3_autocast"))


def test_only_what_changes() -> None:
    assert changed(file("qwen3_tail")) == {
        "Qwen3RMSNorm": ["forward"],
        "Qwen3MLP": ["forward"],
        "": ["apply_rotary_pos_emb"],
        "Qwen3DecoderLayer": ["forward"],
        "Qwen3Model": ["forward"],
    }


def test_what_differs_by_place_is_refused_with_its_expression() -> None:
    with pytest.raises(PatchError) as e:
        file("llama4")
    assert "must compute in FP32 in model.layers.0.input_layernorm and not in model.layers.1.input_layernorm" in e.value.what
    assert e.value.where == "line 134: output * self.weight"


def test_autocast_is_refused() -> None:
    with pytest.raises(PatchError, match="casts are in no expression"):
        file("qwen3_autocast")


def test_a_forward_on_an_instance_is_refused() -> None:
    model = models.build("qwen3_tail")
    model.model.norm.forward = model.model.norm.forward
    with pytest.raises(PatchError, match=r"model.norm runs a forward of its own"):
        generate(model, spec("qwen3_tail"))


def test_a_rounded_layer_input_raises() -> None:
    """As FSDP2 rounds it by default."""
    model = models.build("qwen3_tail")
    with in_place(model, file("qwen3_tail")):
        model(input_ids=torch.arange(4)[None])
        handle = model.model.layers[2].register_forward_pre_hook(lambda m, args: (args[0].bfloat16(), *args[1:]))
        with pytest.raises(RuntimeError, match="cast_forward_inputs=False"):
            model(input_ids=torch.arange(4)[None])
        handle.remove()


def test_layers_that_differ_have_a_condition() -> None:
    """Where a norm reads its input rounded is for its callers to say: it does not know its layer."""
    found = "\n".join(added("arcee"))
    assert "def forward(self, hidden_states: torch.Tensor, rounded=False) -> torch.Tensor:" in found
    assert "residual = _rounded_once(hidden_states, self.self_attn.layer_idx == 1)" in found
    assert "hidden_states = _rounded_once(hidden_states, rounded) * torch.rsqrt" in found
    assert "self.post_attention_layernorm(hidden_states, rounded=self.self_attn.layer_idx" in found


def test_a_value_is_rounded_once_for_all_its_readers() -> None:
    """Two casts of one value would round its gradients one by one, where `apply` adds them up first."""
    once: Any = file("arcee").load()["_rounded_once"]
    x = torch.randn(3, requires_grad=True)
    assert once(x, False) is x
    assert once(x) is once(x)
    assert once(x).dtype == torch.bfloat16
    assert once(x, wide=True) is once(x, wide=True)
    assert once(x, wide=True).dtype == torch.float32
    with torch.no_grad():
        assert not once(x).requires_grad
    assert once(x).requires_grad, "what was rounded without gradients is rounded again where they flow"


def test_readers_of_what_a_norm_widens_share_it_in_fp32() -> None:
    found = "\n".join(added("cohere"))
    assert found.count("(_rounded_once(hidden_states, rounded, wide=True) - mean)") == 2


def test_a_value_is_rounded_where_a_variable_gets_it() -> None:
    """Before its other readers, so that gradients are added up in `apply`'s order."""
    assert "residual = hidden_states.to(torch.bfloat16)" in "\n".join(added("granite_moe_h100"))


def test_layers_of_two_kinds_know_their_number() -> None:
    assert "rounded=(self.self_attn or self.mamba).layer_idx == 1)" in "\n".join(added("granite_hybrid"))


def test_what_differs_in_another_file_is_refused_with_its_line() -> None:
    with pytest.raises(PatchError) as e:
        file("apertus")
    assert "one expression must compute in FP32" in e.value.what
    assert re.fullmatch(r"transformers/activations.py:\d+ alpha_n = .*softplus.*", e.value.where)


@pytest.mark.parametrize("name", ["qwen3_tail", "arcee", "olmo2"])
def test_only_the_changed_functions_are_the_whole_file(name: str, tmp_path: Path) -> None:
    """Style `override`: imported, and its `patch` called, it computes what the whole file computes, gradients too."""
    made, path = file(name), tmp_path / "override.py"
    write(files(made, path, "override"))
    model = models.build(name)
    run = runs(model)[1]
    with in_place(model, made):
        wanted = execute(model, run)
    module: Any = ModuleType("override")
    exec(path.read_text(), module.__dict__)
    stock = sys.modules[made.stock.module]
    before = {id(x): dict(vars(x)) for x in [stock, *(x for x in vars(stock).values() if isinstance(x, type))]}
    module.patch()
    try:
        assert differing(wanted, execute(model, run)) == []
    finally:
        for x in [stock, *(x for x in vars(stock).values() if isinstance(x, type))]:
            for k, v in before[id(x)].items():
                if vars(x).get(k) is not v:
                    setattr(x, k, v)
    assert differing(wanted, execute(model, run)) != []


def test_register_lets_auto_classes_build_it() -> None:
    import transformers

    names: dict[str, Any] = file("qwen3_tail").load("graphalign_generated_registered")
    table = transformers.AutoModelForCausalLM._model_mapping
    extra = dict(table._extra_content)
    try:
        names["register"]()
        model = transformers.AutoModelForCausalLM.from_config(models.config("qwen3_tail"), dtype=torch.bfloat16)
        assert type(model) is names["Qwen3ForCausalLM"]
    finally:
        table._extra_content.clear()
        table._extra_content.update(extra)


def test_an_import_of_ours_is_refused() -> None:
    made = file("qwen3_tail")
    with pytest.raises(PatchError, match=r"imports torch\._dynamo"):
        refuse_imports(replace(made, text=made.text + "import torch._dynamo\n"))


def test_a_layernorm_runs_in_fp32_and_step_by_step_where_its_steps_differ() -> None:
    """GPT-NeoX: in one layer the engine takes the mean in the kernel that makes the input, and the rest in the next, which reloads it."""
    norms = [x for x in added("gpt_neox") if "_layer_norm(self." in x]
    assert norms[-1] == "hidden_states = _layer_norm(self.final_layer_norm, hidden_states).to(torch.bfloat16)"
    layers = "wide=self.attention.layer_idx in _LAYERS_A"
    assert (
        norms[0] == f"_layer_norm(self.input_layernorm, hidden_states, {layers}, apart=self.attention.layer_idx == 2).to(torch.bfloat16),"
    )


REFUSED = {
    "nemotron": (
        "an edit of norm_weight is a step inside native_layer_norm, and no expression of a modeling file runs it",
        "F.layer_norm(",
    ),
    "falcon": (
        "add in FalconDecoderLayer.forward writes its result, which stays unrounded, into a tensor of the low format",
        "mlp_output +=",
    ),
    "llama4": (
        "one expression must compute in FP32 in model.layers.0.input_layernorm and not in model.layers.1.input_layernorm",
        "output * self.weight",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_expression_can_carry_is_refused_with_the_expression(name: str) -> None:
    with pytest.raises(PatchError) as e:
        file(name)
    assert e.value.what == REFUSED[name][0]
    assert re.match(r"line \d+: ", e.value.where)
    assert REFUSED[name][1] in e.value.where


def test_a_write_into_a_tensor_of_the_low_format_reads_rounded() -> None:
    """Latent attention expands k to all heads and copies it into place: rounded there, the gradients of the heads would add up in FP32."""
    assert "k_embed = torch.cat([(k1 * cos - k2 * sin).to(torch.bfloat16), (k2 * cos + k1 * sin).to(torch.bfloat16)], dim=-1)" in "\n".join(
        added("youtu")
    )


def test_a_cast_that_does_nothing_in_the_stock_model_goes() -> None:
    """It would round the FP32 stream of the generated one."""
    found = file("nemotron_h")
    assert "self.norm(hidden_states.to(dtype=self.norm.weight.dtype))" in found.stock.text
    assert "self.norm(hidden_states)  # graphalign: residual_rmsnorm" in found.body
