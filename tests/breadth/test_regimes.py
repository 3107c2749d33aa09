"""How training runs changes where it rounds: FP32 weights under autocast, and attention implementations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import graphalign
from graphalign.capture.training import record_forward
from graphalign.engines.trainer import build_trainer
from graphalign.errors import GraphalignError, PatchError
from graphalign.ir.training import TrainingGraph
from graphalign.patch.make import make_spec
from graphalign.patch.spec import PatchSpec
from graphalign.sites.find import diff
from tests.breadth.captured import captures, counts, report
from tests.fixtures import recorded

AUTOCAST = {"master_weight": 28, "norm_weight": 12, "rope": 24, "swiglu": 6}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from graphalign.engines.examples import resolve_model

    return str(resolve_model("example:qwen3", tmp_path_factory.mktemp("cache")))


def trainer(folder: str, **options: str) -> nn.Module:
    return build_trainer(folder, **options)  # type: ignore[arg-type]


def test_fp32_weights_under_autocast_have_their_own_sites() -> None:
    found = report("qwen3_autocast")
    assert counts(found) == AUTOCAST
    assert found.regime["param_dtype"] == "float32"
    assert found.regime["autocast"] == "bfloat16"
    for bucket in ("leftovers", "undetermined", "conflicting", "unpatchable", "semantic"):
        assert getattr(found, bucket) == (), bucket
    assert found.stats["check"]["equal_with_sites"] == 1.0
    # the engine's BF16 weights are rounded, the trainer's masters are not
    assert next(g for g in found.groups if g.name == "master_weight").kind == "round"
    # so are its cosines and sines
    rope = next(g for g in found.groups if g.name == "rope")
    assert {(s.kind, s.producer.op) for s in rope.sites} == {("round", "table")}


def test_attention_reads_what_autocast_casts() -> None:
    graph = captures("qwen3_autocast")[1]
    kinds = {v.id: v.dtype for n in graph.nodes for v in n.outputs if v is not None}
    read = [kinds[a["v"]] for n in graph.nodes if n.op == "graphalign.attention" for a in n.args[:3]]
    assert read
    assert set(read) == {"bfloat16"}


def test_the_autocast_patch_is_a_fixed_point_and_is_refused_elsewhere(folder: str) -> None:
    inference = captures("qwen3_autocast")[0]
    model = trainer(folder, dtype="float32")
    spec = make_spec(diff(inference, record_forward(model, autocast="bfloat16")))
    assert spec.edges == sum(AUTOCAST.values())
    with graphalign.apply(model, spec):
        patched = diff(inference, record_forward(model, autocast="bfloat16"))
        assert counts(patched) == {}
        assert patched.stats["check"]["equal_stock"] == 1.0
        with pytest.raises(GraphalignError, match="autocast"), torch.no_grad():
            model(input_ids=torch.tensor([[1, 2, 3]]))
    with pytest.raises(PatchError, match="bfloat16 parameters; the patch is for float32"):
        graphalign.apply(trainer(folder), spec)
    with pytest.raises(PatchError, match="float32 parameters; the patch is for bfloat16"):
        graphalign.apply(trainer(folder, dtype="float32"), rounded(folder))


def rounded(folder: str) -> PatchSpec:
    """The patch for BF16 weights."""
    return make_spec(diff(recorded.captures("qwen3")[0], record_forward(trainer(folder))))


def test_a_bf16_patch_is_the_same_under_autocast_here(folder: str) -> None:
    """With BF16 weights autocast changes no op of Qwen3; where it changes one, the forward is refused (`tests/rewrite/test_live.py`)."""
    model, ids = trainer(folder), torch.tensor([[1, 2, 3]])
    with graphalign.apply(model, rounded(folder)), torch.no_grad():
        plain = model(input_ids=ids).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(model(input_ids=ids).logits, plain)


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_the_attention_implementation_changes_nothing_outside_attention(folder: str, attention: str) -> None:
    graph: TrainingGraph = record_forward(trainer(folder, attention=attention))
    found, sdpa = diff(recorded.captures("qwen3")[0], graph), recorded.report("qwen3")
    assert found.regime["attention"] == attention
    assert counts(found) == counts(sdpa)
    assert [(s.producer.text, s.consumer.text, s.layers) for g in found.groups for s in g.sites] == [
        (s.producer.text, s.consumer.text, s.layers) for g in sdpa.groups for s in g.sites
    ]
    stands_in = [n for n in found.notes if "stand-in" in n]
    assert bool(stands_in) == (attention == "flash_attention_2")


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 5.0)])
def test_the_stand_in_attends_as_eager_does(window: int | None, softcap: float | None) -> None:
    from transformers.integrations.flash_attention import flash_attention_forward

    from graphalign.engines.flash import stand_in

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 7, 16, generator=generator) for h in (4, 2, 2))
    module = nn.Module()
    module.is_causal = True
    config = type("Config", (), {"_is_quantized": False, "dtype": torch.float32, "get_text_config": lambda self: self})()
    module.config = config
    stand_in(module)
    found, _ = flash_attention_forward(module, q, k, v, None, scaling=0.3, sliding_window=window, softcap=softcap)
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double().repeat_interleave(2, 1)) * 0.3
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    past = torch.arange(7)[:, None] - torch.arange(7)
    scores = scores.masked_fill((past < 0) | (past >= (window or 99)), -torch.inf)
    want = torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), v.double().repeat_interleave(2, 1))
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)


def test_building_with_flash_attention_needs_no_flash_attention(folder: str) -> None:
    model = trainer(folder, attention="flash_attention_2")
    assert model.config._attn_implementation == "flash_attention_2"
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits.float(), other(ids).logits.float(), rtol=0.05, atol=0.05)
