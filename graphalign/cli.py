"""The command line: `graphalign find | capture | diff | why | show`; `cli_patch` adds `patch | apply | check | schema`.

Exit codes: 0 done, 1 a bug in graphalign, 2 bad input, 3 the two sides compute different functions, 4 capture failed,
130 interrupted. Results go to standard output, progress and errors to standard error.

Stages are imported inside the commands, so that `--help` is instant and a core installation needs no vLLM.
"""

from __future__ import annotations

import errno
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperGroup

from graphalign import console
from graphalign.errors import GraphalignError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from graphalign.ir.inference import InferenceGraph
    from graphalign.ir.training import TrainingGraph
    from graphalign.sites.report import Report

BUG, SEMANTIC, INTERRUPTED, TERMINATED = 1, 3, 130, 143


class Commands(TyperGroup):
    """Turns graphalign's errors into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GraphalignError as e:
            console.show_error(e)
            raise typer.Exit(e.exit_code) from None
        except KeyboardInterrupt:
            console.messages().print("interrupted", highlight=False)
            raise typer.Exit(INTERRUPTED) from None
        except ModuleNotFoundError as e:
            package = (e.name or "").partition(".")[0]
            if package not in console.EXTRAS:
                console.show_bug(e)
                raise typer.Exit(BUG) from None
            console.show_error(console.missing_extra(package))
            raise typer.Exit(2) from None
        except (typer.Exit, typer.Abort, typer.TyperException):
            raise
        except Exception as e:
            if isinstance(e, OSError) and e.errno == errno.EPIPE:
                raise
            console.show_bug(e)
            raise typer.Exit(BUG) from None


app = typer.Typer(
    cls=Commands,
    name="graphalign",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
capture = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(capture, name="capture", help="Record one side: what vLLM's compiled engine executes, or what the eager trainer executes.")

WeightsChoice = Literal["dummy", "real"]

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model folder, a hub id, or example:qwen2, example:qwen3, example:llama (random weights).")
]
Layers = Annotated[int | None, typer.Option(min=1, help="Use the first N decoder layers only.", metavar="N")]
Weights = Annotated[
    WeightsChoice | None,
    typer.Option(help="Random weights, or those of the checkpoint. Default: those of the checkpoint if it has any."),
]
VllmPython = Annotated[
    Path | None,
    typer.Option(metavar="PY", help="Interpreter of another environment, whose vLLM is captured: `/envs/vllm-0.31/bin/python`."),
]
EngineArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-arg",
        metavar="KEY=VALUE",
        help="Argument of vLLM's engine, may be repeated. VALUE is JSON where it parses, else a string.",
    ),
]
Target = Annotated[
    str, typer.Option(metavar="NAME", help="Where inference runs: cpu, or a GPU that need not be here; `graphalign targets` lists them.")
]
Entry = Annotated[Literal["llm", "server"], typer.Option(help="For a GPU target: the defaults of vLLM's LLM class, or of its server.")]
Timeout = Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Give up on an engine that takes longer, and end it.")]
Factory = Annotated[
    str | None, typer.Option(metavar="PKG.MODULE:FUNCTION", help="Capture the module that this function returns: your own trainer's model.")
]
Dtype = Annotated[Literal["bfloat16", "float32", "float16"], typer.Option(help="Regime: dtype of the trainer's parameters.")]
Autocast = Annotated[Literal["none", "bfloat16", "float16"], typer.Option(help="Regime: dtype of torch.autocast around the forward.")]
Attention = Annotated[
    Literal["sdpa", "eager", "flash_attention_2", "flex_attention"], typer.Option(help="Regime: attention implementation.")
]
LogProbs = Annotated[
    str,
    typer.Option(metavar="NAME", help="Regime: the trainer's log-probabilities: fp32, trl, or PKG.MODULE:FUNCTION of (logits, tokens)."),
]
Rules = Annotated[Path | None, typer.Option(metavar="DIR", help="Read rules from here instead of the ones that ship with graphalign.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print("graphalign", version("graphalign"))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Find where BF16 rounding happens in vLLM's compiled graph and not in the eager trainer, or the other way round.

    Start with [bold]graphalign find example:qwen3 --out out/qwen3[/], which needs no model and no GPU.

    Exit codes: 0 done, 1 a bug in graphalign, 2 bad input, 3 the two sides compute different functions, 4 capture failed,
    5 something moved since the baseline, 6 a patch is not proven, 130 interrupted, 143 terminated.
    """


