"""Checks of the rules themselves: every rule on its test vectors and on recorded captures. A rule that matches nothing is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from graphalign.align.finer import compare_pair
from graphalign.align.pair import prepare
from graphalign.dataflow.opaque import OpaqueOp, load_opaque_ops
from graphalign.errors import BadInputError, GraphalignError
from graphalign.ir.files import read_json
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph
from graphalign.rules import read_yaml
from graphalign.sites.expected import Expected, compare_counts, find_expected, load_expected
from graphalign.sites.find import diff
from graphalign.sites.groups import Namer, Rule, first_fit, load_group_rules

Progress = Callable[[str, float | None], None]


class Vector(BaseModel):
    """A test vector: `rules/vectors/*.yaml`. One of `op`, `group`, `architecture` says what it tests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    op: str = ""
    args: tuple[str, ...] = ()
    """Argument names of the op's schema; those that the rule names must be among them."""
    group: str = ""
    rule: int | None = None
    """Which rule of that name, from 1, `unrecorded` excuses; all if None."""
    producer: dict[str, list[str]] = {}
    consumer: dict[str, list[str]] = {}
    region: dict[str, list[str]] = {}
    """Facts for which the first rule that fits must give `group`."""
    architecture: str = ""
    unrecorded: str = ""
    """Why no recorded capture can show it; instead of an error, `rules check` says this."""


@dataclass
class Result:
    """What `graphalign rules check` prints."""

    found: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """One line per rule, problems last."""
        lines = [f"ok       {x}" for x in self.found] + [f"excused  {x}" for x in self.excused] + [f"PROBLEM  {x}" for x in self.problems]
        return [*lines, f"{len(self.found)} rules ok, {len(self.excused)} excused, {len(self.problems)} problems"]


def recorded_folders() -> list[Path]:
    """Folders of the checkout's tests that hold recorded captures."""
    tests = Path(__file__).resolve().parent.parent / "tests"
    return sorted({p.parent for p in tests.rglob("*.inf.json.gz")})


def load_vectors(rules: Path) -> list[Vector]:
    """All test vectors.

    Raises:
        BadInputError: a file is not YAML, or a vector is malformed.
    """
    out: list[Vector] = []
    for path in sorted((rules / "vectors").glob("*.yaml")):
        try:
            out += [Vector.model_validate(x) for x in read_yaml(path) or []]
        except (yaml.YAMLError, ValidationError, TypeError, OSError) as e:
            raise BadInputError(
                f"bad file of test vectors {path.name}", where=str(e)[:400], hint="see CONTRIBUTING.md for its form"
            ) from None
    return out


def check_rules(rules: Path, folders: Iterable[Path], *, progress: Progress | None = None) -> Result:
    """Check opaque ops, group names and expected counts.

    Args:
        rules: the folder of rules.
        folders: recorded captures, `NAME.inf.json.gz` with `NAME.train.json.gz`, where NAME's part before its first dot will do.

    Raises:
        BadInputError: a rule file cannot be read, or there are no rules or no captures.
    """
    say = progress or (lambda stage, fraction: None)
    ops, groups, expected, vectors = load_opaque_ops(rules), load_group_rules(rules), load_expected(rules), load_vectors(rules)
    if not (ops or groups or expected):
        raise BadInputError(f"there are no rules in {rules}", hint="name a copy of graphalign's folder `rules`, see CONTRIBUTING.md")
    pairs = find_pairs(list(folders))
    if not pairs:
        raise BadInputError("there are no recorded captures to check the rules on", hint="name their folder with --captures")
    result = Result()
    say("ops", None)
    inference = {path: read_json(path, InferenceGraph, kind="inference capture") for path, _ in pairs}
    _check_ops(ops, vectors, inference, result)
    say("test vectors of groups", None)
    _check_vectors(groups, vectors, result)
    one = _one_each(pairs, inference)
    say("groups", None)
    _check_groups(groups, vectors, one, inference, rules, result)
    say("expected sites", None)
    _check_expected(expected, vectors, one, inference, rules, result)
    known = {*ops, *(g.name for g in groups), *(e.architecture for e in expected)}
    result.problems += [f"vector of {n}: there is no such rule" for v in vectors if (n := v.op or v.group or v.architecture) not in known]
    return result


def find_pairs(folders: list[Path]) -> list[tuple[Path, Path | None]]:
    """Inference captures with the training capture of the same model, smallest first."""
    trains = {p.name.removesuffix(".train.json.gz"): p for folder in folders for p in sorted(folder.glob("*.train.json.gz"))}
    found = {p.resolve(): p for folder in folders for p in sorted(folder.glob("*.inf.json.gz"))}

    def train(p: Path) -> Path | None:
        stem = p.name.removesuffix(".inf.json.gz")
        own = p.with_name(f"{stem}.train.json.gz")
        return own if own.exists() else trains.get(stem) or trains.get(stem.split(".")[0])

    return [(p, train(p)) for p in sorted(found.values(), key=lambda p: (p.stat().st_size, p.name))]


