"""How many sites an architecture is expected to have, so that a capture that gives fewer or more says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from graphalign.errors import BadInputError
from graphalign.ir.paths import ranges
from graphalign.rules import read_yaml
from graphalign.sites.report import Report

Counts = dict[str, int]


class Expected(BaseModel):
    """Training edges that are sites, per group, of one architecture on one kind of device in one regime."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    """Class name, `Qwen3ForCausalLM`."""
    device: str
    """Kind of device of the target: `cpu`, `cuda`."""
    regime: dict[str, Any] = Field(default_factory=lambda: {"param_dtype": "bfloat16", "autocast": None, "logprobs": None})
    """Settings of the regime that must be as given."""
    simulated: bool = False
    tp: int = 1
    """Tensor-parallel size."""
    layers: int | None = None
    """Number of layers that the counts are for, where they depend on it; any if None."""
    layer: Counts
    """Sites per group in every layer."""
    kinds: tuple[Counts, ...] = ()
    """Where layers come in turns, what differs in each kind of layer; layer n is of kind n modulo their number."""
    unrotated: Counts = Field(default_factory=dict)
    """In layers that apply no rotary embedding, what differs. Which they are is seen in the capture, not taken from a pattern."""
    first: Counts = Field(default_factory=dict)
    """Where layer 0 differs, its counts."""
    last: Counts = Field(default_factory=dict)
    """Where the last layer differs, its counts."""
    outside: Counts = Field(default_factory=dict)
    """Outside the layers: the final norm, embeddings."""

    def of(self, layer: int | None, layers: int, unrotated: Collection[int] = ()) -> Counts:
        """Expected counts of one layer, or of what is outside the layers; `unrotated` are the layers without rotary embedding."""
        if layer is None:
            return self.outside
        kind = self.kinds[layer % len(self.kinds)] if self.kinds else {}
        counts = {
            **self.layer,
            **kind,
            **(self.unrotated if layer in unrotated else {}),
            **(self.first if layer == 0 else {}),
            **(self.last if layer == layers - 1 else {}),
        }
        return {k: n for k, n in counts.items() if n}


def load_expected(rules: Path) -> list[Expected]:
    """All counts of `rules/expected/*.yaml`.

    Raises:
        BadInputError: a file is not YAML, or counts are malformed or given twice.
    """
    found: list[Expected] = []
    for path in sorted((rules / "expected").glob("*.yaml")):
        try:
            items = [Expected.model_validate(x) for x in read_yaml(path) or []]
        except (yaml.YAMLError, ValidationError, TypeError, OSError) as e:
            raise BadInputError(
                f"bad rule file expected/{path.name}", where=str(e)[:400], hint="see CONTRIBUTING.md for its form"
            ) from None
        for item in items:
            if any(_about(item) == _about(x) for x in found):
                raise BadInputError(f"{item.architecture} on {item.device} is counted twice in rules/expected", where=path.name)
            found.append(item)
    return found


def _about(e: Expected) -> tuple[Any, ...]:
    return e.architecture, e.device, tuple(sorted((k, str(v)) for k, v in e.regime.items())), e.simulated, e.tp, e.layers


def find_expected(known: list[Expected], report: Report) -> Expected | None:
    """The counts that apply to a report: those for its number of layers before those for any."""
    for e in sorted(known, key=lambda e: e.layers is None):
        if e.layers not in (None, report.model.get("layers")):
            continue
        target = (report.target.get("device"), report.target.get("tp") or 1, report.simulated)
        same = e.architecture == report.model.get("architecture") and (e.device, e.tp, e.simulated) == target
        if same and all(report.regime.get(k) == v for k, v in e.regime.items()):
            return e
    return None


def count_sites(report: Report) -> dict[int | None, Counts]:
    """Edges that are sites, per layer of the reader (None: outside the layers) and group."""
    out: dict[int | None, Counter[str]] = {}
    for g in report.groups:
        for s in g.sites:
            for layer in s.layers or (None,):
                out.setdefault(layer, Counter())[g.name] += 1 if s.layers else s.count
    return {k: dict(v) for k, v in out.items()}


def compare_counts(expected: Expected, report: Report) -> list[str]:
    """What differs from the expected counts, in words; equal differences of several layers in one line."""
    found, layers = count_sites(report), int(report.model.get("layers") or 0)
    same: dict[str, list[int | None]] = {}
    for layer in [*range(layers), None]:
        want, have = expected.of(layer, layers, report.unrotated), found.get(layer, {})
        for group in sorted({*want, *have}):
            if want.get(group, 0) != have.get(group, 0):
                word = "fewer" if have.get(group, 0) < want.get(group, 0) else "more"
                same.setdefault(f"{group}: {have.get(group, 0)} where {want.get(group, 0)} are expected ({word})", []).append(layer)
    return [f"{text}, {_places(at)}" for text, at in same.items()]


def _places(at: list[int | None]) -> str:
    numbers = tuple(n for n in at if n is not None)
    words = ([f"layer{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"] if numbers else []) + (
        ["outside the layers"] if None in at else []
    )
    return " and ".join(words)


def verdict(report: Report, rules: Path) -> str:
    """The line at the end of `find`."""
    architecture, device = report.model.get("architecture"), report.target.get("device")
    ranks = report.target.get("tp") or 1
    device = (f"{device} tp {ranks}" if ranks != 1 else str(device)) + (" (simulated)" if report.simulated else "")
    expected = find_expected(load_expected(rules), report)
    if expected is None:
        return f"no expected counts for {architecture} on {device} in this regime; rules/expected can hold them (see CONTRIBUTING.md)"
    wrong = compare_counts(expected, report)
    if not wrong:
        return f"as many sites as expected for {architecture} on {device}"
    lines = "".join(f"\n  {w}" for w in wrong)
    return (
        f"not the sites expected for {architecture} on {device}:{lines}\n  `graphalign drift` against an older sites.json says what moved"
    )