@app.command()
def find(
    model: Model,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for inference.json.gz, training.json.gz, sites.json, patch.yaml and report.html.")
    ],
    layers: Layers = None,
    weights: Weights = None,
    target: Target = "cpu",
    entry: Entry = "llm",
    vllm_python: VllmPython = None,
    engine_arg: EngineArgs = None,
    timeout: Timeout = 1800.0,
    factory: Factory = None,
    dtype: Dtype = "bfloat16",
    autocast: Autocast = "none",
    attention: Attention = "sdpa",
    logprobs: LogProbs = "fp32",
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

      graphalign find ./my-model --out out/trl --dtype float32 --autocast bfloat16

      graphalign find ./my-model --out out/v31 --vllm-python /envs/vllm-0.31/bin/python --baseline patch.yaml
    """
    from graphalign.cli_clusters import Probe
    from graphalign.cli_drift import MOVED, end_find, read_baseline
    from graphalign.cli_render import write_report
    from graphalign.cli_targets import check_map
    from graphalign.ir.files import write_json
    from graphalign.patch.ranges import tokens_to_record
    from graphalign.rules import rules_dir

    arguments, factory, rules = console.parse_engine_args(engine_arg or ()), console.check_factory(factory), rules_dir(rules)
    console.require_folder(out)
    old = read_baseline(baseline)
    console.require_packages(*(() if vllm_python else ("vllm",)), "transformers")
    with console.Stages() as stages:
        kernels = out / "kernels" if target != "cpu" else None
        inference = _capture_inference(
            stages, model, out / "inference.json.gz", vllm_python, arguments, layers, weights, timeout, target, entry, kernels
        )
        tokens = tokens_to_record(inference)
        probe = Probe(model, weights, autocast, stages)
        training = _capture_training(stages, model, factory, layers, dtype, autocast, attention, weights, tokens, probe, logprobs)
        write_json(out / "training.json.gz", training)
        report = probe.rank(_diff(stages, inference, training, rules))
        if kernels is not None:
            report = check_map(report, stages, inference, kernels, rules, vllm_python)
        write_json(out / "sites.json", report, indent=1)
        _write_patch(report, out)
        if page:
            stages("report", None)
            write_report(report, out / "report.html")
    _show_report(report, out / "sites.json")
    s = stages.seconds
    captures = f"inference {s['inference']:.1f}, training {s['training']:.1f}"
    print(f"capture {s['inference'] + s['training']:.1f} s ({captures}), then {s['diff']:.1f} s")
    moved = end_find(report, rules, old, baseline)
    _finish(report)
    if moved:
        raise typer.Exit(MOVED)


@capture.command("inference")
def capture_inference_command(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The capture, `inf.json.gz`.")],
    layers: Layers = None,
    weights: Weights = None,
    target: Target = "cpu",
    entry: Entry = "llm",
    keep_kernels: Annotated[Path | None, typer.Option(metavar="DIR", help="Also keep the generated kernels' source here.")] = None,
    vllm_python: VllmPython = None,
    engine_arg: EngineArgs = None,
    timeout: Timeout = 1800.0,
) -> None:
    """Start vLLM and record what its compiled engine executes.

    Examples:

      graphalign capture inference example:qwen3 -o inf.json.gz

      graphalign capture inference ./my-model -o inf.json.gz --engine-arg 'compilation_config={"mode": 3}'

      graphalign capture inference example:qwen3 -o inf.json.gz --target h100 --keep-kernels kernels
    """
    arguments = console.parse_engine_args(engine_arg or ())
    console.require_output(output)
    console.require_packages(*(() if vllm_python else ("vllm",)))
    with console.Stages() as stages:
        graph = _capture_inference(stages, model, output, vllm_python, arguments, layers, weights, timeout, target, entry, keep_kernels)
    kernels = sum(len(g.kernels) for g in graph.graphs)
    print(f"{output}: {len(graph.graphs)} graph(s), {kernels} kernels, {len(graph.bodies)} different loop bodies")


@capture.command("training")
def capture_training_command(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The capture, `train.json.gz`.")],
    layers: Layers = None,
    weights: Weights = None,
    factory: Factory = None,
    dtype: Dtype = "bfloat16",
    autocast: Autocast = "none",
    attention: Attention = "sdpa",
    logprobs: LogProbs = "fp32",
    tokens: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Number of tokens: that of `compile_sizes` if the engine has exact sizes.")
    ] = None,
) -> None:
    """Run one eager forward of the trainer's model and record every kernel with its source.

    Examples:

      graphalign capture training example:qwen3 -o train.json.gz

      graphalign capture training ./my-model -o train.json.gz --factory mytrainer.model:build --dtype float32 --autocast bfloat16
    """
    from graphalign.ir.files import write_json

    factory = console.check_factory(factory)
    console.require_output(output)
    console.require_packages("transformers")
    with console.Stages() as stages:
        graph = _capture_training(stages, model, factory, layers, dtype, autocast, attention, weights, tokens, None, logprobs)
        write_json(output, graph)
    print(f"{output}: {len(graph.nodes)} ops from {len(graph.sources)} source expressions")


@app.command()
def diff(
    inference: Annotated[Path, typer.Argument(metavar="INF", help="A file from `capture inference`.")],
    training: Annotated[Path, typer.Argument(metavar="TRAIN", help="A file from `capture training`.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The result, `sites.json`.")],
    rules: Rules = None,
) -> None:
    """Align two captures and say where rounding moved. Needs neither vLLM nor Transformers.

    Example:

      graphalign diff inf.json.gz train.json.gz -o sites.json
    """
    from graphalign.ir.files import read_json, write_json
    from graphalign.ir.inference import InferenceGraph
    from graphalign.ir.training import TrainingGraph
    from graphalign.rules import rules_dir

    rules = rules_dir(rules)
    console.require_output(output)
    with console.Stages() as stages:
        stages.start("diff")("read the captures")
        sides = (
            read_json(inference, InferenceGraph, kind="inference capture"),
            read_json(training, TrainingGraph, kind="training capture"),
        )
        report = _diff(stages, *sides, rules)
        write_json(output, report, indent=1)
    _show_report(report, output)
    _finish(report)


@app.command()
def why(
    sites: Annotated[Path, typer.Argument(metavar="SITES", help="A sites file, from `find` or `diff`.")],
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node as sites.json names it.")],
) -> None:
    """Say why a node is or isn't aligned.

    Example:

      graphalign why out/qwen3/sites.json NODE
    """
    from graphalign.ir.files import read_json
    from graphalign.sites.report import Report
    from graphalign.sites.why import explain

    print(explain(read_json(sites, Report, kind="sites file"), node))


@app.command()
def show(file: Annotated[Path, typer.Argument(metavar="FILE", help="A capture or a sites file.")]) -> None:
    """Print a capture or a sites file as text.

    Example:

      graphalign show out/qwen3/inference.json.gz | less
    """
    from graphalign.show import render_file

    render_file(file, console.output())


def _capture_inference(
    stages: console.Stages,
    model: str,
    out: Path,
    python: Path | None,
    arguments: dict[str, Any],
    layers: int | None,
    weights: WeightsChoice | None,
    timeout: float,
    target: str = "cpu",
    entry: Literal["llm", "server"] = "llm",
    keep_kernels: Path | None = None,
) -> InferenceGraph:
    stages.start("inference")("find the model")
    from graphalign.capture.inference import capture_inference
    from graphalign.engines.examples import resolve_model

    folder = resolve_model(model)
    return capture_inference(
        folder, out, python=python, engine_args=arguments, layers=layers, weights=weights, timeout=timeout, progress=stages,
        target=target, entry=entry, keep_kernels=keep_kernels,
    )  # fmt: skip


def _capture_training(
    stages: console.Stages,
    model: str,
    factory: str | None,
    layers: int | None,
    dtype: str,
    autocast: str,
    attention: str,
    weights: WeightsChoice | None,
    tokens: int | None,
    then: Callable[[nn.Module], None] | None = None,
    logprobs: str = "fp32",
) -> TrainingGraph:
    stages.start("training")("find the model")
    from graphalign.capture.training import capture_training
    from graphalign.engines.examples import resolve_model

    return capture_training(
        resolve_model(model),
        factory=factory,
        layers=layers,
        dtype=dtype,
        autocast=None if autocast == "none" else autocast,
        attention=attention,
        weights="checkpoint" if weights == "real" else weights,
        progress=stages,
        then=then,
        logprobs=logprobs,
        **({} if tokens is None else {"tokens": tokens}),  # type: ignore[arg-type]
    )


def _diff(stages: console.Stages, inference: InferenceGraph, training: TrainingGraph, rules: Path) -> Report:
    if stages.job != "diff":
        stages.start("diff")
    from graphalign.sites.find import diff as find_sites

    return find_sites(inference, training, rules=rules, progress=stages)


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


def _show_report(report: Report, path: Path) -> None:
    from graphalign.sites.table import render_table

    out = console.output()
    render_table(report, out)
    out.print(f"wrote {escape(str(path))}; `graphalign why {escape(str(path))} NODE` explains a node", highlight=False, soft_wrap=True)


def _finish(report: Report) -> None:
    """Exit with 3 if the two sides compute different functions."""
    if report.semantic:
        places = f"{len(report.semantic)} place{'s' if len(report.semantic) > 1 else ''}"
        text = (
            f"[bold red]the two sides compute different functions[/] in {places}: no patch of roundings can make them agree; see `semantic`"
        )
        console.messages().print(text, highlight=False, soft_wrap=True)
        raise typer.Exit(SEMANTIC)


def main() -> NoReturn:
    """Entry point of the `graphalign` command."""
    import graphalign.cli_clusters
    import graphalign.cli_drift
    import graphalign.cli_patch
    import graphalign.cli_render
    import graphalign.cli_targets
    import graphalign.cli_verify  # noqa: F401  (these register their commands)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that `finally` blocks end the engine's processes
    app()
    raise AssertionError("unreachable: typer exits")


if __name__ == "__main__":
    from graphalign.cli import main as entry  # the module that the other command modules register on

    entry()
