"""Small modules: an embedding, GEMMs as anchors, and between them regions that Inductor fuses in one known way."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.compiler.ground import BF, POSITIONS, VOCABULARY, WIDTH

EPS = 1e-6


class Small(nn.Module):
    """An embedding and `gemms` square linear layers `l0, l1, …`, and two norm weights."""

    gemms = 3

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=BF)
        for i in range(self.gemms):
            setattr(self, f"l{i}", nn.Linear(WIDTH, WIDTH, bias=False, dtype=BF))


class Normed(Small):
    """The same, with weights for norms."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH, dtype=BF))
        self.b = nn.Parameter(torch.ones(WIDTH, dtype=BF))


def rms_scale(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


class WithinOneNest(Small):
    """`a` is stored for the GEMM, and the same loop nest uses it again for `b`, from a register."""

    gemms = 4

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        a = self.l0(self.embed(input_ids)) * 1.7
        b = a * 2.3
        return self.l3(self.l1(a) + self.l2(b))


class AcrossNests(Normed):
    """`a` is stored for the GEMM, its rows are reduced in the same kernel, and a second nest reads `a` back from memory."""

    gemms = 4

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        a = self.l0(self.embed(input_ids)) * 1.7
        x = a.float()
        n = (x * rms_scale(x)).to(BF) * self.w
        return self.l3(self.l1(a) * self.l2(n))


class Recomputed(Normed):
    """Two kernels, before and after a GEMM, each compute the sum `s` for themselves."""

    gemms = 4

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        e = self.embed(input_ids)
        s = self.l0(e) + self.l1(e)
        t = s + self.l2(s * self.w)
        return self.l3(t * self.b)


class WideBuffer(Normed):
    """The mean is rounded in the source; the kernel hands it from one loop nest to the next in FP32."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        y = self.l0(self.embed(input_ids))
        m = y.float().pow(2).mean(-1, keepdim=True).to(BF)
        n = y.float() * torch.rsqrt(m.float() + EPS)
        return self.l2(self.l1(n.to(BF) * self.w))


class WideStream(Normed):
    """A residual stream; Inductor recomputes it for a while, then keeps it in an FP32 buffer."""

    gemms = 9

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        s = self.embed(input_ids)
        for i in range(0, self.gemms - 1, 2):
            s = s + getattr(self, f"l{i + 1}")(getattr(self, f"l{i}")(s * self.w) * 0.7)
        return getattr(self, f"l{self.gemms - 1}")(s * self.b)


class WideStreamEngine(WideStream):
    """The same, as vLLM's fused add-norm writes it: `(x.float() + residual.float()).to(residual.dtype)`."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        s = self.embed(input_ids)
        for i in range(0, self.gemms - 1, 2):
            wide = s.float()
            x = (wide * self.w.float()).to(BF)
            y = getattr(self, f"l{i + 1}")((getattr(self, f"l{i}")(x).float() * 0.7).to(BF))
            s = (y.float() + wide).to(BF)
        return getattr(self, f"l{self.gemms - 1}")((s.float() * self.b.float()).to(BF))


class TwoReaders(Small):
    """`a` lies in memory in BF16, because a GEMM reads it; two later kernels read it there."""

    gemms = 4

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        a = self.l0(self.embed(input_ids)) * 1.7
        b = self.l1(a) * a
        c = self.l2(b) + a * 2.3
        return self.l3(c)


class Rope(Small):
    """Half-split rotation by cat, with cos and sin rows picked by position, on q and k that come from one split GEMM result."""

    gemms = 4
    head = 16

    def __init__(self) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(POSITIONS).float(), 1.0 / 100.0 ** (torch.arange(0, self.head, 2).float() / self.head))
        self.register_buffer("cos_table", torch.cat([angle.cos(), angle.cos()], -1).to(BF))
        self.register_buffer("sin_table", torch.cat([angle.sin(), angle.sin()], -1).to(BF))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        cos = self.cos_table[position_ids].unsqueeze(2)
        sin = self.sin_table[position_ids].unsqueeze(2)
        q, k = self.l0(self.embed(input_ids)).view(1, -1, 4, self.head).split(2, 2)
        return self.l3(self.l1(torch.cat([self.rotate(q, cos, sin), self.rotate(k, cos, sin)], 2).flatten(2)))

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * cos + torch.cat([-x2, x1], -1) * sin


class RopeByHalves(Rope):
    """The engine's way to write it: two products per half."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        half = self.head // 2
        cos = self.cos_table[position_ids][..., :half].unsqueeze(2)
        sin = self.sin_table[position_ids][..., :half].unsqueeze(2)
        q, k = self.l0(self.embed(input_ids)).view(1, -1, 4, self.head).split(2, 2)
        return self.l3(self.l1(torch.cat([self.turn(q, cos, sin), self.turn(k, cos, sin)], 2).flatten(2)))

    @staticmethod
    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x1, x2 = x.chunk(2, -1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


class Softmax(Small):
    """Softmax of a rounded product; its inside is decomposed on the engine's side only."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        y = self.l0(self.embed(input_ids)) * 1.7
        return self.l2(self.l1(torch.softmax(y * 2.3, -1) * 31.0))


class LayerNorm(Normed):
    """Layer norm of a rounded sum; decomposed into Welford steps on the engine's side."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        e = self.embed(input_ids)
        y = self.l0(e) * 1.7
        return self.l2(self.l1(F.layer_norm(y, (WIDTH,), self.w, self.b, EPS) * 2.3))


class Reductions(Normed):
    """A row sum and a row mean, each rounded in the source and used by every element of its row."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        y = self.l0(self.embed(input_ids)) * 1.7
        total = (y * self.b).sum(-1, keepdim=True)
        mean = y.mean(-1, keepdim=True)
        return self.l2(self.l1((y - mean) * self.w + total * 0.3))


class Maximum(Normed):
    """A row maximum of a rounded product: rounding is monotonic, so it does not matter before or behind the maximum."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        y = self.l0(self.embed(input_ids)) * 1.7
        return self.l2(self.l1((y.amax(-1, keepdim=True) - y) * self.w))


class ScaleLast(Normed):
    """(x · r) · w."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.l0(self.embed(input_ids))
        r = rms_scale(x.float())
        return self.l2(self.l1((x.float() * r).to(BF) * self.w))


class ScaleFirst(ScaleLast):
    """x · (r · w): no value of it equals x · r."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.l0(self.embed(input_ids))
        r = rms_scale(x.float())
        return self.l2(self.l1((x.float() * (r * self.w.float())).to(BF)))


class WideProduct(Small):
    """Training keeps `a` in FP32 for the second use."""

    gemms = 3

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        a = self.l0(self.embed(input_ids)).float() * 1.7
        return self.l2((self.l1(a.to(BF)).float() * a).to(BF))


class NarrowProduct(WideProduct):
    """The engine reads `a` back from the GEMM's BF16 operand."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        a = self.l0(self.embed(input_ids)) * 1.7
        return self.l2(self.l1(a) * a)


class Gated(Small):
    """SwiGLU."""

    gemms = 4

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        e = self.embed(input_ids)
        return self.l3(self.l2(F.silu(self.l0(e)) * self.l1(e)))


class Decoder(Normed):
    """Two norms, a gate and a residual stream, as in a decoder layer without attention."""

    gemms = 4

    def norm(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return w * (y * rms_scale(y)).to(BF)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(input_ids)
        n = self.norm(h, self.w)
        h = h + self.l2(F.silu(self.l0(n)) * self.l1(n))
        return self.l3(self.norm(h, self.b))
