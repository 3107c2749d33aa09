"""From a report to a patch spec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from graphalign.errors import BadInputError
from graphalign.evaluate.aten import MATMULS
from graphalign.evaluate.parts import key_name
from graphalign.ir.paths import ranges, unit_of
from graphalign.patch.spec import Edit, Group, Key, LeftOut, PatchSpec, Skipped, parse_layers
from graphalign.sites.report import End, Report, Site

TAIL = "logprobs[0]"
"""What sites behind the last GEMM reach, and nothing else."""


def make_spec(
    report: Report,
    *,
    only: Iterable[str] = (),
    without: Iterable[str] = (),
    layers: str = "",
    captures: Mapping[str, str] | None = None,
) -> PatchSpec:
    """The edits that make the training model round where inference rounds.

    Args:
        report: the result of a diff.
        only: group names to take; all if empty.
        without: group names to leave out.
        layers: layers to patch, `0-11`; all if empty (edits outside the layers are then included).
        captures: digests of both captures.

    Raises:
        BadInputError: the report has a semantic divergence, or a group that does not exist is named.
    """
    if report.semantic:
        raise BadInputError(
            "the two sides compute different functions; rounding cannot be aligned before they agree",
            where=report.semantic[0].where,
            hint="`graphalign why` names the op where they part",
        )
    names = {g.name for g in report.groups}
    for name in (*only, *without):
        if name not in names:
            raise BadInputError(f"there is no group {name!r}", hint=f"groups here: {', '.join(sorted(names)) or 'none'}")
    chosen = {n for n in names if (not only or n in set(only)) and n not in set(without)}
    wanted = set(parse_layers(layers)) if layers else None
    groups, skipped = [], _left_out(report, chosen, wanted)
    modules = {end.module for g in report.groups for s in g.sites for end in (s.producer, s.consumer) if end.op != "parameter"}
    for g in sorted(report.groups, key=lambda g: g.name):
        if g.name not in chosen:
            continue
        edits = []
        for site in g.sites:
            why = _unsupported(site) or _around_layers(site, modules)
            if why:
                skipped.append(Skipped(site=site.id, reason=why))
            elif (edit := _edit(site, wanted)) is not None:
                edits.append(edit)
        if edits:
            groups.append(Group(name=g.name, edits=tuple(edits)))
    model = {k: report.model[k] for k in ("architecture", "config_digest", "layers", "own_dtype") if k in report.model}
    return PatchSpec(
        simulated=report.simulated,
        target=report.target,
        regime=report.regime,
        versions=report.versions,
        compile=report.compile,
        model=model,
        sources=report.model.get("sources", {}),
        captures=dict(captures or {}),
        partial=report.uncompared,
        groups=tuple(groups),
        skipped=tuple(skipped),
    )


def _left_out(report: Report, chosen: set[str], wanted: set[int] | None) -> list[Skipped]:
    """What is left out though it is patchable: groups as `swiglu.*`, layers as `*`."""
    out = [Skipped.by_choice(LeftOut(group=g.name)) for g in report.groups if g.name not in chosen]
    if wanted is None:
        return out
    sites = [s for g in report.groups if g.name in chosen for s in g.sites]
    if others := tuple(sorted({n for s in sites for n in s.layers} - wanted)):
        out.append(Skipped.by_choice(LeftOut(layers=ranges(others))))
    if any(not s.layers for s in sites):
        out.append(Skipped.by_choice(LeftOut()))
    return out


def _edit(site: Site, wanted: set[int] | None) -> Edit | None:
    matched = len(site.producer_layers) == len(site.layers)
    producers_of: list[int | None] = list(site.producer_layers) if matched else [None] * len(site.layers)
    pairs = list(zip(site.layers, producers_of, strict=True))
    if wanted is not None:
        pairs = [(c, p) for c, p in pairs if c in wanted]
        if not pairs:
            return None
    layers = tuple(c for c, _ in pairs)
    producers = tuple(p for _, p in pairs if p is not None) if site.layers else site.producer_layers
    fmt = site.training[-1] if site.kind == "keep" else site.inference[-1]
    return Edit(
        kind=site.kind,
        format=fmt,
        producer=key_of(site.producer),
        consumer=key_of(site.consumer),
        operand=site.consumer.operand or 0,
        layers=ranges(layers),
        producer_layers=ranges(producers),
        site=site.id,
    )


def key_of(end: End) -> Key:
    """The spec's key of an end."""
    return Key(
        module=end.module, function=end.function, op=key_name(end.op), ordinal=end.ordinal, text=" ".join(end.text.split()), file=end.file
    )


def _unsupported(site: Site) -> str:
    if site.reaches and set(site.reaches) == {TAIL}:
        if key_name(site.producer.op) in {*MATMULS, "gemm"}:
            return "the engine's last GEMM gives logits that are not rounded: let the trainer compute its head in FP32, as the engine does"
        return "it lies behind the last GEMM: let the trainer take log-probabilities as the engine does, FP32 log_softmax of its logits"
    for end in (site.producer, site.consumer):
        if not end.function and end.op not in ("parameter", "table"):
            return f"the source of {end.op} in {end.module} is not known"
    return ""


def _around_layers(site: Site, modules: set[str]) -> str:
    """Why a site is not patched that a module computes which has other patched modules inside: its forward is not traced as a whole."""
    paths = {m.replace("*", "0") for m in modules}
    for end in (site.producer, site.consumer):
        unit = unit_of(end.module.replace("*", "0"))
        inside = any(p.startswith(f"{unit}.") and unit_of(p) != unit for p in paths) if unit else True
        if end.op not in ("parameter", "table") and inside:
            return f"{end.text or end.op} is computed in the forward of {unit or 'the model'}, around the layers, which is not rewritten"
    return ""
