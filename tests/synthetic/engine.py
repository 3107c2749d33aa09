"""A program as Inductor loop bodies in kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphalign.ir.inference import InferenceGraph
from tests.synthetic.program import BF, FP, HALF, TOKENS, VOCABULARY, WIDTH, Plan, Program


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
        self.graph_inputs = [
            {
                "name": "ids",
                "role": "tensor",
                "source": "input_ids",
                "dtype": "int64",
                "size": ["1", str(TOKENS)],
                "stride": [str(TOKENS), "1"],
            }
        ]
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
            segments = [
                {"checkpoint": n, "dim": 0, "start": i * shape[0] // len(names), "length": shape[0] // len(names)}
                for i, n in enumerate(names)
            ]
            name = key if len(names) == 1 else "merged." + key.replace(".weight", "")
            self.parameters.append({"name": name, "dtype": BF, "shape": shape, "segments": segments})
            stride = [str(WIDTH), "1"] if rows else ["1"]
            self.graph_inputs.append(
                {
                    "name": self.inputs[key],
                    "role": "parameter",
                    "source": name,
                    "dtype": BF,
                    "size": [str(s) for s in shape],
                    "stride": stride,
                }
            )
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
                x = (
                    self.stored(body, p, row, turned)
                    if self.program.values[p].kind in ("gemm", "embed")
                    else self.expression(body, p, row, turned)
                )
                low = body.emit(
                    "lt", body.emit("index_expr", body.index(column), {"dtype": "int64"}), body.emit("constant", HALF, {"dtype": "int64"})
                )
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
        node = {"name": f"op{self.count()}", "kind": "loop", "outputs": outputs, "module": module, "body": key,
                "buffers": list(body.buffers), "forwarded": list(body.forwarded)}  # fmt: skip
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
            "graphs": [{"name": "g", "inputs": self.graph_inputs, "buffers": self.buffers, "kernels": self._named(),
                        "outputs": [self.place[len(self.program.values) - 1]]}],
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
                read.update(b for b in node["buffers"] if b not in node["outputs"]) if node["kind"] == "loop" else read.add(
                    node["args"][0][1]["b"]
                )
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
        node = {
            "name": f"op{self.count()}",
            "kind": "extern",
            "outputs": [out],
            "module": value.module,
            "op": "aten.mm.out",
            "args": args,
            "mutates": ["out"],
        }
        self.open = set()
        self.kernel(node, False)
        self.place[v] = out
        self.done.add(v)
        if both:
            self.place[v + 1], self.columns[v + 1] = out, WIDTH
            self.done.add(v + 1)


class Mixed(Exception):
    """A plan asks one body to read a buffer both from memory and from a register."""
