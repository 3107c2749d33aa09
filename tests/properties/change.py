"""Changes to a capture that mean nothing: other names, another order of independent kernels, other value numbers."""

from __future__ import annotations

import random
from typing import Any

from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph


def rename(graph: InferenceGraph, rng: random.Random) -> InferenceGraph:
    """Other names for buffers, graph inputs, nodes, kernels and bodies."""
    plain = graph.model_dump(mode="json")
    (g,) = plain["graphs"]
    names = [b["name"] for b in g["buffers"]] + [i["name"] for i in g["inputs"]] + list(plain["bodies"])
    names += [n["name"] for k in g["kernels"] for n in k["nodes"]]
    new = [f"x{i}" for i in range(len(names))]
    rng.shuffle(new)
    mapping = dict(zip(names, new, strict=True))
    bodies = list(plain["bodies"].items())
    rng.shuffle(bodies)
    plain["graphs"] = _replace(plain["graphs"], mapping)
    plain["bodies"] = {mapping[k]: b for k, b in bodies}
    for i, k in enumerate(plain["graphs"][0]["kernels"]):
        k["name"], k["generated"] = f"kernel{i}", f"renamed_{i}"
    return InferenceGraph.model_validate(plain)


def _replace(x: Any, mapping: dict[str, str]) -> Any:
    if isinstance(x, str):
        return mapping.get(x, x)
    if isinstance(x, list):
        return [_replace(y, mapping) for y in x]
    return {k: _replace(v, mapping) for k, v in x.items()} if isinstance(x, dict) else x


def permute_kernels(graph: InferenceGraph, rng: random.Random) -> InferenceGraph:
    """Another order of the kernels that keeps every read behind its write."""
    plain = graph.model_dump(mode="json")
    (g,) = plain["graphs"]
    root = {b["name"]: b["view_of"] or b["name"] for b in g["buffers"]}
    waiting, done, out = list(g["kernels"]), set(), []
    writers: dict[str, set[int]] = {}
    for i, k in enumerate(waiting):
        for name in _written(k):
            writers.setdefault(root[name], set()).add(i)
    pending = list(range(len(waiting)))
    while pending:
        ready = [
            i
            for i in pending
            if all(w in done or w == i for name in _read(waiting[i]) if name in root for w in writers.get(root[name], ()))
        ]
        i = rng.choice(ready)
        pending.remove(i)
        done.add(i)
        out.append(waiting[i])
    g["kernels"] = out
    return InferenceGraph.model_validate(plain)


def _written(kernel: dict[str, Any]) -> set[str]:
    return {o for n in kernel["nodes"] for o in n["outputs"]}


def _read(kernel: dict[str, Any]) -> set[str]:
    out: set[str] = set()
    for n in kernel["nodes"]:
        out |= set(n["buffers"]) if n["kind"] == "loop" else {a["b"] for _, a in n["args"] if isinstance(a, dict) and "b" in a}
    return out - _written(kernel)


def renumber(graph: TrainingGraph, rng: random.Random) -> TrainingGraph:
    """Other value ids, and the inputs in another order."""
    plain = graph.model_dump(mode="json")
    ids = [i["value"]["id"] for i in plain["inputs"]] + [o["id"] for n in plain["nodes"] for o in n["outputs"]]
    new = list(range(100, 100 + len(ids)))
    rng.shuffle(new)
    mapping = dict(zip(ids, new, strict=True))

    def change(x: Any) -> Any:
        if isinstance(x, dict):
            return {"v": mapping[x["v"]]} if "v" in x else {k: change(v) for k, v in x.items()}
        return [change(y) for y in x] if isinstance(x, list) else x

    for i in plain["inputs"]:
        i["value"]["id"] = mapping[i["value"]["id"]]
    for n in plain["nodes"]:
        n["args"], n["kwargs"] = change(n["args"]), change(n["kwargs"])
        for o in n["outputs"]:
            o["id"] = mapping[o["id"]]
    plain["outputs"] = [mapping[v] for v in plain["outputs"]]
    rng.shuffle(plain["inputs"])
    return TrainingGraph.model_validate(plain)
