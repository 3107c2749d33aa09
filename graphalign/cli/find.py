"""The commands that start an engine or a trainer to look at them: `graphalign find`, `graphalign capture inference | training`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from graphalign import console
from graphalign.cli.app import (
    Attention,
    Autocast,
    Dtype,
    EngineArgs,
    Entry,
    Factory,
    Layers,
    LogProbs,
    Model,
    Rules,
    Target,
    TensorParallel,
    Timeout,
    TrainerPython,
    TrustRemoteCode,
    VllmPython,
    Weights,
    WeightsChoice,
    app,
    capture,
    finish,
    run_diff,
    show_report,
)
from graphalign.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from graphalign.ir.inference import InferenceGraph
    from graphalign.ir.training import TrainingGraph
    from graphalign.sites.report import Report


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The inference side that a command asks for; fields are those of `capture_inference`."""

    model: str
    python: Path | None
    engine_args: dict[str, Any]
    layers: int | None
    weights: WeightsChoice | None
    timeout: float
    target: str
    entry: Literal["llm", "server"]
    keep_kernels: Path | None = None
    trust: bool = False
    trainer: str = ""
    """Dtype of the trainer's parameters; empty if it is not known, or there is no trainer."""

    def capture(self, out: Path, stages: console.Stages) -> InferenceGraph:
        """Start the engine, and write its capture to `out`."""
        stages.start("inference")("find the model")
        from graphalign.capture.inference import capture_inference
        from graphalign.engines.dtypes import words
        from graphalign.engines.examples import resolve_model
        from graphalign.engines.quantised import refuse_quantised

        folder = resolve_model(self.model)
        refuse_quantised(folder, self.engine_args)  # before it is said that both sides run in BF16
        if said := words(folder, trainer=self.trainer):
            console.warn(said)
        return capture_inference(
            folder,
            out,
            python=self.python,
            engine_args=self.engine_args,
            layers=self.layers,
            weights=self.weights,
            timeout=self.timeout,
            progress=stages,
            target=self.target,
            entry=self.entry,
            keep_kernels=self.keep_kernels,
            trust_remote_code=self.trust,
        )


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The training side that a command asks for; fields are those of `capture_training`."""

    model: str
    factory: str | None
    layers: int | None
    dtype: str
    autocast: str
    attention: str
    weights: WeightsChoice | None
    logprobs: str
    trust: bool = False
    python: Path | None = None
    target: str = "cpu"
    alone: bool = False
    """Whether no engine is started beside it, which says what the model's own dtype is."""

    def capture(
        self,
        stages: console.Stages,
        *,
        tokens: int | None = None,
        reach: int | None = None,
        then: Callable[[nn.Module], None] | None = None,
    ) -> TrainingGraph:
        """Record one forward of so many tokens, spread over `reach` positions; `then` is called with the model afterwards."""
        stages.start("training")("find the model")
        from graphalign.capture.training import capture_training
        from graphalign.engines.dtypes import words
        from graphalign.engines.examples import resolve_model

        folder = resolve_model(self.model)
        if self.alone and self.factory is None and (said := words(folder, engine=False, trainer=self.dtype)):
            console.warn(said)
        arguments: dict[str, Any] = {
            "factory": self.factory,
            "layers": self.layers,
            "dtype": self.dtype,
            "autocast": None if self.autocast == "none" else self.autocast,
            "autocast_device": None if self.target == "cpu" else "cuda",
            "attention": self.attention,
            "weights": "checkpoint" if self.weights == "real" else self.weights,
            "logprobs": self.logprobs,
            "reach": reach,
            "trust_remote_code": self.trust,
            **({} if tokens is None else {"tokens": tokens}),
        }
        if self.python is not None:
            from graphalign.capture.elsewhere import capture_training_with

            return capture_training_with(self.python, {"model": folder, **arguments}, progress=stages)
        return capture_training(folder, progress=stages, then=then, **arguments)


