"""A whole `gap` with a live engine: engine runs that can be taken up again, the measurement, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from graphalign.align.pair import Pair, prepare
from graphalign.align.positions import range_notes, reach_of
from graphalign.dataflow.opaque import load_opaque_ops
from graphalign.errors import BadInputError, CaptureFileError, GapInputError
from graphalign.gap.measure import Tokens, score_variant
from graphalign.gap.report import Emulated, GapReport
from graphalign.gap.run import measure_gap
from graphalign.gap.statistics import summarise
from graphalign.gap.store import LogProbs, Store, digest, model_identity
from graphalign.gap.variants import STOCK, Variant
from graphalign.ir.files import read_json, write_bytes, write_json
from graphalign.ir.inference import InferenceGraph
from graphalign.ir.training import TrainingGraph
from graphalign.logprobs import DEFAULT, LogProbabilities, find_function, name_of
from graphalign.patch.make import make_spec
from graphalign.patch.spec import PatchSpec, refuse_other_target, save
from graphalign.pictures.choose import draw
from graphalign.proof.values import read_values
from graphalign.sites.find import diff_pair

if TYPE_CHECKING:
    from torch import nn

    from graphalign.capture.rollouts import Rollouts

EMULATE = {"inductor_compile_config": {"emulate_precision_casts": True}}
"""Compilation config of an engine that rounds where its source does."""
REPLAY_TOKENS = 57
"""Length of the prompt whose anchor values are recorded."""


class Stages(Protocol):
    """Progress with named jobs, as `console.Stages` shows it."""

    seconds: dict[str, float]

    def start(self, job: str) -> Any: ...

    def __call__(self, stage: str, fraction: float | None = None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `gap` is asked to do."""

    folder: Path
    """The model's folder, with weights."""
    out: Path
    """Where results go, and everything that makes the run resumable."""
    prompts: tuple[tuple[int, ...], ...]
    source: str
    """Where the prompts come from, in words."""
    notes: tuple[str, ...]
    rules: Path
    spec: PatchSpec | None
    """The patch; None to make one."""
    function: LogProbabilities | None
    """The trainer's log-probabilities; None for the spec's."""
    seeds: tuple[int, ...]
    samples: int
    max_tokens: int
    ignore_eos: bool
    attribution: bool
    emulate: bool
    """Also run an engine that rounds where its source does."""
    resamples: int
    layers: int | None
    python: Path | None
    """Interpreter of the engine; None for this one."""
    engine_args: Mapping[str, Any]
    timeout: float
    trust: bool = False
    """Run code that comes with the model."""


@dataclass(frozen=True)
class Measured:
    """The report, and the log-probabilities behind its plots."""

    report: GapReport
    engine: dict[str, LogProbs]
    """"sampled" and "prefill", one array per sequence."""
    training: dict[str, LogProbs]
    """By variant."""


