"""Random small models, rendered twice: as eager ATen nodes and as Inductor loop bodies, so that the true rounding map is known.

A `Program` is a list of values, each computed from earlier ones. A `Plan` says, for every edge, whether training rounds it
and how inference carries it: recomputed in the reader's kernel, through an FP32 or a BF16 buffer, or forwarded in a register.
`training(program, plan)` and `inference(program, plan)` write the captures; `truth(program, plan)` is the map.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph

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
            if plan.mode[e] not in ("operand",) and plan.inference_rounds(e) != plan.rounds[e] and program.values[e[0]].kind != "rotate":
                if plan.rounds[e]:
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


# ---------------------------------------------------------------------------------------------------------------------
# The training side


def training(program: Program, plan: Plan, *, order: random.Random | None = None) -> TrainingGraph:
    """The eager graph. `order` shuffles the registration order of the parameters."""
    return _Eager(program, plan, order).graph()


class _Eager:
    def __init__(self, program: Program, plan: Plan, order: random.Random | None) -> None:
        self.program, self.plan = program, plan
        self.inputs: list[dict[str, Any]] = []
        self.nodes: list[dict[str, Any]] = []
        self.next = 0
        self.value_of: dict[int, tuple[int, str]] = {}
        """Program value to (tensor id, dtype)."""
        self.node_of: dict[int, int] = {}
        """Program value to the index of the node that computes it."""
        names = [("embed.weight", (VOCABULARY, WIDTH))]
        names += [(v.parameter, (WIDTH, WIDTH) if v.kind == "gemm" else (WIDTH,)) for v in program.values if v.parameter]
        if order is not None:
            order.shuffle(names)
        self.parameters = {n: self.input("parameter", n, BF, s) for n, s in names}
        self.ids = self.input("input", "input_ids", "int64", (1, TOKENS))

    def input(self, kind: str, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        self.inputs.append({"value": self.value(dtype, shape), "kind": kind, "name": name})
        return self.next - 1

    def value(self, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
        self.next += 1
        return {"id": self.next - 1, "dtype": dtype, "shape": list(shape)}

    def node(self, op: str, args: list[Any], dtype: str, shape: tuple[int, ...], module: str = "") -> int:
        kwargs = {"dtype": {"dtype": dtype}} if op == "aten._to_copy.default" else {}
        self.nodes.append({"op": op, "args": args, "kwargs": kwargs, "outputs": [self.value(dtype, shape)], "module": module})
        return self.next - 1

    def cast(self, t: int, have: str, want: str, shape: tuple[int, ...]) -> int:
        return t if have == want else self.node("aten._to_copy.default", [{"v": t}], want, shape)

    def read(self, c: int, slot: int, want: str | None) -> tuple[int, str]:
        """A tensor for an operand, rounded as the plan says; then as `want`, or as it comes."""
        p = self.program.values[c].args[slot]
        t, dtype = self.value_of[p]
        shape = self.shape(p)
        if self.plan.rounds[p, c, slot]:
            t, dtype = self.cast(t, dtype, BF, shape), BF
        return (self.cast(t, dtype, want, shape), want) if want else (t, dtype)

    def shape(self, v: int) -> tuple[int, ...]:
        return (1, TOKENS, 1 if self.program.values[v].row else WIDTH)

    def graph(self) -> TrainingGraph:
        for v, value in enumerate(self.program.values):
            self.compute(v, value)
        data = {"header": {"versions": {}, "regime": {}, "model": {}, "tokens": TOKENS}, "inputs": self.inputs, "nodes": self.nodes,
                "outputs": [self.value_of[len(self.program.values) - 1][0]], "sources": []}  # fmt: skip
        return TrainingGraph.model_validate(data)

    def compute(self, v: int, value: Value) -> None:
        if value.kind == "embed":
            self.value_of[v] = self.node("aten.embedding.default", [{"v": self.parameters["embed.weight"]}, {"v": self.ids}], BF, self.shape(v)), BF
        elif value.kind == "gemm":
            self.gemm(v, value)
        elif value.kind == "rotate":
            self.rotate(v)
        else:
            self.arithmetic(v, value)

    def gemm(self, v: int, value: Value) -> None:
        x, _ = self.read(v, 0, BF)
        w = self.node("aten.t.default", [{"v": self.parameters[value.parameter]}], BF, (WIDTH, WIDTH), value.module)
        flat = self.node("aten.view.default", [{"v": x}, [TOKENS, WIDTH]], BF, (TOKENS, WIDTH), value.module)
        out = self.node("aten.mm.default", [{"v": flat}, {"v": w}], BF, (TOKENS, WIDTH), value.module)
        self.node_of[v] = len(self.nodes) - 1
        self.value_of[v] = self.node("aten._unsafe_view.default", [{"v": out}, [1, TOKENS, WIDTH]], BF, self.shape(v), value.module), BF

    def rotate(self, v: int) -> None:
        x, dtype = self.read(v, 0, None)
        half = (1, TOKENS, HALF)
        first = self.node("aten.slice.Tensor", [{"v": x}, 2, 0, HALF], dtype, half)
        second = self.node("aten.slice.Tensor", [{"v": x}, 2, HALF, WIDTH], dtype, half)
        second = self.node("aten.neg.default", [{"v": second}], dtype, half)
        self.value_of[v] = self.node("aten.cat.default", [[{"v": second}, {"v": first}], -1], dtype, self.shape(v)), dtype

    def arithmetic(self, v: int, value: Value) -> None:
        consumers = [(c, s) for p, c, s in self.program.edges() if p == v]
        rounds = bool(consumers) and all(self.plan.rounds[v, c, s] for c, s in consumers)
        tensors = [self.read(v, s, None) for s in range(len(value.args))]
        native = rounds and all(d == BF for _, d in tensors)
        dtype = BF if native else FP
        args: list[Any] = [{"v": self.cast(t, d, dtype, self.shape(p))} for (t, d), p in zip(tensors, value.args, strict=True)]
        op, extra = _ATEN[value.kind]
        if value.kind == "weight":
            w = self.parameters[value.parameter]
            args.append({"v": self.cast(w, BF, dtype, (WIDTH,))})
        if value.kind in ("scale", "shift"):
            args.append(value.constant)
        out = self.node(op, args + extra, dtype, self.shape(v), value.module)
        self.node_of[v] = len(self.nodes) - 1
        self.value_of[v] = (self.cast(out, dtype, BF, self.shape(v)), BF) if rounds else (out, dtype)


_ATEN: dict[str, tuple[str, list[Any]]] = {
    "tanh": ("aten.tanh.default", []),
    "sigmoid": ("aten.sigmoid.default", []),
    "silu": ("aten.silu.default", []),
    "square": ("aten.pow.Tensor_Scalar", [2]),
    "rsqrt": ("aten.rsqrt.default", []),
    "mean": ("aten.mean.dim", [[-1], True]),
    "scale": ("aten.mul.Tensor", []),
    "shift": ("aten.add.Tensor", []),
    "weight": ("aten.mul.Tensor", []),
    "mul": ("aten.mul.Tensor", []),
    "add": ("aten.add.Tensor", []),
    "sub": ("aten.sub.Tensor", []),
}


# ---------------------------------------------------------------------------------------------------------------------
# The inference side


def inference(program: Program, plan: Plan) -> InferenceGraph:
    """The compiled graph."""
    return _Engine(program, plan).graph()


@dataclass
class _Body:
    """Writes one loop body."""

    variables: list[tuple[str, int]]
    reduced: int = 0
    """How many of the last variables are reduced."""
    indexing: dict[str, str] = field(default_factory=dict)
    ops: list[list[Any]] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    forwarded: list[str] = field(default_factory=list)
    memo: dict[Any, Any] = field(default_factory=dict)
    indirect: int = 0

    def emit(self, target: str, *args: Any, **kwargs: Any) -> dict[str, str]:
        n = sum(1 for o in self.ops if o[1] == target)
        name = f"{target}_{n}" if n else target
        self.ops.append([name, target, list(args), kwargs])
        return {"n": name}

    def index(self, text: str) -> dict[str, str]:
        name = next((k for k, t in self.indexing.items() if t == text), f"index{len(self.indexing)}")
        self.indexing[name] = text
        return self.emit("get_index", name)

    def role(self, buffer: str) -> dict[str, str]:
        if buffer not in self.buffers:
            self.buffers.append(buffer)
        return {"b": f"b{self.buffers.index(buffer)}"}

    def load(self, buffer: str, text: str) -> dict[str, str]:
        return self.emit("load", self.role(buffer), self.index(text))

    def plain(self) -> dict[str, Any]:
        n = len(self.variables) - self.reduced
        sizes = [[str(e) for _, e in self.variables[:n]], [str(e) for _, e in self.variables[n:]]]
        return {"var_ranges": [[v, str(e)] for v, e in self.variables], "sizes": sizes, "indexing": self.indexing, "ops": self.ops}


class _Engine:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan = program, plan
        self.buffers: list[dict[str, Any]] = []
        self.bodies: dict[str, Any] = {}
        self.kernels: list[dict[str, Any]] = []
        self.inputs: dict[str, str] = {}
        """Parameter name to graph input."""
        self.place: dict[int, str] = {}
        """Value to the buffer that holds it."""
        self.columns: dict[str, int] = {}
        """Buffer of a merged GEMM's second result to its first column."""
        self.parameters: list[dict[str, Any]] = []
        self.graph_inputs = [{"name": "ids", "role": "tensor", "source": "input_ids", "dtype": "int64", "size": ["1", str(TOKENS)], "stride": [str(TOKENS), "1"]}]
        self.open: set[int] = set()
        """Values stored by the kernel that is being written."""
        self.sums: dict[int, str] = {}
        self.done: set[int] = set()

    # -- buffers and parameters -------------------------------------------------------------------------------------------

    def buffer(self, dtype: str, row: bool = False, layout: str = "rows", width: int = WIDTH, **kw: Any) -> str:
        name = f"buf{len(self.buffers)}"
        size, stride = ([TOKENS, 1], [1, 1]) if row else ([TOKENS, width], [width, 1] if layout == "rows" else [1, TOKENS])
        entry = {"name": name, "dtype": dtype, "size": [str(s) for s in size], "stride": [str(s) for s in stride], "layout": "FixedLayout"}
        self.buffers.append({**entry, **kw})
        return name

    def parameter(self, *names: str, rows: int = 0) -> str:
        key = "+".join(names)
        if key not in self.inputs:
            self.inputs[key] = f"arg{len(self.inputs)}"
            shape = [rows * len(names), WIDTH] if rows else [WIDTH]
            segments = [{"checkpoint": n, "dim": 0, "start": i * shape[0] // len(names), "length": shape[0] // len(names)} for i, n in enumerate(names)]
            name = key if len(names) == 1 else "merged." + key.replace(".weight", "")
            self.parameters.append({"name": name, "dtype": BF, "shape": shape, "segments": segments})
            stride = [str(WIDTH), "1"] if rows else ["1"]
            self.graph_inputs.append({"name": self.inputs[key], "role": "parameter", "source": name, "dtype": BF, "size": [str(s) for s in shape], "stride": stride})
        return self.inputs[key]

    def at(self, buffer: str, row: str, column: str) -> str:
        b = next(x for x in self.buffers if x["name"] == buffer)
        if b["size"][1] == "1":
            return row
        s0, s1 = b["stride"]
        return f"{s0}*({row}) + {s1}*({column})"

    # -- expressions ----------------------------------------------------------------------------------------------------------

    def expression(self, body: _Body, v: int, row: str, column: str) -> Any:
        """The unrounded value of `v` at an element, computed in this body."""
        key = (v, row, column)
        if key not in body.memo:
            body.memo[key] = self._compute(body, v, row, column)
        return body.memo[key]

    def operand(self, body: _Body, c: int, slot: int, row: str, column: str) -> Any:
        """What `c` reads at `slot`, carried as the plan says."""
        p = self.program.values[c].args[slot]
        mode = self.plan.mode[p, c, slot]
        if self.program.values[p].kind in ("gemm", "embed"):
            return self.stored(body, p, row, column)
        if mode == "buffer" or (mode == "forward" and p in self.open and p in self.place):
            if mode == "forward" and self.place[p] not in body.forwarded:
                # one load cannot be both forwarded and read from memory
                if ("memory", p) in body.memo:
                    return self.expression(body, p, row, column)
                body.forwarded.append(self.place[p])
            elif mode == "buffer" and self.place[p] in body.forwarded:
                raise Mixed
            body.memo["memory" if mode == "buffer" else "register", p] = True
            return self.stored(body, p, row, column)
        return self.expression(body, p, row, column)

    def stored(self, body: _Body, v: int, row: str, column: str) -> Any:
        key = ("stored", v, row, column)
        if key not in body.memo:
            if v not in self.place:  # an embedding that is read where it is used
                first = body.load("ids", row)
                symbol = f"indirect{body.indirect}"
                body.indirect += 1
                body.ops.append([f"set_{symbol}", f"set_{symbol}", [first], {}])
                body.memo[key] = body.load(self.parameter("embed.weight", rows=VOCABULARY), f"{WIDTH}*{symbol} + ({column})")
            else:
                buffer = self.place[v]
                start = self.columns.get(v, 0) if isinstance(self.columns.get(v, 0), int) else 0
                shifted = f"({column}) + {start}" if start else column
                body.memo[key] = body.load(buffer, self.at(buffer, row, shifted))
        return body.memo[key]

    def _compute(self, body: _Body, v: int, row: str, column: str) -> Any:
        value = self.program.values[v]

        def arg(slot: int) -> Any:
            return self.operand(body, v, slot, row, "0" if self.program.values[value.args[slot]].row else column)

        match value.kind:
            case "gemm" | "embed":
                return self.stored(body, v, row, column)
            case "rotate":
                p = value.args[0]
                turned = f"ModularIndexing({column} + {HALF}, 1, {WIDTH})"
                x = self.stored(body, p, row, turned) if self.program.values[p].kind in ("gemm", "embed") else self.expression(body, p, row, turned)
                low = body.emit("lt", body.emit("index_expr", body.index(column), {"dtype": "int64"}), body.emit("constant", HALF, {"dtype": "int64"}))
                return body.emit("where", low, body.emit("neg", x), x)
            case "mean":
                total = body.load(self.sums[v], row)
                return body.emit("truediv", total, body.emit("constant", float(WIDTH), {"dtype": FP}))
            case "silu":
                x = arg(0)
                one = body.emit("constant", 1.0, {"dtype": FP})
                return body.emit("truediv", x, body.emit("add", body.emit("exp", body.emit("neg", x)), one))
            case "square":
                x = arg(0)
                return body.emit("mul", x, x)
            case "scale" | "shift":
                return body.emit("mul" if value.kind == "scale" else "add", arg(0), body.emit("constant", value.constant, {"dtype": FP}))
            case "weight" if v in self.plan.reassociate:
                inner = value.args[0]
                first, second = self.program.values[inner].args
                w = body.load(self.parameter(value.parameter), column)
                r = self.operand(body, inner, 1, row, "0")
                x = self.operand(body, inner, 0, row, "0" if self.program.values[first].row else column)
                del second
                return body.emit("mul", x, body.emit("mul", r, w))
            case "weight":
                return body.emit("mul", arg(0), body.load(self.parameter(value.parameter), column))
        cast = body.emit("to_dtype", arg(0), {"dtype": FP}) if v % 3 == 0 else arg(0)
        out = body.emit(value.kind, cast, *[arg(s) for s in range(1, len(value.args))])
        return body.emit("to_dtype", out, {"dtype": BF}) if v % 2 else out  # does not round

    # -- kernels ------------------------------------------------------------------------------------------------------------

    def kernel(self, node: dict[str, Any], fuse: bool) -> None:
        if fuse and self.kernels and self.kernels[-1]["nodes"][-1]["kind"] == "loop" and node["kind"] == "loop":
            self.kernels[-1]["nodes"].append(node)
        else:
            self.kernels.append({"name": "", "kind": "SchedulerNode", "nodes": [node]})

    def loop(self, body: _Body, outputs: list[str], module: str, fuse: bool) -> None:
        key = f"body{len(self.bodies)}"
        self.bodies[key] = body.plain()
        node = {"name": f"op{self.count()}", "kind": "loop", "outputs": outputs, "module": module, "body": key, "buffers": list(body.buffers),
                "forwarded": list(body.forwarded)}  # fmt: skip
        self.kernel(node, fuse)

    def count(self) -> int:
        return sum(len(k["nodes"]) for k in self.kernels)

    def store(self, v: int, buffer: str, fuse: bool, loops: str) -> None:
        """Nodes that compute `v` into a buffer."""
        value = self.program.values[v]
        if not fuse:
            self.open = set()
        if value.row:
            forms = [([("p0", TOKENS)], "p0", "0", buffer)]
        elif loops == "merged":
            forms = [([("p0", TOKENS * WIDTH)], f"(p0//{WIDTH})", f"ModularIndexing(p0, 1, {WIDTH})", buffer)]
        elif loops == "swapped":
            forms = [([("p0", WIDTH), ("p1", TOKENS)], "p1", "p0", buffer)]
        elif loops == "halves":
            b = next(x for x in self.buffers if x["name"] == buffer)
            views = [self.buffer(b["dtype"], width=HALF, view_of=buffer, layout="rows") for _ in (0, 1)]
            for i, name in enumerate(views):
                entry = next(x for x in self.buffers if x["name"] == name)
                entry |= {"stride": b["stride"], "offset": str(i * HALF * int(b["stride"][1])), "layout": "NonOwningLayout"}
            forms = [([("p0", TOKENS), ("p1", HALF)], "p0", f"p1 + {HALF}" if i else "p1", views[i]) for i in (0, 1)]
        else:
            forms = [([("p0", TOKENS), ("p1", WIDTH)], "p0", "p1", buffer)]
        for i, (variables, row, column, target) in enumerate(forms):
            body = _Body(variables)
            x = self.expression(body, v, row, column)
            local = "p1" if loops == "halves" and not value.row else column
            body.emit("store", body.role(target), body.index(self.at(target, row, local)), x, None)
            self.loop(body, [target], value.module, fuse if i == 0 else False)
        self.open.add(v) if len(forms) == 1 else self.open.clear()

    def reduce(self, v: int) -> None:
        """The row sum below a mean, in an FP32 buffer."""
        value = self.program.values[v]
        fuse = self.plan.fuse[v]
        if not fuse:
            self.open = set()
        body = _Body([("p0", TOKENS), ("p1", WIDTH)], reduced=1)
        x = self.operand(body, v, 0, "p0", "p1")
        self.sums[v] = self.buffer(FP, row=True)
        total = body.emit("reduction", {"dtype": FP}, {"dtype": FP}, "sum", x)
        body.emit("store_reduction", body.role(self.sums[v]), body.index("p0"), total)
        self.loop(body, [self.sums[v]], value.module, fuse)

    def graph(self) -> InferenceGraph:
        consumers = self.program.consumers()
        for v, value in enumerate(self.program.values):
            if v in self.done:
                continue
            if value.kind == "gemm":
                self.gemm(v)
                continue
            if value.kind == "mean":
                self.reduce(v)
            modes = {self.plan.mode[v, c, s] for c in consumers[v] for s, p in enumerate(self.program.values[c].args) if p == v}
            operand = any(self.program.values[c].kind == "gemm" for c in consumers[v])
            if value.kind == "embed":
                if v % 2 or operand:
                    self.place_value(v, BF)
            elif modes & {"buffer", "forward"} or operand:
                self.place_value(v, self.plan.buffer[v] if modes & {"buffer", "forward"} else BF)
        data = {
            "header": {"versions": {}, "target": {}, "compile": {}, "model": {}},
            "parameters": self.parameters,
            "tables": [],
            "attention": [],
            "graphs": [{"name": "g", "inputs": self.graph_inputs, "buffers": self.buffers, "kernels": self._named(), "outputs": [self.place[len(self.program.values) - 1]]}],
            "bodies": self.bodies,
        }  # fmt: skip
        return InferenceGraph.model_validate(data)

    def _named(self) -> list[dict[str, Any]]:
        self._drop_unread()
        return [{**k, "name": "_".join(n["name"] for n in k["nodes"]), "generated": f"cpp_fused_{i}"} for i, k in enumerate(self.kernels)]

    def _drop_unread(self) -> None:
        """Without nodes that store what nobody reads, which Inductor removes too."""
        parent = {b["name"]: b.get("view_of") for b in self.buffers}
        read: set[str | None] = {self.place[len(self.program.values) - 1]}
        for kernel in reversed(self.kernels):
            kept = []
            for node in reversed(kernel["nodes"]):
                if node["kind"] == "loop" and not any(o in read or parent[o] in read for o in node["outputs"]):
                    continue
                kept.append(node)
                read.update(b for b in node["buffers"] if b not in node["outputs"]) if node["kind"] == "loop" else read.add(node["args"][0][1]["b"])
            kernel["nodes"] = kept[::-1]
        self.kernels = [k for k in self.kernels if k["nodes"]]
        used = {n["body"] for k in self.kernels for n in k["nodes"] if n["kind"] == "loop"}
        self.bodies = {k: b for k, b in self.bodies.items() if k in used}

    def place_value(self, v: int, dtype: str) -> None:
        value = self.program.values[v]
        loops = self.plan.loops[v]
        buffer = self.buffer(dtype, row=value.row, layout=self.plan.layout[v])
        self.store(v, buffer, self.plan.fuse[v], loops)
        self.place[v] = buffer
        self.done.add(v)

    def gemm(self, v: int) -> None:
        value = self.program.values[v]
        p = value.args[0]
        operand = self.place.get(p)
        held = operand is not None and next(b for b in self.buffers if b["name"] == operand)["dtype"] == BF
        if not held or p in self.columns or self.program.values[p].kind == "gemm":
            operand = self.buffer(BF)
            body = _Body([("p0", TOKENS), ("p1", WIDTH)])
            x = self.expression(body, p, "p0", "p1")
            body.emit("store", body.role(operand), body.index(self.at(operand, "p0", "p1")), x, None)
            self.open = set()
            self.loop(body, [operand], value.module, False)
        both = v in self.program.merged
        names = [value.parameter] + ([self.program.values[v + 1].parameter] if both else [])
        out = self.buffer(BF, width=WIDTH * len(names))
        weight = self.parameter(*names, rows=WIDTH)
        geometry = {"size": [str(WIDTH), str(WIDTH * len(names))], "stride": ["1", str(WIDTH)], "offset": "0"}
        args = [["self", {"b": operand}], ["mat2", {"b": weight, **geometry}], ["out", {"b": out}]]
        node = {"name": f"op{self.count()}", "kind": "extern", "outputs": [out], "module": value.module, "op": "aten.mm.out", "args": args, "mutates": ["out"]}
        self.open = set()
        self.kernel(node, False)
        self.place[v] = out
        self.done.add(v)
        if both:
            self.place[v + 1], self.columns[v + 1] = out, WIDTH
            self.done.add(v + 1)


class Mixed(Exception):
    """A plan asks one body to read a buffer both from memory and from a register."""


def random_pair(seed: int, **options: Any) -> tuple[Program, Plan, InferenceGraph, TrainingGraph]:
    """A random program and plan, rendered; plans that cannot be rendered are drawn again."""
    rng = random.Random(seed)
    faithful = options.pop("faithful", False)
    while True:
        program = random_program(rng, **options)
        plan = random_plan(rng, program, faithful=faithful)
        try:
            return program, plan, inference(program, plan), training(program, plan)
        except Mixed:
            continue
