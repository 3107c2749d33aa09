"""Random programs and plans: what a synthetic model computes, and how both sides carry each edge."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TOKENS, WIDTH, VOCABULARY = 8, 32, 61
HALF = WIDTH // 2
BF, FP = "bfloat16", "float32"
UNARY = {"tanh": "tanh", "sigmoid": "sigmoid", "silu": "silu", "square": "pow"}
Edge = tuple[int, int, int]
"""(producer value, consumer value, slot)."""


@dataclass(frozen=True)
class Value:
    """One value of a program."""

    kind: str
    """`embed`, `gemm`, a unary function, `scale` (by a constant), `shift` (by a constant), `weight` (by a parameter), `mul`,
    `add`, `sub`, `rotate` (halves swapped, one negated), `mean` (over the row), `rsqrt`."""
    args: tuple[int, ...] = ()
    constant: float = 0.0
    parameter: str = ""
    row: bool = False
    """One number per token."""
    module: str = ""


TRANSPARENT = ("embed", "rotate")


@dataclass(frozen=True)
class Program:
    """Values in order; the last one is a GEMM, the output."""

    values: tuple[Value, ...]
    merged: frozenset[int] = frozenset()
    """GEMM values that the engine computes together with the next GEMM, on the same operand."""

    def edges(self) -> list[Edge]:
        """Every edge between two values, in order."""
        return [(p, c, s) for c, v in enumerate(self.values) for s, p in enumerate(v.args)]

    def consumers(self) -> dict[int, list[int]]:
        out: dict[int, list[int]] = defaultdict(list)
        for p, c, _ in self.edges():
            out[p].append(c)
        return out


@dataclass
class Plan:
    """How both sides carry each edge."""

    rounds: dict[Edge, bool] = field(default_factory=dict)
    """Training: rounded to BF16?"""
    mode: dict[Edge, str] = field(default_factory=dict)
    """Inference: `inline`, `buffer` or `forward`."""
    buffer: dict[int, str] = field(default_factory=dict)
    """Format of the buffer that holds a value for `buffer` and `forward` edges."""
    layout: dict[int, str] = field(default_factory=dict)
    """`rows` or `columns` major."""
    loops: dict[int, str] = field(default_factory=dict)
    """`nested`, `merged`, `swapped` or `halves`."""
    fuse: dict[int, bool] = field(default_factory=dict)
    """Whether the node that stores a value joins the kernel of the node before it."""
    reassociate: frozenset[int] = frozenset()
    """`weight` values computed as x · (r · w) from (x · r) · w."""

    def inference_rounds(self, edge: Edge) -> bool:
        """Whether the engine rounds an edge."""
        return self.mode[edge] == "buffer" and self.buffer[edge[0]] == BF


# ---------------------------------------------------------------------------------------------------------------------
# Random programs and plans


def random_program(rng: random.Random, *, layers: int = 2, steps: int = 5) -> Program:
    """A residual stream through `layers` blocks of GEMMs and up to `steps` ops around each."""
    b = _Writer(rng)
    stream = b.add("embed", module="embed")
    for layer in range(layers):
        b.module = f"layers.{layer}"
        x = b.norm(stream) if rng.random() < 0.6 else b.region([stream], rng.randint(0, steps))
        if rng.random() < 0.5:
            first, second = b.gemm(x), b.gemm(x)
            if rng.random() < 0.6:
                b.merged.add(first)
            y = b.region([first, second], rng.randint(1, steps))
        else:
            y = b.region([b.gemm(x)], rng.randint(0, steps))
        out = b.gemm(y)
        stream = b.add("add", stream, out) if rng.random() < 0.7 else b.region([out], rng.randint(0, steps))
    b.module = "head"
    b.gemm(b.region([stream], rng.randint(0, steps)))
    return b.program()


class _Writer:
    def __init__(self, rng: random.Random) -> None:
        self.rng, self.values, self.merged, self.module = rng, [], set(), ""  # type: ignore[var-annotated]
        self.seen: set[Any] = set()

    def add(self, kind: str, *args: int, **kw: Any) -> int:
        row = kw.pop("row", bool(args) and all(self.values[a].row for a in args))
        self.values.append(Value(kind, args, row=row, **{"module": self.module, **kw}))
        return len(self.values) - 1

    def name(self, what: str) -> str:
        """A parameter's name: equal layers have equal names but for the number."""
        n = sum(1 for v in self.values if v.parameter.startswith(f"{self.module}.{what}"))
        return f"{self.module}.{what}{'abcdefghijklmnop'[n]}.weight"

    def gemm(self, x: int) -> int:
        return self.add("gemm", self.full(x), parameter=self.name("g"))

    def full(self, x: int) -> int:
        return x if not self.values[x].row else self.add("weight", x, parameter=self.name("w"), row=False)

    def norm(self, x: int) -> int:
        scale = self.add("rsqrt", self.add("shift", self.add("mean", self.add("square", x), row=True), constant=0.37))
        return self.add("weight", self.add("mul", x, scale, row=False), parameter=self.name("w"))

    def region(self, sources: list[int], steps: int) -> int:
        """`steps` random ops on some values; all sources are used."""
        have = sources[:1]
        for source in sources[1:]:
            have.append(self.add(self.rng.choice(["mul", "add", "sub"]), have[-1], source))
        for _ in range(steps):
            have.append(self.step(have))
        return self.full(have[-1])

    def step(self, have: list[int]) -> int:
        rng, x = self.rng, self.rng.choice(have[-3:])
        kind = rng.choice(["unary", "scale", "shift", "weight", "binary", "binary", "rotate", "mean"])
        if kind == "unary":
            name = rng.choice(list(UNARY))
            if ("unary", name, x) not in self.seen and self.values[x].kind not in UNARY:
                self.seen.add(("unary", name, x))
                return self.add(name, x)
        if kind == "weight" and not self.values[x].row:
            return self.add("weight", x, parameter=self.name("w"))
        if kind == "binary":
            others = [y for y in have if self.root(y) != self.root(x) and frozenset((x, y)) not in self.seen]
            if others:
                y = rng.choice(others)
                self.seen.add(frozenset((x, y)))
                return self.add(rng.choice(["mul", "add", "sub"]), x, y, row=self.values[x].row and self.values[y].row)
        if kind == "rotate" and not self.values[x].row and self.values[x].kind not in TRANSPARENT:
            y = self.add("rotate", x)
            return self.add("weight", y, parameter=self.name("w"))
        if kind == "mean" and not self.values[x].row and ("mean", x) not in self.seen:
            self.seen.add(("mean", x))
            return self.add("mean", x, row=True)
        return self.add("scale", x, constant=round(rng.uniform(0.6, 1.9), 3) + 1e-4)

    def root(self, x: int) -> int:
        while self.values[x].kind == "rotate":
            x = self.values[x].args[0]
        return x

    def program(self) -> Program:
        used, todo = set(), [len(self.values) - 1]
        while todo:
            v = todo.pop()
            if v not in used:
                used.add(v)
                todo += self.values[v].args
        new = {v: i for i, v in enumerate(sorted(used))}
        values = tuple(
            Value(v.kind, tuple(new[a] for a in v.args), v.constant, v.parameter, v.row, v.module)
            for i, v in enumerate(self.values)
            if i in used
        )
        return Program(values, frozenset(new[m] for m in self.merged if m in used and m + 1 in used))


