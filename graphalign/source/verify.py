"""Shows that a generated file is the patch: bitwise `apply`, an empty diff when it is captured again, and no edit too many.

A generated file for which no conflict was found can still be wrong, so none is written before it has passed here.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphalign.errors import PatchError
from graphalign.patch.spec import PatchSpec
from graphalign.rewrite.apply import apply
from graphalign.sites.report import Report
from graphalign.source.generate import Generated, generate, refuse_regime
from graphalign.source.plan import parts
from graphalign.source.stock import restore

SHAPES = ((1, 9, 0), (2, 17, 0), (1, 33, 0), (3, 12, 4))
"""(sequences, tokens, padding on the left of the first sequence)"""
CHECKPOINTING = (False, True)
"""`use_reentrant` of both kinds."""
SEED = 11

Result = dict[str, torch.Tensor | None]
Recapture = Callable[[nn.Module], Report]
"""Captures a model and compares it with the engine."""


@dataclass(frozen=True)
class Run:
    """One forward and backward."""

    shape: tuple[int, int, int]
    checkpointing: bool | None = None
    """`use_reentrant`, None without checkpointing."""

    def __str__(self) -> str:
        kind = {None: "", True: ", reentrant checkpointing", False: ", non-reentrant checkpointing"}[self.checkpointing]
        padded = f", {self.shape[2]} of them padding" if self.shape[2] else ""
        return f"{self.shape[0]} × {self.shape[1]} tokens{padded}{kind}"


def runs(model: nn.Module) -> list[Run]:
    """Four shapes without checkpointing, and one with either kind if the model can."""
    out = [Run(s) for s in SHAPES]
    if getattr(model, "supports_gradient_checkpointing", False):
        out += [Run(SHAPES[1], kind) for kind in CHECKPOINTING]
    return out


def execute(model: nn.Module, run: Run) -> Result:
    """Logits and every parameter's gradient of one run; the model's mode and gradients are as before."""
    m: Any = model
    sequences, tokens, padding = run.shape
    made = torch.Generator().manual_seed(SEED + tokens)
    vocabulary = m.get_input_embeddings().weight.shape[0]
    ids = torch.randint(3, min(vocabulary, 1000), (sequences, tokens), generator=made)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    given = {"input_ids": ids, "use_cache": False, **({"attention_mask": mask} if padding else {})}
    mode = model.training
    if run.checkpointing is not None:
        model.train()
        m.gradient_checkpointing_enable({"use_reentrant": run.checkpointing})
    model.zero_grad(set_to_none=True)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            logits = model(**given).logits
            weight = torch.randn(logits.shape, generator=made)
            (logits.float() * weight * mask[..., None]).mean().mul(1000.0).backward()
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    finally:
        model.zero_grad(set_to_none=True)
        if run.checkpointing is not None:
            m.gradient_checkpointing_disable()
            model.train(mode)
    return {"logits": logits.detach(), **grads}


def differing(a: Result, b: Result) -> list[str]:
    """Names of what is not bitwise equal."""

    def same(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
        return x is y if x is None or y is None else x.dtype == y.dtype and torch.equal(x, y)

    return [n for n in a if not same(a[n], b.get(n))]


@contextmanager
def in_place(model: nn.Module, generated: Generated) -> Iterator[int]:
    """The model with the generated classes, as the file's own `patch` puts them there."""
    names = generated.load()
    swapped = [(m, type(m)) for m in model.modules() if type(m).__module__ == generated.stock.module]
    try:
        yield names["patch"](model)  # type: ignore[operator]
    finally:
        restore(swapped)


class Reference:
    """What `apply` computes: made before anything is generated, so that what it refuses is refused in its words."""

    def __init__(self, model: nn.Module, spec: PatchSpec, *, allow_stale: bool = False) -> None:
        refuse_regime(spec)
        self.model, self.spec = model, spec
        with apply(model, spec, allow_stale=allow_stale):
            self.results = {run: execute(model, run) for run in runs(model)}
        self.stock = execute(model, runs(model)[0])

    def compare(self, generated: Generated) -> list[str]:
        """What differs from `apply`, in words; stops at the first run that differs."""
        with in_place(self.model, generated):
            for run, want in self.results.items():
                try:
                    found = differing(want, execute(self.model, run))
                except Exception as e:  # whatever the generated code raises
                    return [f"{run}: {type(e).__name__}: {e}"]
                if found:
                    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
                    return [f"{run}: {', '.join(found[:3])}{more} not bitwise what `apply` gives"]
        return []


