"""Values that cross modules beside their rounded form: tables of a module outside the layers, a scaled embedding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphalign
from graphalign.capture.recorder import record
from graphalign.errors import PatchNotLiveError
from graphalign.patch.spec import Edit, Group, Key, PatchSpec

DEPTH, WIDTH = 2, 32


class Tables(nn.Module):
    """As rotary embeddings do: FP32 inside, rounded to the dtype of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.arange(WIDTH) / 7.0, persistent=False)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = positions[..., None].float() + self.frequency
        cos = angle.cos() * 1.5
        sin = angle.sin() * 1.5
        return cos.to(x.dtype), sin.to(x.dtype)


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 1.7


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        cos, sin = tables
        y = self.proj(x)
        y = y * cos - y * sin
        return x + y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tables = Scaled(64, WIDTH), Tables()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.reentrant = self.copies = False
        self.seen: list[torch.dtype] = []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        cos, sin = self.tables(x, torch.arange(input_ids.shape[1])[None])
        self.seen = [x.dtype, cos.dtype, sin.dtype]
        if self.copies:
            sin = sin.clone()
        for layer in self.layers:
            x = checkpoint(layer, x, (cos, sin), use_reentrant=True) if self.reentrant else layer(x, (cos, sin))
        return x


def key(module: str, function: str, op: str, ordinal: int, text: str) -> Key:
    return Key(module=module, function=function, op=op, ordinal=ordinal, text=text, file="")


def keep(producer: Key, consumer: Key, operand: int, layers: str) -> Edit:
    return Edit(kind="keep", format="bfloat16", producer=producer, consumer=consumer, operand=operand, layers=layers, producer_layers="")


def spec() -> PatchSpec:
    """Layers read cos unrounded, and the first layer's sum reads the scaled embedding unrounded."""
    layer = "model.layers.*".removeprefix("model.")
    cos = key("tables", "Tables.forward", "mul", 0, "angle.cos() * 1.5")
    scaled = key("embed", "Scaled.forward", "mul", 0, "super().forward(ids) * 1.7")
    edits = (
        keep(cos, key(layer, "Layer.forward", "mul", 0, "y * cos"), 1, f"0-{DEPTH - 1}"),
        keep(scaled, key(layer, "Layer.forward", "add", 0, "x + y"), 0, "0"),
    )
    return PatchSpec(
        target={}, regime={"param_dtype": "bfloat16"}, versions={}, model={}, sources={}, groups=(Group(name="rope", edits=edits),)
    )


def build() -> Model:
    torch.manual_seed(0)
    return Model().to(torch.bfloat16)


def by_hand(model: Model, ids: torch.Tensor) -> torch.Tensor:
    cos, sin = (f(torch.arange(ids.shape[1])[None, :, None].float() + model.tables.frequency) * 1.5 for f in (torch.cos, torch.sin))
    wide = nn.functional.embedding(ids, model.embed.weight).float() * 1.7
    x = wide.bfloat16()
    for n, layer in enumerate(model.layers):
        y = layer.proj(x)
        y = (y.float() * cos).bfloat16() - y * sin.bfloat16()
        x = (wide + y).bfloat16() if n == 0 else x + y
    return x


IDS = torch.arange(9)[None] * 5


@pytest.mark.parametrize("reentrant", [False, True])
def test_read_unrounded_where_the_patch_says_and_rounded_elsewhere(reentrant: bool) -> None:
    model = build()
    stock = model(IDS)
    with graphalign.apply(model, spec()):
        model.reentrant = reentrant
        out = model(IDS)
        assert model.seen == [torch.bfloat16] * 3
        out.float().square().sum().backward()
        mine = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        clone = copy.deepcopy(model)
        assert torch.equal(clone(IDS), out)
    expected = by_hand(model, IDS)
    assert torch.equal(out, expected)
    assert not torch.equal(out, stock)
    model.zero_grad()
    expected.float().square().sum().backward()
    theirs = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(mine) == len(theirs) == 2 * DEPTH + 1
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * float(b.abs().max()))
    model.reentrant = False
    assert torch.equal(model(IDS), stock)


def test_a_copy_on_the_way_raises() -> None:
    model = build()
    model.tables.forward(torch.zeros(1, dtype=torch.bfloat16), IDS)
    patch = spec()
    edit = patch.groups[0].edits[0]
    sin = edit.model_copy(
        update={
            "producer": key("tables", "Tables.forward", "mul", 1, "angle.sin() * 1.5"),
            "consumer": edit.consumer.model_copy(update={"ordinal": 1, "text": "y * sin"}),
        }
    )
    patch = patch.model_copy(update={"groups": (Group(name="rope", edits=(sin,)),)})
    with graphalign.apply(model, patch):
        model.copies = True
        with pytest.raises(PatchNotLiveError, match="what tables computes arrives without its unrounded form"):
            model(IDS)


# -- ops that write in place --------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(x)
        mask.scatter_(-1, torch.arange(4).expand(*x.shape[:-1], 4), 1.0)
        out = torch.empty_like(x)
        out[torch.arange(x.shape[0])] = x * mask
        out[:, 0] = 1
        return out + 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        return self.inner(x) + y * y


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers[0](x)


def test_in_place_ops_stay_and_are_recorded_where_they_are() -> None:
    """Grouped routing marks its groups by `scatter_`, whose result nobody reads; experts invert a permutation by `inverse[order] = …`."""
    product = key("layers.*", "Block.forward", "mul", 0, "x * 3")
    edit = keep(product, key("layers.*", "Block.forward", "mul", 1, "y * y"), 0, "0").model_copy(update={"producer_layers": "0"})
    patch = PatchSpec(target={}, regime={}, versions={}, model={}, sources={}, groups=(Group(name="g", edits=(edit,)),))
    model, x = Stack(), torch.randn(4, 8).bfloat16()
    with record(model, {"x": x}) as stock:
        inner = model.layers[0].inner(x)
        model(x)
    with graphalign.apply(model, patch):
        model(x)
        with record(model, {"x": x}) as again:
            out = model(x)
    y = x * 3
    assert torch.equal(out, inner + ((x.float() * 3) * y).bfloat16())

    def written(recording: Any) -> list[tuple[str, str]]:
        wanted = ("scatter", "index_put", "copy_", "fill_")
        return [(n.op, n.module) for n in recording._nodes if any(w in n.op for w in wanted) and n.module]

    assert {m for _, m in written(again)} == {"layers.0.inner"}
    assert {op for op, _ in written(again)} == {op for op, _ in written(stock)}