def run(settings: Settings, stages: Stages) -> Measured:
    """Generate, score and report; what an earlier run of the same settings left is used again.

    Raises:
        BadInputError: the patch is for another target.
        CaptureFailedError: the engine failed.
        PatchError: the patch does not fit the model.
        GapInputError: log-probabilities that cannot belong to these tokens.
    """
    stages.start("engine")
    inference, rollouts = run_engine(settings, "engine", stages)
    if settings.spec is not None:
        refuse_other_target(settings.spec, inference.header.target)
    trainer, training, function = _stock(settings, stages, reach_of(inference, settings.rules))
    pair = prepare(inference, training, settings.rules)
    spec = settings.spec or _make_patch(settings, pair, stages)
    notes, tokens = list(settings.notes), Tokens(rollouts.prompts, rollouts.sequences)
    notes += range_notes(training, pair.training, pair.arithmetic(0).positions, inference)
    if tokens.empty:
        notes.append(f"{tokens.empty} of {len(rollouts.sequences)} responses are empty and left out")
    shared, skipped = _shared_kernels(settings, trainer, inference, rollouts)
    identity = (model_identity(settings.folder), [r.tokens for r in rollouts.sequences], rollouts.prompts, settings.layers)
    store = Store(settings.out / "variants", digest(*identity, name_of(function), spec.regime))
    stages.start("trainer")
    found = measure_gap(
        trainer, spec, pair, tokens, store, values=read_values(settings.out / "engine.values", inference), shared=shared,
        logprobs=function, attribution=settings.attribution, resamples=settings.resamples, progress=stages,
    )  # fmt: skip
    if store.reused:
        notes.append(f"{len(store.reused)} variants were taken from an earlier run of the same command")
    emulated = _emulated(settings, training, trainer, spec, function, stages) if settings.emulate else None
    stages.start("report")("collect")  # ends the trainer's job, so that its seconds count
    engine = tokens.engine
    report = GapReport(
        model=inference.header.model,
        versions=inference.header.versions | {f"trainer {k}": v for k, v in training.header.versions.items()},
        target=inference.header.target, regime=training.header.regime, prompts=settings.source, notes=tuple(notes),
        seeds=rollouts.seeds, max_tokens=settings.max_tokens, samples_per_prompt=settings.samples,
        sequences=len(rollouts.sequences), tokens=rollouts.tokens,
        engine_gap=summarise(engine["sampled"], engine["prefill"], resamples=settings.resamples, strata=tokens.seeds),
        floor=found.floor, variants=found.variants, attribution=found.attribution, residue=found.residue,
        shared_skipped=skipped, drift=found.drift,
        engine_tokens_per_second=rollouts.tokens_per_second, emulated=emulated, seconds=dict(stages.seconds),
    )  # fmt: skip
    return Measured(report, engine, found.logprobs)


def run_engine(settings: Settings, name: str, stages: Stages, **extra: Any) -> tuple[InferenceGraph, Rollouts]:
    """Generate, or read what an earlier run of the same settings generated.

    Args:
        settings: the run's.
        name: of its files in the output folder.
        stages: progress.
        extra: more engine arguments.
    """
    from graphalign.capture.inference import ROLLOUT_SCRIPT, SCRIPT
    from graphalign.capture.rollouts import generate, read_rollouts

    out, trusting = settings.out, {"trust_remote_code": True} if settings.trust else {}
    arguments = merge(settings.engine_args, {**trusting, **extra})
    gemms = sorted(op for op, rule in load_opaque_ops(settings.rules).items() if rule.kind == "gemm")
    tokens = replay_tokens(settings.prompts)
    asked = (settings.seeds, settings.samples, settings.max_tokens, settings.ignore_eos)
    scripts = [SCRIPT.read_text(), ROLLOUT_SCRIPT.read_text()]
    key = digest(model_identity(settings.folder), settings.prompts, *asked, str(settings.python), arguments, settings.layers, tokens,
                 gemms, scripts)  # fmt: skip
    capture, file, mark = out / f"{name}.inference.json.gz", out / f"{name}.rollouts.json.gz", out / f"{name}.key"
    if mark.is_file() and mark.read_text() == key:
        try:
            found = read_json(capture, InferenceGraph, kind="inference capture"), read_rollouts(file)
            stages(f"reuse {file.name}", None)
            return found
        except (CaptureFileError, GapInputError):
            pass  # damaged since: run again
    mark.unlink(missing_ok=True)
    found = generate(
        settings.folder, capture, file, settings.prompts, seeds=settings.seeds, samples=settings.samples,
        max_tokens=settings.max_tokens, ignore_eos=settings.ignore_eos,
        values={"tokens": tokens, "out": out / f"{name}.values", "gemms": gemms}, python=settings.python,
        engine_args=arguments, layers=settings.layers, timeout=settings.timeout, progress=stages,
    )  # fmt: skip
    write_bytes(mark, key.encode())
    return found


