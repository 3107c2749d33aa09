"""The commands that start an engine or a trainer to look at them: `graphalign find`, `graphalign capture inference | training`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    app,
    capture,
    finish,
    show_report,
)


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
    from graphalign.cli.drift import MOVED, end_find, read_baseline
    from graphalign.pipeline.find import find as run

    arguments = console.parse_engine_args(engine_arg or ())
    old = read_baseline(baseline)
    stages = console.Stages()
    found = run(
        model, out, layers=layers, weights=weights, target=target, tensor_parallel=tensor_parallel, entry=entry, vllm_python=vllm_python,
        engine_args=arguments, timeout=timeout, factory=factory, dtype=dtype, autocast=autocast, attention=attention, logprobs=logprobs,
        trust_remote_code=trust_remote_code, rules=rules, page=page, stages=stages, trainer_python=trainer_python,
    )  # fmt: skip
    show_report(found.report, out / "sites.json")
    s = found.seconds
    captures = f"inference {s['inference']:.1f}, training {s['training']:.1f}"
    print(f"capture {s['inference'] + s['training']:.1f} s ({captures}), then {s['diff']:.1f} s")
    moved = end_find(found.report, found.rules, old, baseline)
    finish(found.report)
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
    from graphalign.pipeline.sides import Engine

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
    from graphalign.pipeline.sides import Trainer, require_trainer

    factory = console.check_factory(factory)
    console.require_output(output)
    console.require_packages("transformers")
    require_trainer(trainer_python)
    find_target(target)
    trainer = Trainer(model=model, factory=factory, layers=layers, dtype=dtype, autocast=autocast, attention=attention, weights=weights,
                      logprobs=logprobs, trust=trust_remote_code, python=trainer_python, target=target,
                      alone=True)  # fmt: skip
    with console.Stages() as stages:
        graph = trainer.capture(stages, tokens=tokens, reach=reach)
        write_json(output, graph)
    print(f"{output}: {len(graph.nodes)} ops from {len(graph.sources)} source expressions")
