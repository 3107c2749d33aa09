"""The command line: `graphalign diff | why | show`, and what all commands share; the others are in the modules beside it.

Exit codes: 0 done, 1 a bug in graphalign, 2 bad input, 3 the two sides compute different functions, 4 capture failed,
130 interrupted. Results go to standard output, progress and errors to standard error.

Stages are imported inside the commands, so that `--help` is instant and a core installation needs no vLLM.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from typer.core import TyperGroup

from graphalign import console
from graphalign.errors import GraphalignError

if TYPE_CHECKING:
    from graphalign.sites.report import Report

BUG, PARTIAL, INTERRUPTED, TERMINATED = 1, 7, 130, 143
ORDER = (
    "find", "capture", "diff", "why", "show", "render", "patch", "apply", "check", "source", "schema", "drift", "compare", "targets",
    "gap", "clusters", "rules",
)  # fmt: skip
"""Commands as `--help` lists them."""


class Commands(TyperGroup):
    """Turns graphalign's errors into one message and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

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
        finally:
            console.remove_empty_folders()


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
TrainerPython = Annotated[
    Path | None,
    typer.Option(
        metavar="PY",
        help="Interpreter of the trainer's environment, whose Transformers and torch are captured. It need not have graphalign.",
    ),
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
TensorParallel = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="For a GPU target: one rank of N, as --engine-arg tensor_parallel_size=N."),
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
Source = Annotated[
    Path | None,
    typer.Option(
        "--source",
        metavar="FILE",
        help="The patch as source, from `graphalign source`: the module or its diff. Default: the one beside SITES, if there is one.",
    ),
]
LogProbs = Annotated[
    str,
    typer.Option(metavar="NAME", help="Regime: the trainer's log-probabilities: fp32, trl, or PKG.MODULE:FUNCTION of (logits, tokens)."),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that comes with the model (auto_map in its config), on both sides.")
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
    5 something moved since the baseline, 6 a patch is not proven, 7 partial: part of the model was not compared, or of the
    differences a patch is proven for, 130 interrupted, 143 terminated.
    """


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
    from graphalign.pipeline.diff import diff as find_sites
    from graphalign.rules import rules_dir

    rules = rules_dir(rules)
    console.require_output(output)
    with console.Stages() as stages:
        stages.start("diff")("read the captures")
        sides = (
            read_json(inference, InferenceGraph, kind="inference capture"),
            read_json(training, TrainingGraph, kind="training capture"),
        )
        report = find_sites(*sides, rules=rules, progress=stages)
        write_json(output, report, indent=1)
    show_report(report, output)
    finish(report)


@app.command()
def why(
    sites: Annotated[Path, typer.Argument(metavar="SITES", help="A sites file, from `find` or `diff`.")],
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node as sites.json names it, or a site: rope.1.")],
    source: Source = None,
) -> None:
    """Say why a node is or isn't aligned, or what a site is and which lines of the patch as source serve it.

    Examples:

      graphalign why out/qwen3/sites.json NODE

      graphalign why out/qwen3/sites.json rope.1
    """
    from graphalign.ir.files import read_json
    from graphalign.render.patch_source import read_source, source_beside
    from graphalign.sites.report import Report
    from graphalign.sites.why import explain

    print(explain(read_json(sites, Report, kind="sites file"), node))
    patched = read_source(source) if source else source_beside(sites)
    for line in patched.lines(node) if patched else ():
        print(f"  in {patched.name if patched else ''}: {line}")


@app.command()
def show(file: Annotated[Path, typer.Argument(metavar="FILE", help="A capture, a sites file or a spec.")]) -> None:
    """Print a capture, a sites file or a spec as text.

    Example:

      graphalign show out/qwen3/inference.json.gz | less
    """
    from graphalign.render.capture_table import render_file

    render_file(file, console.output())


def show_report(report: Report, path: Path) -> None:
    from graphalign.render.sites_table import render_table

    out = console.output()
    render_table(report, out)
    out.print(f"wrote {escape(str(path))}; `graphalign why {escape(str(path))} NODE` explains a node", highlight=False, soft_wrap=True)


def finish(report: Report) -> None:
    """Exit with 3 if the two sides compute different functions, with 7 if a part of the model was not compared."""
    from graphalign.pipeline.find import Outcome

    outcome = Outcome.of(report)
    if outcome is Outcome.DONE:
        return
    if outcome is Outcome.SEMANTIC:
        places = f"{len(report.semantic)} place{'s' if len(report.semantic) > 1 else ''}"
        text = (
            f"[bold red]the two sides compute different functions[/] in {places}: no patch of roundings can make them agree; see `semantic`"
        )
    else:
        text = "[bold yellow]part of the model was not compared[/]: what was found is of the rest; see `uncompared` in the sites file"
    console.messages().print(text, highlight=False, soft_wrap=True)
    raise typer.Exit(outcome)
