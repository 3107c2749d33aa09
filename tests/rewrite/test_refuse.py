"""A patch that does not fit is refused, in words that help, and the model is untouched."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import graphalign
from graphalign.errors import BadInputError, GraphalignError, PatchError, PatchNotLiveError
from graphalign.patch import spec as s
from tests.rewrite.tiny import build, recorded, spec_for, tokens


def refused(model: nn.Module, spec: Any, *words: str, error: type[GraphalignError] = PatchError, **options: Any) -> None:
    """`apply` raises with these words and changes nothing."""
    before = [(id(m), type(m), sorted(vars(m))) for m in model.modules()]
    with pytest.raises(error) as e:
        graphalign.apply(model, spec, **options)
    assert [w for w in words if w not in str(e.value)] == [], str(e.value)
    assert [(id(m), type(m), sorted(vars(m))) for m in model.modules()] == before


def edited(change: dict[str, Any], *, end: str = "consumer", group: str = "swiglu", fields: dict[str, Any] | None = None) -> s.PatchSpec:
    """The spec with the first edit of a group changed by hand."""
    spec = spec_for(2, [group])
    first, *rest = spec.groups[0].edits
    key = getattr(first, end).model_copy(update=change)
    first = first.model_copy(update={end: key, **(fields or {})})
    return spec.model_copy(update={"groups": (spec.groups[0].model_copy(update={"edits": (first, *rest)}),)})


# -- the model is another one ------------------------------------------------------------------------------------------


def test_other_architecture() -> None:
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    refused(
        model,
        spec_for(2, ["swiglu"]),
        "the patch is for code in transformers/models/qwen3/modeling_qwen3.py",
        "this model's layers are from",
        "transformers/models/llama/modeling_llama.py",
    )
    refused(
        nn.Sequential(nn.Linear(2, 2)),
        spec_for(2),
        "does not have the modules that the patch is for: ",
        "make a patch for this architecture",
    )


def test_other_number_of_layers() -> None:
    refused(build(3), spec_for(2), "the patch is stale", "the model has 3 layers, the patch is for 2", "allow_stale=True")
    refused(build(2), spec_for(3), "does not have the modules that the patch is for: model.layers.2", "nearest here: model.layers.0")


def test_two_places() -> None:
    both = nn.ModuleDict({"policy": build(2), "reference": build(2)})
    refused(both, spec_for(2), "the patch fits more than one place of this model", "apply it to the submodule you mean")


def test_other_dtype() -> None:
    refused(
        build(2, dtype=torch.float32), spec_for(2), "has float32 parameters; the patch is for bfloat16 ones", "make a patch for this regime"
    )


def test_other_implementation_of_a_module() -> None:
    model = build(2)
    model.model.layers[1].input_layernorm = nn.RMSNorm(64, dtype=torch.bfloat16)
    refused(model, spec_for(2), "model.layers.1.input_layernorm is a RMSNorm, the patch is for Qwen3RMSNorm", "Liger")


def test_edited_modeling_file() -> None:
    spec = spec_for(2, ["swiglu"])
    sources = {k: "0" * 64 if "qwen3" in k else v for k, v in spec.sources.items()}
    stale = spec.model_copy(update={"sources": sources})
    refused(build(2), stale, "the patch is stale", "modeling_qwen3.py: not the code that the patch was made with (transformers 5.19.0)")
    model = build(2)
    graphalign.apply(model, stale, allow_stale=True)
    model(tokens(), use_cache=False)


def test_other_config_and_attention() -> None:
    spec = spec_for(2, ["rope"])
    other = spec.model_copy(update={"model": {**spec.model, "config_digest": "0" * 64}})
    refused(build(2), other, "the model's config is not the one that the patch was made with", "allow_stale=True")
    refused(build(2, "eager"), spec, "the model runs eager attention, the patch is for sdpa")


@pytest.mark.parametrize("autocast", ["bfloat16", "float16"])
def test_autocast_mismatch_is_found_when_it_runs(autocast: str) -> None:
    spec = spec_for(2, ["rope"])
    model = build(2)
    graphalign.apply(model, spec.model_copy(update={"regime": {**spec.regime, "autocast": autocast}}), trial=False)
    with pytest.raises(PatchNotLiveError, match=rf"autocast is off, the patch is for autocast on \({autocast}\)"):
        model(tokens(), use_cache=False)


# -- the spec was edited by hand ----------------------------------------------------------------------------------------


def test_unknown_module() -> None:
    refused(build(2), edited({"module": "model.layers.*.feed.mlp"}), "model.layers.0 has no module feed.mlp", "nearest: mlp")


def test_unknown_function() -> None:
    refused(build(2), edited({"function": "Qwen4MLP.forward"}), "model.layers.0.mlp is a Qwen3MLP, the patch is for Qwen4MLP")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (edited({"ordinal": 3}), ("swiglu: mlp.mul#3", "nearest: mlp.mul#0 down_proj = self.down_proj")),
        (edited({"op": "exp"}), ("swiglu: mlp.exp#0", "nearest: mlp.")),
        (
            edited({"text": "completely_different(words)"}),
            ("is another expression here", "completely_different(words)", "nearest: mlp.mul#0"),
        ),
        (
            edited({"op": "add", "text": ""}, end="producer"),
            ("is not computed by mlp.act_fn.add#0", "it is computed by: mlp.act_fn.silu#0 in SiLUActivation.forward"),
        ),
        (edited({}, fields={"operand": 7}), ("has 2 tensor operands, the patch edits number 7",)),
        (edited({}, fields={"operand": 1}), ("operand 1 of mlp.mul#0", "is not computed by")),
    ],
)
def test_edit_that_matches_nothing(spec: s.PatchSpec, words: tuple[str, ...]) -> None:
    refused(build(2), spec, "the patch was not applied", *words)
    model = build(2)
    graphalign.apply(model, spec, trial=False)
    with pytest.raises(GraphalignError) as e:
        model(tokens(), use_cache=False)
    assert [w for w in words if w not in str(e.value)] == [], str(e.value)


def test_overlapping_edits() -> None:
    spec = spec_for(2, ["swiglu"])
    (group,) = spec.groups
    again = group.model_copy(update={"name": "more", "edits": (group.edits[0].model_copy(update={"kind": "round"}),)})
    refused(build(2), spec.model_copy(update={"groups": (group, again)}), "two edits claim operand 0 of", "swiglu", "more")
    again = group.model_copy(update={"name": "more"})
    refused(build(2), spec.model_copy(update={"groups": (group, again)}), "two edits claim operand 0 of", "swiglu", "more")


# -- hostile or broken files -------------------------------------------------------------------------------------------

TEXT = s.dump(recorded())
BOMB = "a: &a [x, x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("is not a patch spec",)),
        ("[1, 2", ("is not YAML",)),
        ("\x00", ("is not YAML",)),
        ("42", ("is not a patch spec",)),
        (BOMB, ("is not YAML", "aliases are not allowed")),
        ("format: !!python/object/apply:os.system ['true']", ("is not YAML",)),
        ("[" * 3000 + "]" * 3000, ("nested too deeply",)),
        ("a: " + "{a: " * 3000 + "1" + "}" * 3000, ("nested too deeply",)),
        (TEXT.replace("version: 1", "version: 2", 1), ("is of format version 2", "upgrade graphalign")),
        (TEXT.replace("version: 1", "version: .nan", 1), ("not a valid patch spec",)),
        (TEXT.replace("layers: 0-5", "layers: 0-99999999", 1), ("not a valid patch spec", "layers")),
        (TEXT.replace("layers: 0-5", "layers: 5-0", 1), ("not a valid patch spec", "layers must ascend")),
        (TEXT.replace("layers: 0-5", "layers: [0, 5]", 1), ("not a valid patch spec", "groups.0.edits.0.layers")),
        (TEXT.replace("layers: 0-5", "layers: 0-4", 1), ("lists 5 consumer layers and 6 producer layers",)),
        (TEXT.replace("kind: keep", "kind: drop", 1), ("not a valid patch spec", "groups.0.edits.0.kind")),
        (TEXT.replace("kind: keep", "kind: keep\n    code: import os", 1), ("not a valid patch spec", "groups.0.edits.0.code")),
        (TEXT.replace("format: bfloat16", "format: eval", 1), ("not a valid patch spec", "groups.0.edits.0.format")),
        (TEXT.replace("format: bfloat16", "format: float32", 1), ("not a valid patch spec", "groups.0.edits.0.format")),
        (TEXT.replace("ordinal: 0", "ordinal: -1", 1), ("not a valid patch spec", "ordinal")),
        (TEXT.replace("operand: 1", "operand: 1e400", 1), ("not a valid patch spec", "operand")),
        (TEXT.replace("simulated: false", "2001-01-01: x", 1), ("not a valid patch spec",)),
    ],
)  # fmt: skip
def test_hostile_text(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(BadInputError) as e:
        s.parse(text)
    assert [w for w in words if w not in str(e.value)] == [], str(e.value)


def test_hostile_file(tmp_path: Any) -> None:
    path = tmp_path / "patch.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    refused(build(1), path, "cannot read patch spec", error=BadInputError)
    refused(build(1), tmp_path / "absent.yaml", "cannot read patch spec", error=BadInputError)
    path.write_bytes(b"#" * (s.MAX_BYTES + 1))
    refused(build(1), path, "is too large for a patch spec", error=BadInputError)


def test_round_trip() -> None:
    assert s.parse(TEXT) == recorded()
    assert re.match(r"format: graphalign\.patch\nversion: 1\n", TEXT)


def test_settings_of_a_trainer_are_no_other_config() -> None:
    model: Any = build(2)
    model.config.use_cache = False
    model.config.pad_token_id = 3
    model.config.architectures = [type(model).__name__]
    graphalign.apply(model, spec_for(2, ["rope"]), trial=False).undo()