def _one_each(pairs: list[tuple[Path, Path | None]], inference: dict[Path, InferenceGraph]) -> list[tuple[Path, Path]]:
    """One pair per architecture, device and training capture: other versions and settings of the same name no other groups."""
    seen: dict[tuple[Any, ...], tuple[Path, Path]] = {}
    # a plain name is the default setting of the current version: `qwen3` before `qwen3.v0.31.0`
    for path, train in sorted(pairs, key=lambda p: (p[0].name.count("."), p[0].stat().st_size, p[0].name)):
        h = inference[path].header
        if train is not None:
            seen.setdefault((h.model.get("architecture"), h.target.get("device"), h.simulated, train.resolve()), (path, train))
    return list(seen.values())


def _settle(what: str, where: str, excuse: str, result: Result) -> None:
    if where:
        result.found.append(f"{what}: {where}")
    elif excuse:
        result.excused.append(f"{what}: {excuse}")
    else:
        advice = "record one, or say in rules/vectors why none can be (`unrecorded`)"
        result.problems.append(f"{what} matches nothing in any recorded capture: {advice}")


def _check_ops(ops: dict[str, OpaqueOp], vectors: list[Vector], inference: dict[Path, InferenceGraph], result: Result) -> None:
    for name, rule in ops.items():
        c = rule.computes
        inside = (*c.arguments(), *c.only) if c else ()
        roles = {r for r in (rule.input, rule.weight, rule.bias, rule.out, rule.layer, *rule.operands, *rule.weights, *inside) if r}
        own = [v for v in vectors if v.op == name]
        if not own:
            result.problems.append(f"op {name} has no test vector in rules/vectors")
        for v in own:
            if v.args and (absent := roles - set(v.args)):
                result.problems.append(f"op {name}: its test vector has no argument {', '.join(sorted(absent))}")
        called = {p: n for p, g in inference.items() for graph in g.graphs for k in graph.kernels for n in k.nodes if n.op == name}
        for path, node in called.items():
            # an absent bias is left out of the call, so are defaults; some versions return what others write
            required = roles - {rule.bias, rule.out, *(c.only if c else ())}
            if absent := required - {a for a, _ in node.args}:
                result.problems.append(f"op {name}: in {path.name} it is called without {', '.join(sorted(absent))}")
        where = f"{len(called)} captures, {next(iter(called)).name} among them" if called else ""
        _settle(f"op {name}", where, next((v.unrecorded for v in own if v.unrecorded), ""), result)


def _check_vectors(groups: list[Rule], vectors: list[Vector], result: Result) -> None:
    for v in (v for v in vectors if v.group and (v.producer or v.consumer or v.region)):
        facts = {part: {k: set(x) for k, x in getattr(v, part).items()} for part in ("producer", "consumer", "region")}
        at = first_fit(groups, facts)
        got = groups[at].name if at is not None else "no rule"
        if got != v.group:
            result.problems.append(f"group {v.group}: its test vector is named by {got}")


def _check_groups(groups: list[Rule], vectors: list[Vector], one: list[tuple[Path, Path]], inference: dict[Path, InferenceGraph],
                  rules: Path, result: Result) -> None:  # fmt: skip
    matched: dict[int, str] = {}
    for path, train in one:
        if len(matched) == len(groups):
            break
        try:
            training = read_json(train, TrainingGraph, kind="training capture")
            compared = compare_pair(prepare(inference[path], training, rules))
            namer = Namer(compared.alignment, groups)
            for f in compared.comparison.findings:
                if f.verdict in ("keep", "round") and (at := first_fit(groups, namer.facts(f))) is not None:
                    matched.setdefault(at, path.name)
        except GraphalignError as e:
            result.problems.append(f"{path.name} cannot be aligned with {train.name}: {e.what}")
    for at, rule in enumerate(groups):
        same = [i for i, r in enumerate(groups) if r.name == rule.name]
        what = f"group {rule.name}" + (f" (rule {same.index(at) + 1} of {len(same)})" if len(same) > 1 else "")
        if not any(v.group == rule.name and (v.producer or v.consumer or v.region) for v in vectors):
            result.problems.append(f"{what} has no test vector in rules/vectors")
        own = [v for v in vectors if v.group == rule.name and v.rule in (None, same.index(at) + 1)]
        _settle(what, matched.get(at, ""), next((v.unrecorded for v in own if v.unrecorded), ""), result)


def _check_expected(expected: list[Expected], vectors: list[Vector], one: list[tuple[Path, Path]], inference: dict[Path, InferenceGraph],
                    rules: Path, result: Result) -> None:  # fmt: skip
    places: dict[int, str] = {}
    for path, train in one:
        if not any(e.architecture == inference[path].header.model.get("architecture") for e in expected):
            continue
        try:
            report = diff(inference[path], read_json(train, TrainingGraph, kind="training capture"), rules=rules)
        except GraphalignError as e:
            result.problems.append(f"{path.name} cannot be compared with {train.name}: {e.what}")
            continue
        entry = find_expected(expected, report)
        if entry is not None:
            places[expected.index(entry)] = path.name
            result.problems += [f"{_counts_of(entry)}: {path.name} has {x}" for x in compare_counts(entry, report)]
    for at, entry in enumerate(expected):
        excuse = next((v.unrecorded for v in vectors if v.architecture == entry.architecture and v.unrecorded), "")
        _settle(_counts_of(entry), places.get(at, ""), excuse, result)


def _counts_of(e: Expected) -> str:
    return f"expected sites of {e.architecture} on {e.device}" + (" (simulated)" if e.simulated else "")
