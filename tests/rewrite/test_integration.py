"""The frameworks that trainers are made of, each against the patch written by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainingArguments

from graphalign.errors import PatchError
from tests.rewrite.tiny import build, by_hand, patch, tokens


def pair() -> tuple[nn.Module, nn.Module]:
    model = build(2)
    hand = by_hand(copy.deepcopy(model))
    patch(model)
    return model.train(), hand.train()


def assert_same(a: nn.Module, b: nn.Module, *, grads: bool = False) -> None:
    pick = (lambda p: p.grad) if grads else (lambda p: p.detach())
    left = {n: pick(p) for n, p in a.named_parameters() if p.requires_grad}
    right = {n: pick(p) for n, p in b.named_parameters() if p.requires_grad}
    assert left.keys() == right.keys()
    assert [n for n in left if not torch.equal(left[n], right[n])] == []


@pytest.mark.parametrize("first", ["patch", "adapter"])
def test_lora(first: str) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights=False)

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    if first == "patch":
        model, hand = map(adapted, pair())
    else:
        model, hand = adapted(build(2)), adapted(by_hand(build(2)))
        patch(model)
    x = tokens(2, 9)
    for m in (model, hand):
        m.train()(input_ids=x, labels=x, use_cache=False).loss.backward()
    assert_same(model, hand, grads=True)


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = tokens(1, 9, seed=i)[0]
        return {"input_ids": x, "labels": x}


def test_trainer(tmp_path: Path) -> None:
    model, hand = pair()
    start = copy.deepcopy(hand)
    for m in (model, hand):
        args = TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        Trainer(model=m, args=args, train_dataset=Data()).train()
    assert_same(model, hand)
    assert not torch.equal(start.model.layers[0].mlp.up_proj.weight, hand.model.layers[0].mlp.up_proj.weight)


def test_accelerate() -> None:
    accelerator = Accelerator(cpu=True)
    models = []
    for m in pair():
        m, optimizer = accelerator.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1))
        for seed in (1, 2):
            x = tokens(2, 9, seed)
            accelerator.backward(m(x, labels=x, use_cache=False).loss)
            optimizer.step()
            optimizer.zero_grad()
        models.append(m)
    assert_same(*models)


# -- trainers that are compiled themselves ------------------------------------------------------------------------------


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a == b).float().mean())


@pytest.mark.slow
@pytest.mark.parametrize("order", ["patch then compile", "compile then patch", "in place"])
def test_outer_compile_by_inductor_keeps_the_roundings(order: str) -> None:
    """Layers run their own graphs, op by op; Inductor gets what lies between them. The final norm is a unit too."""
    model: Any = build(2)
    hand, stock, x = by_hand(copy.deepcopy(model)), copy.deepcopy(model), tokens(2, 13)
    if order == "compile then patch":
        with torch.no_grad():
            torch.compile(model, backend="eager")(x, use_cache=False)  # leave compiled code of the stock layers behind
    if order != "in place":
        patch(model)
        run = torch.compile(model)
    else:
        patch(model)
        model.compile()
        run = model
    with torch.no_grad():
        out, by, plain = (m(x, use_cache=False).logits for m in (run, hand, stock))
    assert agreement(out, by) > 0.97  # cos and sin by Inductor: seldom another last bit
    assert agreement(plain, by) < 0.5


def learn(model: Any, run: Any, **given: Any) -> dict[str, torch.Tensor]:
    """Every gradient, of the model as `run` runs it."""
    model.zero_grad(set_to_none=True)
    run(tokens(2, 13), use_cache=False, **given).logits.float().square().sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def unequal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[str]:
    return {n for n in a if not torch.equal(a[n], b[n])}


@pytest.mark.slow
def test_gradients_under_an_outer_compile() -> None:
    """Bitwise those without it where the mask is given. Without one, Transformers takes another path while it is traced: it materialises
    the causal mask and repeats K and V, whose gradients are then added up after they were rounded, in the stock model too."""
    stock = build(2)
    model = copy.deepcopy(stock)
    patch(model)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    for backend in ("aot_eager", "inductor"):
        assert (
            unequal(learn(model, model, attention_mask=mask), learn(model, torch.compile(model, backend=backend), attention_mask=mask))
            == set()
        )
    moved = unequal(learn(model, model), learn(model, torch.compile(model)))
    torch._dynamo.reset()
    assert moved == unequal(learn(stock, stock), learn(stock, torch.compile(stock, backend="aot_eager")))
    last = {n for n in moved if n.startswith("model.layers.1.")}
    assert {n for n in last if "_proj" in n} == {f"model.layers.1.self_attn.{x}_proj.weight" for x in "kv"}
    assert not any(n.startswith(("model.norm", "lm_head")) for n in moved)


@pytest.mark.parametrize("where", ["layer", "submodule"])
def test_layers_compiled_in_place_are_refused(where: str) -> None:
    model: Any = build(2)
    inner = model.model.layers[1] if where == "layer" else model.model.layers[1].mlp
    inner.compile()
    with pytest.raises(PatchError, match=r"model\.layers\.1(\.mlp)? is compiled already") as e:
        patch(model)
    assert "apply the patch before" in str(e.value)
