"""`graphalign clusters`: how unevenly values fall between adjacent BF16 numbers, and the score that `find` ranks its sites by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphalign import console
from graphalign.cli.app import Attention, Autocast, Dtype, Factory, Layers, Model, TrustRemoteCode, Weights, app
from graphalign.errors import BadInputError, GraphalignError

if TYPE_CHECKING:
    from torch import nn

    from graphalign.clusters.report import Clusters
    from graphalign.clusters.unrounded import Unrounded
    from graphalign.ir.training import TrainingGraph
    from graphalign.sites.report import Report

Progress = Callable[[str, float | None], None]
FIND_TOKENS = 64
"""Length of the one sequence that `find` runs."""


@app.command()
def clusters(
    model: Model,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for clusters.json and clusters.html.")],
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Text, one JSON object per line as for `gap`. Default: built-in prompts.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens per sequence; the prompts are joined and cut.")] = 128,
    sequences: Annotated[int, typer.Option(min=1, metavar="N", help="Most sequences. Four or more give intervals.")] = 16,
    sites: Annotated[
        Path | None, typer.Option(metavar="SITES", help="A sites file of this model: say which values are those of sites.")
    ] = None,
    layers: Layers = None,
    weights: Weights = None,
    factory: Factory = None,
    dtype: Dtype = "bfloat16",
    autocast: Autocast = "none",
    attention: Attention = "sdpa",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure where unrounded values fall between adjacent BF16 numbers, at every place where the trainer rounds.

    Where many values fall into similar spots, rounding errors have a direction and add up. The score is the root mean square of the first
    16 Fourier coefficients of the positions (0 to 1): 0 for a uniform distribution.

    Examples:

      graphalign clusters example:smollm2 --out out/clusters

      graphalign clusters ./my-model --out out/mine --prompts mine.jsonl --tokens 1024 --sites out/find/sites.json
    """
    from graphalign.clusters.report import with_sites
    from graphalign.engines.examples import resolve_model
    from graphalign.ir.files import read_json, write_bytes, write_json
    from graphalign.render.clusters_page import render_clusters_page
    from graphalign.render.clusters_table import render_clusters
    from graphalign.sites.report import Report

    factory = console.check_factory(factory)
    report = read_json(sites, Report, kind="sites file") if sites else None
    console.require_folder(out)
    console.require_packages("transformers")
    with console.Stages() as stages:
        stages.start("clusters")("find the model")
        folder = resolve_model(model)
        check_weights(model, folder, weights)
        text = _text(prompts, folder, tokens, sequences, trust_remote_code)
        stages("build the model", None)
        module = _build(folder, factory, layers, dtype, attention, weights, trust_remote_code)
        if report is not None:
            check_same(report, module)
        result = _measure(module, text, autocast, weights == "dummy", stages)
        if report is not None:
            result = with_sites(result, report)
        write_json(out / "clusters.json", result, indent=1)
        write_bytes(out / "clusters.html", render_clusters_page(result).encode())
    render_clusters(result, console.output())
    print(f"wrote {out / 'clusters.json'} and {out / 'clusters.html'} after {result.seconds:.0f} s")


def check_weights(model: str, folder: Path, weights: str | None) -> None:
    """Refuse a model whose weights are random, unless that is what was asked for.

    Raises:
        BadInputError: no weights, or made-up ones.
    """
    if weights == "dummy" or has_real_weights(model, folder):
        return
    what = f"{folder.name} has no weights" if not model.startswith("example:") else f"the weights of {model} are random"
    raise BadInputError(
        f"{what}: where their values fall says nothing about a trained model",
        where=model,
        hint="give a checkpoint, or example:smollm2; --weights dummy measures random weights all the same",
    )


def has_real_weights(model: str, folder: Path) -> bool:
    """Whether a model's folder holds weights that were trained."""
    from graphalign.engines.examples import is_random
    from graphalign.engines.model_folder import has_weights

    return has_weights(folder) and not is_random(model)