def _stock(settings: Settings, stages: Stages, reach: int | None) -> tuple[nn.Module, TrainingGraph, LogProbabilities]:
    """The trainer, its capture over so many positions, and its log-probability function."""
    from graphalign.capture.training import record_forward
    from graphalign.engines.trainer import build_trainer

    regime = settings.spec.regime if settings.spec is not None else {}
    stages.start("trainer")("build the model")
    trainer = build_trainer(settings.folder, layers=settings.layers, dtype=str(regime.get("param_dtype") or "bfloat16"),
                            attention=str(regime.get("attention") or "sdpa"), trust_remote_code=settings.trust)  # fmt: skip
    stages("capture the stock model", None)
    function = settings.function or find_function(regime.get("logprobs", DEFAULT))
    return trainer, record_forward(trainer, autocast=regime.get("autocast"), logprobs=function, reach=reach), function


def _make_patch(settings: Settings, pair: Pair, stages: Stages) -> PatchSpec:
    """The patch of everything that `find` would find, written with its sites to the output folder."""
    stages("diff", None)
    sites = diff_pair(pair, settings.rules, draw=draw)
    write_json(settings.out / "sites.json", sites, indent=1)
    spec = make_spec(sites)
    save(spec, settings.out / "patch.yaml")
    return spec


def _shared_kernels(settings: Settings, trainer: nn.Module, inference: InferenceGraph, rollouts: Rollouts) -> tuple[Any, str]:
    """What makes the mode in which the trainer uses the engine's kernels, or None and why there is none."""
    from graphalign.engines.shared_kernels import SharedKernels, merged_parameters

    if settings.python is not None:
        return None, "the engine ran in another environment"
    merged, block = merged_parameters(inference.parameters), rollouts.block_size
    try:
        SharedKernels(trainer, merged, block_size=block)
    except Exception as e:  # whatever this build of vLLM lacks
        return None, str(e).splitlines()[0]
    return lambda m, kernels: SharedKernels(m, merged, gemm="gemm" in kernels, attention="attention" in kernels, block_size=block), ""


def _emulated(
    settings: Settings, training: TrainingGraph, trainer: nn.Module, spec: PatchSpec, function: LogProbabilities, stages: Stages
) -> Emulated:
    """The other way round: patch the engine instead of the trainer."""
    stages.start("engine that emulates casts")
    inference, rollouts = run_engine(settings, "emulated", stages, compilation_config=EMULATE)
    stages("diff", None)
    sites = diff_pair(prepare(inference, training, settings.rules), settings.rules)
    tokens = Tokens(rollouts.prompts, rollouts.sequences)
    stock = score_variant(
        trainer, Variant(STOCK, ""), tokens, logprobs=function, autocast=spec.regime.get("autocast"),
        progress=lambda f: stages("score with the stock trainer", f),
    )  # fmt: skip
    return Emulated(
        sites=sites.sites, groups={g.name: sum(s.count for s in g.sites) for g in sites.groups},
        gap=summarise(tokens.engine["sampled"], stock, resamples=settings.resamples, strata=tokens.seeds),
        prefill=summarise(tokens.engine["prefill"], stock, resamples=settings.resamples, strata=tokens.seeds),
        tokens_per_second=rollouts.tokens_per_second,
    )  # fmt: skip


def merge(arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments with more of them, dictionaries merged.

    Raises:
        BadInputError: a value that is to be merged is no dictionary.
    """
    out = dict(arguments)
    for key, value in extra.items():
        old = out.get(key)
        if old is not None and not isinstance(old, dict):
            raise BadInputError(f"--engine-arg {key} must be a JSON object to be combined with {value}", where="--engine-arg")
        out[key] = merge(old or {}, value) if isinstance(value, dict) else value
    return out


def replay_tokens(prompts: tuple[tuple[int, ...], ...]) -> list[int]:
    """The prompts' tokens in order, repeated up to the replay's length."""
    found = [t for p in prompts for t in p]
    while len(found) < REPLAY_TOKENS:
        found += found
    return found[:REPLAY_TOKENS]
