"""The GPUs that a simulated capture can be made for, read from `rules/targets`."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from graphalign.errors import BadInputError
from graphalign.rules import data_dir, read_yaml

CPU = "cpu"
"""The default target: vLLM's CPU engine, which really runs."""


class Target(BaseModel):
    """A GPU, as its driver would describe it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    """What `--target` names it."""
    name: str
    capability: tuple[int, int]
    """CUDA compute capability."""
    processors: int
    """Streaming multiprocessors."""
    memory: float
    """GiB, as `cudaMemGetInfo` reports the total."""
    l2_cache: int
    """MiB."""
    shared_memory: int
    """Bytes per block at most (opt-in)."""
    threads_per_processor: int
    clock: int
    """Highest clock of a processor, MHz."""


def load_targets(rules: Path | None = None) -> dict[str, Target]:
    """All targets by key.

    Raises:
        BadInputError: a file cannot be read, or names a target twice.
    """
    found: dict[str, Target] = {}
    for path in sorted(data_dir("targets", rules).glob("*.yaml")):
        try:
            items = read_yaml(path) or {}
            for key, item in items.items():
                if key in found or key == CPU:
                    raise BadInputError(f"target {key} is declared twice in rules/targets", where=path.name, hint="remove one")
                found[key] = Target.model_validate({"key": key, **item})
        except (yaml.YAMLError, ValidationError, TypeError, AttributeError, OSError) as e:
            hint = "see CONTRIBUTING.md for the form of a rule"
            raise BadInputError(f"bad rule file {path.name}", where=str(e)[:400], hint=hint) from None
    return found


def find_target(key: str, rules: Path | None = None) -> Target | None:
    """The target of that name; None for `cpu`.

    Raises:
        BadInputError: there is no such target.
    """
    if key == CPU:
        return None
    known = load_targets(rules)
    if key not in known:
        raise BadInputError(f"there is no target {key!r}", where="--target", hint="the targets are " + ", ".join((CPU, *known)))
    return known[key]