class Probe:
    """Scores the sites of `find` on one short prompt, with the model that the training capture built.

    Args:
        model: as the user named it.
        weights: the option of this name.
        autocast: the option of this name.
        progress: called with (stage, fraction).
        trust: run code that comes with the model.
    """

    def __init__(self, model: str, weights: str | None, autocast: str, progress: Progress, trust: bool = False) -> None:
        self.trust = trust
        self.model, self.weights, self.autocast, self.progress = model, weights, autocast, progress
        self.result: Clusters | None = None
        self.note = ""

    def __call__(self, module: nn.Module) -> None:
        """Run the module on the prompt. A model that cannot be measured does not end `find`: a note says why."""
        from graphalign.engines.examples import resolve_model

        try:
            folder = resolve_model(self.model)
            if self.weights == "dummy" or not has_real_weights(self.model, folder):
                return
            text = _text(None, folder, FIND_TOKENS, 1, self.trust)
            self.result = _measure(module, text, self.autocast, False, self.progress)
            self.note = f"clustering is measured on {self.result.sequences[0]} tokens of {text.source}; `graphalign clusters` measures more"
        except GraphalignError as e:
            self.note = f"clustering was not measured: {e.what}"

    def rank(self, report: Report) -> Report:
        """The report with scores, and each group's sites in their order; as it is where nothing was measured."""
        ranked = report
        if self.result is not None:
            from graphalign.clusters.report import rank_sites

            ranked = rank_sites(report, self.result)
        return ranked.model_copy(update={"notes": (*ranked.notes, self.note)}) if self.note else ranked


class _Text:
    def __init__(self, model: str, sequences: Sequence[tuple[int, ...]], source: str, note: str) -> None:
        self.model, self.sequences, self.source, self.note = model, sequences, source, note


def _text(file: Path | None, folder: Path, tokens: int, most: int, trust: bool) -> _Text:
    from graphalign.engines.text import read_sequences
    from graphalign.rules import data_dir

    built_in = data_dir("prompts") / "prompts.jsonl"
    sequences, prompts = read_sequences(file or built_in, folder, tokens=tokens, most=most, trust_remote_code=trust)
    return _Text(folder.name, sequences, prompts.source, prompts.note)


def _build(
    folder: Path, factory: str | None, layers: int | None, dtype: str, attention: str, weights: str | None, trust: bool
) -> nn.Module:
    from graphalign.capture.training import call_factory
    from graphalign.engines.trainer import build_trainer

    if factory is not None:
        return call_factory(factory, folder)
    return build_trainer(folder, layers, dtype, attention, "dummy" if weights == "dummy" else None, trust_remote_code=trust)


def _measure(module: nn.Module, text: _Text, autocast: str, dummy: bool, progress: Progress) -> Clusters:
    from graphalign.capture.training import record_forward
    from graphalign.clusters.measure import measure

    def forward(ids: Sequence[int], watch: Unrounded) -> TrainingGraph:
        return record_forward(module, ids=ids, autocast=None if autocast == "none" else autocast, watch=watch, name=text.model)

    notes = [text.note] if text.note else []
    if dummy:
        notes.append("the weights are random: these scores say nothing about a trained model")
    return measure(forward, text.sequences, prompts=text.source, weights="dummy" if dummy else "real", notes=notes, progress=progress)


def check_same(report: Report, module: nn.Module) -> None:
    """Refuse a sites file of another model.

    Raises:
        BadInputError: its config is not this model's.
    """
    from graphalign.ir.config import config_digest

    there, here = report.model.get("config_digest"), config_digest(getattr(module, "config", None))
    if there != here:
        raise BadInputError(
            "the sites file is of another model",
            where=f"config {there} ({report.model.get('architecture')}) there, {here} ({type(module).__name__}) here",
            hint="give the sites.json that `find` wrote for this model, with the same --layers",
        )
