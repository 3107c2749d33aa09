"""`graphalign.find`: capture both sides of a model, align them, and make the patch."""

from __future__ import annotations

import enum
import hashlib
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphalign import console

if TYPE_CHECKING:
    from graphalign.ir.inference import InferenceGraph
    from graphalign.ir.training import TrainingGraph
    from graphalign.patch.spec import PatchSpec
    from graphalign.sites.report import Report


class Outcome(enum.IntEnum):
    """What a comparison came to; the value is the exit code of the command."""

    DONE = 0
    """Both sides compute the same function, and all of it was compared."""
    SEMANTIC = 3
    """They compute different functions: no patch of roundings can make them agree. See `Report.semantic`."""
    PARTIAL = 7
    """A part of the model was not compared. See `Report.uncompared`."""

    @classmethod
    def of(cls, report: Report) -> Outcome:
        """A semantic divergence goes before a part that was not compared."""
        return cls.SEMANTIC if report.semantic else cls.PARTIAL if report.uncompared else cls.DONE


@dataclass(frozen=True)
class Result:
    """What `find` found."""

    inference: InferenceGraph
    """The capture of the engine."""
    training: TrainingGraph
    """The capture of the trainer."""
    report: Report
    """Sites in groups, and everything that is no site with its reason."""
    patch: PatchSpec | None
    """The patch of all groups; None where there is nothing to patch, or the two sides compute different functions."""
    rules: Path
    """The folder of rules that was used."""
    seconds: Mapping[str, float]
    """Wall-clock time by job: "inference", "training", "diff"."""

    @property
    def outcome(self) -> Outcome:
        """What it came to."""
        return Outcome.of(self.report)


def find(
    model: str,
    out: str | Path | None = None,
    *,
    layers: int | None = None,
    weights: Literal["dummy", "real"] | None = None,
    target: str = "cpu",
    tensor_parallel: int | None = None,
    entry: Literal["llm", "server"] = "llm",
    vllm_python: str | Path | None = None,
    engine_args: Mapping[str, Any] | None = None,
    timeout: float = 1800.0,
    trainer_python: str | Path | None = None,
    factory: str | None = None,
    dtype: str = "bfloat16",
    autocast: str = "none",
    attention: str = "sdpa",
    logprobs: str = "fp32",
    trust_remote_code: bool = False,
    rules: str | Path | None = None,
    page: bool = False,
    stages: console.Stages | None = None,
) -> Result:
    """Capture both sides of a model, align them, and say where rounding moved.

    Args:
        model: a folder, a hub id, or `example:NAME`.
        out: folder for inference.json.gz, training.json.gz, sites.json and patch.yaml, each written when it is there. None writes nothing.
        layers: use the first so many decoder layers only.
        weights: random ones, or those of the checkpoint; None for the checkpoint's if it has any.
        target: where inference runs: `cpu`, or a GPU that is simulated.
        tensor_parallel: for a GPU target, one rank of so many.
        entry: for a GPU target, whose defaults: vLLM's LLM class or its server.
        vllm_python: interpreter of another environment's vLLM.
        engine_args: arguments of vLLM's engine.
        timeout: seconds after which the engine is ended.
        trainer_python: interpreter of another environment's Transformers, in which the trainer is recorded.
        factory: `pkg.module:function` that returns your own trainer's module.
        dtype: of the trainer's parameters.
        autocast: dtype of torch.autocast around the trainer's forward, or "none".
        attention: the trainer's attention implementation.
        logprobs: the trainer's log-probabilities: "fp32", "trl" or `pkg.module:function` of (logits, tokens).
        trust_remote_code: run code that comes with the model, on both sides.
        rules: folder of rules; None for those that ship with graphalign.
        page: also write report.html, with diagrams, to `out`.
        stages: shows progress and warnings; None shows no progress, and warnings are Python's.

    Raises:
        BadInputError: a model, an option or a folder that cannot be used, or a package that is missing.
        CaptureFailedError: the engine or the trainer failed.
        AlignmentError: nothing could be aligned.
        KernelMismatchError: a simulated target's generated kernels do not round where the map says.
    """
    from graphalign.align.positions import reach_of
    from graphalign.dataflow.ranges import tokens_to_record
    from graphalign.ir.files import write_json
    from graphalign.pipeline.clustering import Probe
    from graphalign.pipeline.diff import diff
    from graphalign.pipeline.kernels import check_map
    from graphalign.pipeline.sides import Engine, Trainer, require_trainer
    from graphalign.render.files import write_report
    from graphalign.rules import rules_dir

    factory, folder_of_rules = console.check_factory(factory), rules_dir(rules)
    arguments = console.with_ranks(dict(engine_args or {}), tensor_parallel)
    if out is not None:
        console.require_folder(Path(out))
    console.require_packages(*(() if vllm_python else ("vllm",)), "transformers")
    elsewhere = Path(trainer_python) if trainer_python else None
    require_trainer(elsewhere)
    python, stages = Path(vllm_python) if vllm_python else None, stages or console.Silent()
    trainer = Trainer(model=model, factory=factory, layers=layers, dtype=dtype, autocast=autocast, attention=attention, weights=weights,
                      logprobs=logprobs, trust=trust_remote_code, python=elsewhere, target=target)  # fmt: skip
    with stages, nullcontext(str(out)) if out is not None else tempfile.TemporaryDirectory(prefix="graphalign-") as folder:
        place = Path(folder)
        kernels = place / "kernels" if target != "cpu" else None
        engine = Engine(model=model, python=python, engine_args=arguments, layers=layers, weights=weights, timeout=timeout, target=target,
                        entry=entry, keep_kernels=kernels, trust=trust_remote_code, trainer="" if factory else dtype)  # fmt: skip
        inference = engine.capture(place / "inference.json.gz", stages)
        probe = Probe(model, weights, autocast, stages, trust_remote_code)
        training = trainer.capture(
            stages, tokens=tokens_to_record(inference), reach=reach_of(inference, folder_of_rules), then=probe
        )  # fmt: skip
        write_json(place / "training.json.gz", training)
        if elsewhere is not None:
            probe.note = "clustering was not measured: the trainer's model is in another environment; run `graphalign clusters` there"
        stages.start("diff")
        report = probe.rank(diff(inference, training, rules=folder_of_rules, progress=stages))
        if kernels is not None:
            report = check_map(report, stages, inference, kernels, folder_of_rules, python)
        write_json(place / "sites.json", report, indent=1)
        patch = _write_patch(report, place)
        if page and out is not None:
            stages("report", None)
            if not_drawn := write_report(report, place / "report.html"):
                stages.warn(not_drawn)
    return Result(inference, training, report, patch, folder_of_rules, dict(stages.seconds))


def _write_patch(report: Report, out: Path) -> PatchSpec | None:
    """`patch.yaml` beside the sites; none where there is nothing to patch or the sides differ."""
    path = out / "patch.yaml"
    if report.semantic or not report.groups:
        path.unlink(missing_ok=True)  # an older patch must not look like this run's
        return None
    from graphalign.patch.make import make_spec
    from graphalign.patch.spec import save

    digests = {side: hashlib.sha256((out / f"{side}.json.gz").read_bytes()).hexdigest() for side in ("inference", "training")}
    spec = make_spec(report, captures=digests)
    save(spec, path)
    return spec
