"""`graphalign gap --dump FILE…`: the gap in what a trainer wrote, without a model; with one, stock and patched on the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from graphalign import console
from graphalign.cli.app import PARTIAL
from graphalign.errors import BadInputError

if TYPE_CHECKING:
    from graphalign.dumps.collect import Collection
    from graphalign.dumps.report import DumpReport
    from graphalign.dumps.rows import Array
    from graphalign.dumps.scoring import Result

REFUSED = 2


def measure_dump(
    files: list[Path], *, out: Path | None, format: str | None, adapter: Path | None, step: str | None, limit: int | None, anyway: bool,
    model: str | None, patch_file: Path | None, temperature: float, logprobs: str | None, layers: int | None, resamples: int,
) -> None:  # fmt: skip
    """What `gap --dump` does; the arguments are its options."""
    from graphalign.dumps.adapters import load_formats
    from graphalign.dumps.collect import collect
    from graphalign.dumps.files import expand
    from graphalign.dumps.measure import report as measure
    from graphalign.gap.variants import EVERYTHING, STOCK
    from graphalign.ir.files import write_bytes, write_json
    from graphalign.render.dump_page import render_dump_page
    from graphalign.render.dumps_table import render_dump

    paths = expand(files)
    if model is None and (patch_file is not None or logprobs is not None or layers is not None):
        raise BadInputError(
            "--patch, --logprobs and --layers are about a model", where="--model", hint="give the weights that sampled with --model"
        )
    formats = load_formats(adapter)
    if out is not None:
        console.require_folder(out)
    if model is not None:
        console.require_packages("transformers")
    with console.Stages() as stages:
        stages.start("dump")
        found = collect(paths, formats, wanted=format, step=step, limit=limit, progress=stages)
        stages("statistics", None)
        report = measure(found, resamples=resamples, anyway=anyway)
        lines = [("the dump's trainer", _differences(found))] if report.gap is not None else []
        if model is not None:
            stages.start("trainer")
            result = _score(
                found, report, model, patch_file, stages, logprobs=logprobs, layers=layers, anyway=anyway, temperature=temperature, out=out,
                resamples=resamples,
            )  # fmt: skip
            if result is not None:
                report = result.report
                shown = {s.name: s.title for s in report.scored if s.name in (STOCK, EVERYTHING)}
                lines += [(title, [q - p for q, p in zip(result.engine, result.training[n], strict=True)]) for n, title in shown.items()]
        stages.start("report")("write" if out is not None else "collect")  # ends the job before, so that its seconds count
        report = report.model_copy(update={"seconds": dict(stages.seconds)})
        if out is not None:
            write_json(out / "gap.json", report, indent=1)
            write_bytes(out / "gap.html", render_dump_page(report, lines).encode())
    render_dump(report, console.output())
    if out is not None:
        print(f"wrote {out / 'gap.json'} and {out / 'gap.html'}")
    _finish(report, found, anyway)


def _differences(found: Collection) -> list[Array]:
    return [k.inference - k.training for k in found.kept if k.training is not None]


def _score(
    found: Collection, report: DumpReport, model: str, patch_file: Path | None, stages: console.Stages, *, logprobs: str | None,
    layers: int | None, anyway: bool, **options: Any,
) -> Result | None:  # fmt: skip
    """Score the dump's tokens here; None if the engine's column is no good."""
    from graphalign.dumps.scoring import score_dump
    from graphalign.engines.examples import resolve_model
    from graphalign.engines.model_folder import has_weights
    from graphalign.engines.trainer import refuse_other_model
    from graphalign.logprobs import find_function
    from graphalign.patch.spec import load

    if not anyway and any(f.refuses and f.side == "inference" for f in report.findings):
        return None
    spec = load(patch_file) if patch_file is not None else None
    function = find_function(logprobs) if logprobs is not None else None
    folder = resolve_model(model)
    if not has_weights(folder):
        raise BadInputError("the model has no weights", where=str(folder), hint="give the checkpoint that sampled the dump's tokens")
    if spec is not None:
        refuse_other_model(spec, folder, layers)
    return score_dump(found, report, folder, spec=spec, function=function, layers=layers, anyway=anyway, progress=stages, **options)


def _finish(report: DumpReport, found: Collection, anyway: bool) -> None:
    """Exit with 2 if what was asked for could not be shown, with 7 if faulty rows were left out."""
    nothing = report.gap is None and not report.scored
    if not anyway and any(f.refuses for f in report.findings):
        what = "no gap is shown" if nothing else "not every gap is shown"
        console.messages().print(f"[bold red]{what}[/]: what was found says that it would be none; --anyway shows it", highlight=False)
        raise typer.Exit(REFUSED)
    if nothing:
        text = "the dump has the engine's log-probabilities only: --model MODEL scores the same tokens with the weights that sampled them"
        console.messages().print(text, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(REFUSED if report.engine_gap is None else 0)
    if found.left_out:
        text = f"[bold yellow]{found.left_out} faulty responses were left out[/]: the figures are of the others"
        console.messages().print(text, highlight=False, soft_wrap=True)
        raise typer.Exit(PARTIAL)