@dataclass(frozen=True)
class Verified:
    """What was shown."""

    generated: Generated
    """The file without changes that can be left out unnoticed."""
    runs: tuple[str, ...]
    edits: int
    """Changes in it that were left out one at a time, each of which was noticed."""
    recaptured: bool


def verify(reference: Reference, generated: Generated, recapture: Recapture | None) -> Verified:
    """Verify a generated file.

    Args:
        reference: of the same model and patch.
        generated: the file.
        recapture: captures the model again; None: not shown.

    Raises:
        PatchError: something differs, sites remain, or the file imports what it is not to need.
    """
    refuse_imports(generated)
    if problems := reference.compare(generated):
        raise PatchError(
            "the generated file is not the patch, and was not written", where="\n".join(problems),
            hint="use `graphalign.apply`; please report the patch and the model's config",
        )  # fmt: skip
    if recapture is not None:
        _refuse_sites(_sites(generated, reference.model, recapture))
    smallest, count = _smallest(reference, generated, recapture)
    if smallest is not generated and (problems := reference.compare(smallest)):
        raise PatchError("the generated file is not the patch, and was not written", where="\n".join(problems))
    return Verified(smallest, tuple(str(r) for r in reference.results), count, recapture is not None)


def _smallest(reference: Reference, generated: Generated, recapture: Recapture | None) -> tuple[Generated, int]:
    """The file without what can be left out unnoticed (two casts may round one value), and how many parts of changes it has then."""
    found = generated
    while True:
        before, count = found, 0
        for span, change in before.changes.items():
            for part in parts(change):
                try:
                    less = found.without(span, part)
                except PatchError:
                    continue
                if less.body == found.without(-1, "").body:
                    continue  # a dtype that is read for a cast that went: its line went too
                count += 1
                if not reference.compare(less) and not (recapture is not None and _sites(less, reference.model, recapture)):
                    found = less
        if found is before:
            return (found if found is generated else found.guarded()), count


def _sites(generated: Generated, model: nn.Module, recapture: Recapture) -> dict[str, int]:
    with in_place(model, generated):
        return _remaining(recapture(model), generated.spec)


def generate_verified(reference: Reference, recapture: Recapture | None) -> Verified:
    """Write the patch of `reference` into its model's modeling file, and verify it.

    Two plans are tried: casts where values are read, with the fewest conditions on layers, and casts where they are made. They differ in
    gradients where reentrant checkpointing nests: what two readers round is then added up in two backward passes.

    Raises:
        PatchError: neither can be written, or is the patch; in the words of the first.
    """
    first: PatchError | None = None
    tried = ""
    for early in (False, True):
        try:
            made = generate(reference.model, reference.spec, early=early)
            if made.body != tried:
                tried = made.body
                return verify(reference, made, recapture)
        except PatchError as e:
            first = first or e
    assert first is not None
    raise first


def refuse_imports(generated: Generated) -> None:
    """A generated file runs without graphalign, and without Dynamo."""
    for n in ast.walk(ast.parse(generated.text)):
        named = [a.name for a in n.names] if isinstance(n, ast.Import) else [n.module or ""] if isinstance(n, ast.ImportFrom) else []
        if found := [x for x in named if x.partition(".")[0] == "graphalign" or "_dynamo" in x.split(".")]:
            raise PatchError(
                f"the modeling file imports {found[0]}, and a generated one is to need nothing of it", where=ast.unparse(n),
                hint="use `graphalign.apply`",
            )  # fmt: skip


def _refuse_sites(left: dict[str, int]) -> None:
    if left:
        raise PatchError(
            "the generated file leaves sites that the patch removes, and was not written",
            where=", ".join(f"{n} of {g}" for g, n in left.items()), hint="use `graphalign.apply`; please report the patch",
        )  # fmt: skip


def _remaining(report: Report, spec: PatchSpec) -> dict[str, int]:
    """Group to its sites, but for those that the patch leaves out by name."""
    left = {s.site.rpartition(".")[0] for s in spec.skipped}
    everything = any(s.site == "*" for s in spec.skipped)
    return {g.name: n for g in report.groups if (n := sum(s.count for s in g.sites)) and g.name not in left and not everything}