def random_plan(rng: random.Random, program: Program, *, faithful: bool = False) -> Plan:
    """How both sides carry each edge; `faithful`: inference rounds exactly where training does."""
    plan, consumers = Plan(), program.consumers()
    for v, value in enumerate(program.values):
        plan.layout[v] = rng.choice(["rows", "rows", "columns"])
        stream = value.kind == "add" and program.values[value.args[1]].kind == "gemm"  # a residual sum is never computed by halves
        plan.loops[v] = rng.choice(["nested", "nested", "merged", "swapped", "nested" if stream else "halves"])
        plan.fuse[v] = rng.random() < 0.5
        plan.buffer[v] = rng.choice([BF, BF, FP])
        always = rng.random() < 0.7
        for c in dict.fromkeys(consumers[v]):
            for slot, p in enumerate(program.values[c].args):
                if p == v:
                    edge = (v, c, slot)
                    plan.rounds[edge] = always or rng.random() < 0.5
                    plan.mode[edge] = rng.choice(["inline", "inline", "buffer", "forward"])
        if value.kind in ("gemm", "embed"):  # what a GEMM gives and what a table holds is BF16
            plan.buffer[v] = BF
            for e in plan.rounds:
                if e[0] == v:
                    plan.rounds[e], plan.mode[e] = True, "buffer"
    for e in plan.rounds:
        kind, into = program.values[e[0]].kind, program.values[e[1]].kind
        if into == "gemm":
            plan.rounds[e], plan.mode[e] = True, "operand"
        elif into == "rotate":  # no op of its own: its edges are judged from what it shows to who reads it
            plan.mode[e] = "buffer" if kind in ("gemm", "embed") else "inline"
            plan.rounds[e] = kind in ("gemm", "embed")
        if kind == "rotate":
            plan.mode[e] = plan.mode[e] if plan.mode[e] == "operand" else "inline"
    _settle_rotations(program, plan)
    if faithful:
        for e in plan.rounds:
            if plan.mode[e] == "operand" or program.values[e[0]].kind in ("gemm", "embed", "rotate"):
                continue
            if program.values[e[1]].kind != "rotate" and plan.rounds[e]:
                plan.mode[e], plan.buffer[e[0]] = "buffer", BF
            else:
                plan.mode[e] = "inline"
        _settle_rotations(program, plan)
        for e in plan.rounds:
            if program.values[e[0]].kind == "rotate" and plan.mode[e] != "operand":
                plan.rounds[e] = False
    reassociable = [
        v
        for v, value in enumerate(program.values)
        if value.kind == "weight" and not value.row and _inner(program, plan, value) is not None and rng.random() < 0.5
    ]
    plan.reassociate = frozenset(reassociable)
    return plan