@app.command()
def find(
    model: Model,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for inference.json.gz, training.json.gz, sites.json, patch.yaml and report.html.")
    ],
    layers: Layers = None,
    weights: Weights = None,
    target: Target = "cpu",
    tensor_parallel: TensorParallel = None,
    entry: Entry = "llm",
    vllm_python: VllmPython = None,
    engine_arg: EngineArgs = None,
    timeout: Timeout = 1800.0,
    trainer_python: TrainerPython = None,
    factory: Factory = None,
    dtype: Dtype = "bfloat16",
    autocast: Autocast = "none",
    attention: Attention = "sdpa",
    logprobs: LogProbs = "fp32",
    trust_remote_code: TrustRemoteCode = False,
    rules: Rules = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="PATCH", help="An older patch.yaml of this model: say what moved since, and exit with 5 if anything did."),
    ] = None,
    page: Annotated[bool, typer.Option("--report/--no-report", help="Also write report.html, with diagrams.")] = True,
) -> None:
    """Capture both sides of a model, align them, and say where rounding moved.

    Examples:

      graphalign find example:qwen3 --out out/qwen3

      graphalign find ./my-model --out out/mine --layers 4 --engine-arg max_model_len=4096

      graphalign find example:qwen3-8b-base --out out/h100 --target h100

      graphalign find example:qwen3-8b-base --out out/tp2 --target h100 --tensor-parallel 2

      graphalign find ./my-model --out out/trl --dtype float32 --autocast bfloat16

      graphalign find ./my-model --out out/newer --trainer-python /envs/trainer/bin/python

      graphalign find ./my-model --out out/v31 --vllm-python /envs/vllm-0.31/bin/python --baseline patch.yaml
    """
    from graphalign.align.positions import reach_of
    from graphalign.cli.clusters import Probe
    from graphalign.cli.drift import MOVED, end_find, read_baseline
    from graphalign.cli.render import write_report
    from graphalign.cli.targets import check_map
    from graphalign.dataflow.ranges import tokens_to_record
    from graphalign.ir.files import write_json
    from graphalign.rules import rules_dir

    factory, rules = console.check_factory(factory), rules_dir(rules)
    arguments = console.with_ranks(console.parse_engine_args(engine_arg or ()), tensor_parallel)
    console.require_folder(out)
    old = read_baseline(baseline)
    console.require_packages(*(() if vllm_python else ("vllm",)), "transformers")
    _check_trainer(trainer_python)
    kernels = out / "kernels" if target != "cpu" else None
    engine = Engine(model=model, python=vllm_python, engine_args=arguments, layers=layers, weights=weights, timeout=timeout,
                    target=target, entry=entry, keep_kernels=kernels, trust=trust_remote_code,
                    trainer="" if factory else dtype)  # fmt: skip
    trainer = Trainer(model=model, factory=factory, layers=layers, dtype=dtype, autocast=autocast, attention=attention, weights=weights,
                      logprobs=logprobs, trust=trust_remote_code, python=trainer_python, target=target)  # fmt: skip
    with console.Stages() as stages:
        inference = engine.capture(out / "inference.json.gz", stages)
        probe = Probe(model, weights, autocast, stages, trust_remote_code)
        training = trainer.capture(stages, tokens=tokens_to_record(inference), reach=reach_of(inference, rules), then=probe)
        write_json(out / "training.json.gz", training)
        if trainer_python is not None:
            probe.note = "clustering was not measured: the trainer's model is in another environment; run `graphalign clusters` there"
        report = probe.rank(run_diff(stages, inference, training, rules))
        if kernels is not None:
            report = check_map(report, stages, inference, kernels, rules, vllm_python)
        write_json(out / "sites.json", report, indent=1)
        _write_patch(report, out)
        if page:
            stages("report", None)
            if not_drawn := write_report(report, out / "report.html"):
                console.warn(not_drawn)
    show_report(report, out / "sites.json")
    s = stages.seconds
    captures = f"inference {s['inference']:.1f}, training {s['training']:.1f}"
    print(f"capture {s['inference'] + s['training']:.1f} s ({captures}), then {s['diff']:.1f} s")
    moved = end_find(report, rules, old, baseline)
    finish(report)
    if moved:
        raise typer.Exit(MOVED)


