"""How unevenly the trainer's values fall between BF16 numbers: the text, the model, and the short probe that `find` makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
            text = read_text(None, folder, FIND_TOKENS, 1, self.trust)
            self.result = run(module, text, self.autocast, False, self.progress)
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


class Text:
    def __init__(self, model: str, sequences: Sequence[tuple[int, ...]], source: str, note: str) -> None:
        self.model, self.sequences, self.source, self.note = model, sequences, source, note


def read_text(file: Path | None, folder: Path, tokens: int, most: int, trust: bool) -> Text:
    from graphalign.engines.text import read_sequences
    from graphalign.rules import data_dir

    built_in = data_dir("prompts") / "prompts.jsonl"
    sequences, prompts = read_sequences(file or built_in, folder, tokens=tokens, most=most, trust_remote_code=trust)
    return Text(folder.name, sequences, prompts.source, prompts.note)


def build(folder: Path, factory: str | None, layers: int | None, dtype: str, attention: str, weights: str | None, trust: bool) -> nn.Module:
    from graphalign.capture.training import call_factory
    from graphalign.engines.trainer import build_trainer

    if factory is not None:
        return call_factory(factory, folder)
    return build_trainer(folder, layers, dtype, attention, "dummy" if weights == "dummy" else None, trust_remote_code=trust)


def run(module: nn.Module, text: Text, autocast: str, dummy: bool, progress: Progress) -> Clusters:
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
