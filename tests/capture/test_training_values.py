"""The recorded graph is all there is: run op by op it gives the forward's own result, bit by bit.

This covers views, aliases and in-place writes, which the recorder has to make functional.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import pytest
import torch
from torch import nn

from graphalign.capture.recorder import Recording, record


def replay(recording: Recording, module: nn.Module) -> torch.Tensor:
    """Output of a recording without composite anchors, from its nodes, its inputs' data and the module's parameters."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    env: dict[int, torch.Tensor] = {}
    for i in recording.inputs:
        if i.kind == "parameter":
            env[i.value.id] = parameters[i.name].detach()
        else:
            assert i.data is not None, i.name
            raw, dtype = bytearray(base64.b64decode(i.data)), getattr(torch, i.value.dtype)
            env[i.value.id] = torch.frombuffer(raw, dtype=dtype).reshape(i.value.shape) if raw else torch.empty(i.value.shape, dtype=dtype)
    for n in recording.nodes:
        namespace, name, overload = n.op.split(".")
        func = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        args = [_decode(a, env) for a in n.args]
        kwargs = {k: _decode(a, env) for k, a in n.kwargs.items()}
        written: list[torch.Tensor] = []
        for j, a in enumerate(func._schema.arguments):
            if a.alias_info is not None and a.alias_info.is_write:  # a recorded value never changes
                where: Any = kwargs if a.kwarg_only or j >= len(args) else args
                key: Any = a.name if where is kwargs else j
                where[key] = [t.clone() for t in where[key]] if isinstance(where[key], list) else where[key].clone()
                written += where[key] if isinstance(where[key], list) else [where[key]]
        if name.startswith("as_strided"):
            args[0] = args[0].contiguous()
        out = func(*args, **kwargs)
        for v, r in zip(n.outputs, [*(out if isinstance(out, list | tuple) else [out]), *written], strict=False):
            if v is not None:
                assert (str(r.dtype).removeprefix("torch."), tuple(r.shape)) == (v.dtype, v.shape), n
                env[v.id] = r
    (output,) = recording.outputs
    return env[output]


def _decode(x: Any, env: dict[int, torch.Tensor]) -> Any:
    if isinstance(x, dict):
        ((kind, y),) = x.items()
        if kind == "v":
            return env[y]
        if kind == "f":
            return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[y]
        return torch.device(y) if kind == "device" else getattr(torch, y)
    return [_decode(y, env) for y in x] if isinstance(x, list | tuple) else x


class Body(nn.Module):
    """A forward given as a function of a (2, 3, 4) tensor."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 24).reshape(2, 3, 4))
        self.body = body

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(self.weight * input_ids)
        return out


def write_view(x: torch.Tensor) -> torch.Tensor:
    x[:, 0].mul_(3)
    return x + 1


def read_view_after_base(x: torch.Tensor) -> torch.Tensor:
    view = x[..., 1:3]
    x.add_(5)
    return view * 2


def read_sibling(x: torch.Tensor) -> torch.Tensor:
    a, b = x[:, :2], x[:, 1:]
    a.mul_(-1)
    return a.amax() + b


def permuted(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x.permute(2, 0, 1).contiguous()).permute(1, 2, 0)  # dense, but its memory is not in its order
    y.copy_(x)
    y[1] = 7
    return y.transpose(0, 1) * 2


def loop(x: torch.Tensor) -> torch.Tensor:
    a = x.new_zeros(3, 4)
    for i in range(3):
        a[i, : i + 1] = x[0, i, : i + 1] + a[:i].sum()
    return a


def fill_by_index(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[x > 0] = 0.5
    x.view(-1).index_add_(0, torch.tensor([0, 5]), torch.ones(2))
    return x


def out_argument(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x.detach())
    torch.mul(x.detach(), 2, out=y)
    return y + x


def void_op(x: torch.Tensor) -> torch.Tensor:
    y = [x.detach().clone(), x.detach() + 1]
    torch._foreach_mul_(y, 2.0)
    return y[0] + y[1]


def aliases(x: torch.Tensor) -> torch.Tensor:
    y = x.detach().data.view(24)
    z = y.view(2, 3, 4)
    return z * 2 + y.sum()


def infinity(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x.abs() < 0.1, -math.inf).softmax(-1)


BODIES = [write_view, read_view_after_base, read_sibling, permuted, loop, fill_by_index, out_argument, void_op, aliases, infinity]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
def test_replay_is_bitwise(body: Any, grad: bool) -> None:
    module, ids = Body(body), torch.tensor(2)
    with torch.set_grad_enabled(grad):
        expected = module(ids)
        with record(module, {"input_ids": ids}) as recorder:
            out = module(ids)
    assert torch.equal(out, expected)
    recording = recorder.finish([out])
    assert recording.notes == ()
    assert torch.equal(replay(recording, module), expected)


def test_values_are_defined_before_they_are_read() -> None:
    module, ids = Body(loop), torch.tensor(2)
    with record(module, {"input_ids": ids}) as recorder:
        out = module(ids)
    recording = recorder.finish([out])
    known = {i.value.id for i in recording.inputs}
    for n in recording.nodes:
        assert {x["v"] for x in _leaves([n.args, n.kwargs])} <= known, n
        new = {v.id for v in n.outputs if v is not None}
        assert not new & known
        known |= new


def _leaves(x: Any) -> list[dict[str, Any]]:
    if isinstance(x, dict):
        return [x] if set(x) == {"v"} else _leaves(list(x.values()))
    return [z for y in x for z in _leaves(y)] if isinstance(x, list | tuple) else []


def test_untracked_view_is_noted() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        bits = x.detach().clone()
        view = bits.view(torch.int32)  # another dtype over the same memory
        bits.mul_(2)
        return view + x

    module, ids = Body(body), torch.tensor(2)
    with record(module, {"input_ids": ids}) as recorder:
        out = module(ids)
    (note,) = recorder.finish([out]).notes
    assert "int32[2, 3, 4] view is read after its memory was written" in note


def test_values_do_not_depend_on_reused_ids() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        for i in range(200):  # short-lived tensors: their ids and addresses are reused
            x = x + torch.full((2, 3, 4), float(i)) * 0.5
        return x

    module, ids = Body(body), torch.tensor(2)
    with record(module, {"input_ids": ids}) as recorder:
        out = module(ids)
    assert torch.equal(replay(recorder.finish([out]), module), out)


def test_large_tensors_are_not_kept_alive() -> None:
    import weakref

    alive: list[Any] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        big = torch.zeros(1 << 20)
        alive.append(weakref.ref(big))
        y = x + big[:4]
        del big
        assert alive[0]() is None
        return y

    module, ids = Body(body), torch.tensor(2)
    with torch.no_grad(), record(module, {"input_ids": ids}) as recorder:
        out = module(ids)
    assert torch.equal(replay(recorder.finish([out]), module), out)