def _settle_rotations(program: Program, plan: Plan) -> None:
    """A rotation of a GEMM result or table row is BF16 whatever the plan says."""
    for v, value in enumerate(program.values):
        if value.kind == "rotate" and program.values[value.args[0]].kind in ("gemm", "embed"):
            for e in plan.rounds:
                if e[0] == v and plan.mode[e] != "operand":
                    plan.rounds[e] = True


def _inner(program: Program, plan: Plan, value: Value) -> int | None:
    """The x · r below a (x · r) · w that can be written as x · (r · w)."""
    inner = value.args[0]
    v = program.values[inner]
    readers = program.consumers()[inner]
    if v.kind != "mul" or len(readers) != 1 or plan.mode[inner, readers[0], 0] != "inline" or not program.values[v.args[1]].row:
        return None
    return inner


def truth(program: Program, plan: Plan) -> set[tuple[str, int, int]]:
    """The rounding map: (kind, producer value, consumer value), rotations looked through."""
    out = set()
    for p, c, slot in program.edges():
        v = program.values[p]
        if program.values[c].kind in ("rotate", "gemm") or v.kind in ("gemm", "embed"):
            continue
        source, trains, infers = p, plan.rounds[p, c, slot], plan.inference_rounds((p, c, slot))
        if v.kind == "rotate":
            source = v.args[0]
            below = (source, p, 0)
            trains, infers = trains or plan.rounds[below], infers or plan.inference_rounds(below)
            if program.values[source].kind in ("gemm", "embed"):
                continue
        if trains != infers:
            out.add(("keep" if trains else "round", source, c))
    return out


def distinct(program: Program) -> bool:
    """Whether no two values of a program share elements, as x − (x − y) and y do: the join could not tell them apart.

    The join gives equal layers equal GEMM results, so no value may equal one that it is made of under that either: x − y + y′.
    """
    return _distinct(program, shared=False) and _distinct(program, shared=True)


def _distinct(program: Program, *, shared: bool) -> bool:
    content: list[np.ndarray] = []
    keys: list[set[int]] = []
    next_to: list[set[int]] = []
    above: list[set[int]] = []
    for n, v in enumerate(program.values):
        args = [content[a] for a in v.args]
        role = v.parameter.split(".", 2)[-1] if shared and v.module.startswith("layers.") else f"{v.parameter} {n}"
        rng = np.random.default_rng(list(f"{v.kind} {role}".encode()))
        if v.kind in ("embed", "gemm"):
            out = rng.uniform(0.05, 2, (TOKENS, WIDTH)) * rng.choice([-1, 1], (TOKENS, WIDTH))
        elif v.kind == "weight":
            out = args[0] * rng.uniform(0.05, 2, WIDTH)
        elif v.kind in ("scale", "shift"):
            out = args[0] * v.constant if v.kind == "scale" else args[0] + v.constant
        else:
            out = _NUMPY[v.kind](*args)
        content.append(out)
        keys.append(set((np.abs(out).reshape(-1).view(np.int64) >> 14).tolist()))
        next_to.append({k + d for k in keys[n] for d in (0, 1)})
        above.append(set(v.args).union(*[above[a] for a in v.args]))
        if v.kind in TRANSPARENT or (shared and v.kind == "gemm"):
            continue
        others = [m for m in (above[n] if shared else range(n)) if program.values[m].kind not in TRANSPARENT]
        if not all(next_to[n].isdisjoint(keys[m]) for m in others):
            return False
    return True


_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "square": np.square,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "mean": lambda x: x.mean(-1, keepdims=True),
    "mul": np.multiply,
    "add": np.add,
    "sub": np.subtract,
    "rotate": lambda x: np.concatenate([-x[:, HALF:], x[:, :HALF]], -1),
}
