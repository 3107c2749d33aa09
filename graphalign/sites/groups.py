"""Naming groups of sites: rules by structure, never by model; a generated name where no rule fits."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from graphalign.align.align import Alignment
from graphalign.align.edges import Finding
from graphalign.errors import BadInputError
from graphalign.evaluate.aten import base
from graphalign.ir.dataflow import Op
from graphalign.rules import read_yaml

OneOrMore = str | tuple[str, ...]


class Facts(BaseModel):
    """What a rule may ask of one end or of the region."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: OneOrMore = ()
    op: OneOrMore = ()
    reads: OneOrMore = ()
    reads_only: OneOrMore = ()
    """All that it reads is of these kinds."""
    arity: OneOrMore = ()
    """Number of operands, as a string."""
    has: OneOrMore = ()
    has_all: OneOrMore = ()
    feeds: OneOrMore = ()


class Rule(BaseModel):
    """A group name and what its sites look like."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    producer: Facts = Facts()
    consumer: Facts = Facts()
    region: Facts = Facts()


def load_group_rules(rules: Path) -> list[Rule]:
    """All rules of `rules/groups/*.yaml`, in order.

    Raises:
        BadInputError: a file is not YAML or a rule is malformed.
    """
    found: list[Rule] = []
    for path in sorted((rules / "groups").glob("*.yaml")):
        try:
            found += [Rule.model_validate(x) for x in read_yaml(path) or []]
        except (yaml.YAMLError, ValidationError, TypeError, OSError) as e:
            raise BadInputError(
                f"bad rule file {path.name}", where=str(e)[:400], hint="see CONTRIBUTING.md for the form of a rule"
            ) from None
    return found


class Namer:
    """Names the group of a finding."""

    def __init__(self, al: Alignment, rules: list[Rule]) -> None:
        self.al, self.rules = al, rules
        self.regions = self._regions()

    def name(self, finding: Finding) -> str:
        """The first rule's name that fits, else one made of the ends' ops."""
        facts = self.facts(finding)
        at = first_fit(self.rules, facts)
        return f"{_word(facts['producer'])}_into_{_word(facts['consumer'])}" if at is None else self.rules[at].name

    def facts(self, finding: Finding) -> dict[str, dict[str, set[str]]]:
        """What rules may ask: of `producer`, `consumer` and `region`."""
        p, c = self.al.training.ops[finding.producer], self.al.training.ops[finding.consumer]
        return {"producer": self._end(p), "consumer": self._end(c), "region": self.regions.get(self._region(p, c), {})}

    def _region(self, p: Op, c: Op) -> int:
        region = self.al.regions.region
        return region.get(c.id, region.get(p.id, -1))

    def _end(self, op: Op) -> dict[str, set[str]]:
        return {
            "kind": {self._kind(op)},
            "op": {base(op.detail["step"].op if "step" in op.detail else op.target)},
            "reads": {self._kind(self.al.training.ops[r.producer]) for o in op.operands for r in o},
            "arity": {str(len(op.operands))},
        }

    def _kind(self, op: Op) -> str:
        if op.id in self.al.regions.sums or op.id in self.al.regions.partial:
            return "residual_sum"
        if "parameters" in op.detail:  # latent attention too
            return "attention"
        return op.target if op.kind == "anchor" and op.target in ("gemm", "attention", "logprobs") else op.kind

    def _regions(self) -> dict[int, dict[str, set[str]]]:
        facts: dict[int, dict[str, set[str]]] = {}
        for i, region in self.al.regions.region.items():
            op = self.al.training.ops[i]
            f = facts.setdefault(region, {"has": set(), "reads": set(), "feeds": set()})
            f["has"] |= {base(op.target)} | ({base(op.detail["step"].op)} if "step" in op.detail else set())
            f["reads"] |= {self._kind(self.al.training.ops[r.producer]) for o in op.operands for r in o}
        for region, ends in self.al.regions.outputs.items():
            facts[region]["feeds"] |= {self._kind(self.al.training.ops[c]) for c, _ in ends}
        return facts


def first_fit(rules: list[Rule], facts: dict[str, dict[str, set[str]]]) -> int | None:
    """Position of the first rule that fits some facts."""
    parts = ("producer", "consumer", "region")
    return next((i for i, r in enumerate(rules) if all(_fits(getattr(r, p), facts.get(p, {})) for p in parts)), None)


def _fits(wanted: Facts, facts: dict[str, set[str]]) -> bool:
    for name in ("kind", "op", "reads", "arity", "has", "feeds"):
        if (values := _set(getattr(wanted, name))) and not values & facts.get(name, set()):
            return False
    only, every = _set(wanted.reads_only), _set(wanted.has_all)
    return (not only or facts.get("reads", set()) <= only) and every <= facts.get("has", set())


def _set(values: OneOrMore) -> set[str]:
    return {values} if isinstance(values, str) else set(values)


def _word(end: dict[str, set[str]]) -> str:
    kind = next(iter(end["kind"]))
    return next(iter(end["op"])) if kind == "op" else kind