@capture.command("inference")
def capture_inference_command(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The capture, `inf.json.gz`.")],
    layers: Layers = None,
    weights: Weights = None,
    target: Target = "cpu",
    tensor_parallel: TensorParallel = None,
    entry: Entry = "llm",
    keep_kernels: Annotated[Path | None, typer.Option(metavar="DIR", help="Also keep the generated kernels' source here.")] = None,
    vllm_python: VllmPython = None,
    engine_arg: EngineArgs = None,
    timeout: Timeout = 1800.0,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Start vLLM and record what its compiled engine executes.

    Examples:

      graphalign capture inference example:qwen3 -o inf.json.gz

      graphalign capture inference ./my-model -o inf.json.gz --engine-arg 'compilation_config={"mode": 3}'

      graphalign capture inference example:qwen3 -o inf.json.gz --target h100 --keep-kernels kernels
    """
    arguments = console.with_ranks(console.parse_engine_args(engine_arg or ()), tensor_parallel)
    console.require_output(output)
    console.require_packages(*(() if vllm_python else ("vllm",)))
    engine = Engine(model=model, python=vllm_python, engine_args=arguments, layers=layers, weights=weights, timeout=timeout,
                    target=target, entry=entry, keep_kernels=keep_kernels, trust=trust_remote_code)  # fmt: skip
    with console.Stages() as stages:
        graph = engine.capture(output, stages)
    kernels = sum(len(g.kernels) for g in graph.graphs)
    print(f"{output}: {len(graph.graphs)} graph(s), {kernels} kernels, {len(graph.bodies)} different loop bodies")


@capture.command("training")
def capture_training_command(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The capture, `train.json.gz`.")],
    layers: Layers = None,
    weights: Weights = None,
    target: Target = "cpu",
    trainer_python: TrainerPython = None,
    factory: Factory = None,
    dtype: Dtype = "bfloat16",
    autocast: Autocast = "none",
    attention: Attention = "sdpa",
    logprobs: LogProbs = "fp32",
    tokens: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Number of tokens: that of `compile_sizes` if the engine has exact sizes.")
    ] = None,
    reach: Annotated[
        int | None,
        typer.Option("--max-model-len", min=2, metavar="N", help="The engine's: tokens are spread over so many positions."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Run one eager forward of the trainer's model and record every kernel with its source.

    With a GPU as --target, --autocast does what it does there: CUDA computes other ops in FP32 than a CPU.

    Examples:

      graphalign capture training example:qwen3 -o train.json.gz

      graphalign capture training ./my-model -o train.json.gz --factory mytrainer.model:build --dtype float32 --autocast bfloat16
    """
    from graphalign.engines.gpu.targets import find_target
    from graphalign.ir.files import write_json

    factory = console.check_factory(factory)
    console.require_output(output)
    console.require_packages("transformers")
    _check_trainer(trainer_python)
    find_target(target)
    trainer = Trainer(model=model, factory=factory, layers=layers, dtype=dtype, autocast=autocast, attention=attention, weights=weights,
                      logprobs=logprobs, trust=trust_remote_code, python=trainer_python, target=target,
                      alone=True)  # fmt: skip
    with console.Stages() as stages:
        graph = trainer.capture(stages, tokens=tokens, reach=reach)
        write_json(output, graph)
    print(f"{output}: {len(graph.nodes)} ops from {len(graph.sources)} source expressions")


def _check_trainer(python: Path | None) -> None:
    """Refuse what is no interpreter before the engine starts."""
    if python is not None:
        from graphalign.capture.inference import interpreter

        try:
            interpreter(python)
        except BadInputError as e:
            hint = "give the bin/python of an environment with torch and Transformers"
            raise BadInputError(e.what, where=f"--trainer-python {e.where}", hint=hint) from None


def _write_patch(report: Report, out: Path) -> None:
    """`patch.yaml` beside the sites; none where there is nothing to patch or the sides differ."""
    path = out / "patch.yaml"
    if report.semantic or not report.groups:
        path.unlink(missing_ok=True)  # an older patch must not look like this run's
        return
    import hashlib

    from graphalign.patch.make import make_spec
    from graphalign.patch.spec import save

    digests = {side: hashlib.sha256((out / f"{side}.json.gz").read_bytes()).hexdigest() for side in ("inference", "training")}
    save(make_spec(report, captures=digests), path)
