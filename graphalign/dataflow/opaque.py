"""What opaque ops mean: operand roles and output arguments, read from `rules/ops`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from graphalign.errors import BadInputError
from graphalign.rules import read_yaml


class Declared(BaseModel):
    """For which calls a declaration holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = ""
    """Kind of device whose kernel does this; any if empty."""
    only: dict[str, bool | int | float | str | None] = {}
    """Values that other arguments must have, where they are given."""


class Computes(Declared):
    """What an opaque op computes, in the vocabulary of `declared`: it is then compared like any other loop."""

    function: Literal["rope"]
    values: tuple[str, ...]
    """Arguments that it rotates in place."""
    positions: str
    table: str
    """Cosines and sines, side by side, by position."""
    head_size: str
    neox: str

    def arguments(self) -> tuple[str, ...]:
        """Names of arguments that every call must have."""
        return (*self.values, self.positions, self.table, self.head_size, self.neox)


class FusedNorm(Declared):
    """The sum over the ranks, the residual sum and its RMSNorm in one op, as `fused_norm` evaluates it."""

    function: Literal["reduce_add_rms_norm"]
    reduced: str
    """The rank's part of a sum; with `out` missing, the norm is written there."""
    residual: str
    weight: str
    epsilon: str
    out: str
    bias: str
    """Added to the weight (1 in Gemma)."""

    def tensors(self) -> dict[str, str]:
        """Roles to arguments."""
        return {"reduced": self.reduced, "residual": self.residual, "weight": self.weight, "out": self.out}

    def arguments(self) -> tuple[str, ...]:
        """Names of arguments that every call must have."""
        return (self.reduced, self.residual, self.weight, self.epsilon)


class OpaqueOp(BaseModel):
    """One rule: an op whose inside is not compared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    op: str
    """Qualified overload."""
    kind: Literal["gemm", "attention", "composite", "effect", "opaque", "reduce", "gather", "embedding"]
    """`composite`: a whole module of the trainer. `effect`: writes engine state (the KV cache), gives no value. `reduce`, `gather`: combine
    the ranks of a tensor-parallel engine; `embedding`: looks up the rows that the rank holds, gives zeros for others (see `partial`)."""
    input: str = ""
    weight: str = ""
    bias: str = ""
    operands: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    """Composites: arguments whose checkpoint tensors name the trainer's module. With `layer` instead, the counterpart is what that
    layer's own forward computes, its submodules left out; operands are then compared token by token, in any order of elements."""
    whole: bool = False
    """Composites with `layer`: its submodules are in, and operands are compared as they are."""
    latent: bool = False
    """Composites: latent attention, whose counterpart is the layer's attention with the projection of its keys and values. `operands` are
    query, latent and shared key, compared token by token, in any order of elements; parameters are compared as an attention's."""
    routed: bool = False
    """Composites: experts with their routing; `operands` are hidden states and router logits, `layer` the experts' module."""
    routing: tuple[str, ...] = ()
    """Composites of experts: routing weights and expert numbers among `operands`; a token's experts are compared in any order."""
    sums: Literal["", "float32", "bfloat16", "float16"] = ""
    """Composites of experts: the format in which their results are added up; empty if that is not known."""
    out: str = ""
    """The argument it writes; empty if it returns its result."""
    layer: str = ""
    ignore: tuple[str, ...] = ()
    inside: str = ""
    """How the op rounds inside, in words, with the source of that; for people, and quoted by `drift`."""
    computes: Computes | FusedNorm | None = None
    """The same for the comparison; without it, or where it does not apply, the op stays opaque."""


def load_opaque_ops(rules: Path) -> dict[str, OpaqueOp]:
    """All rules of `rules/ops/*.yaml`, by op.

    Raises:
        BadInputError: a file is not YAML, a rule is malformed, or an op is declared twice.
    """
    found: dict[str, OpaqueOp] = {}
    for path in sorted((rules / "ops").glob("*.yaml")):
        try:
            items = read_yaml(path) or []
            parsed = [OpaqueOp.model_validate(x) for x in items]
        except (yaml.YAMLError, ValidationError, TypeError, OSError) as e:
            raise BadInputError(
                f"bad rule file {path.name}", where=str(e)[:400], hint="see CONTRIBUTING.md for the form of a rule"
            ) from None
        for rule in parsed:
            if rule.op in found:
                raise BadInputError(f"{rule.op} is declared twice in rules/ops", where=path.name, hint="remove one")
            found[rule.op] = rule
    return found
