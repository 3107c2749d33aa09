"""The commands for after a version bump: `graphalign drift` and `graphalign rules check`, and the end of `find`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graphalign import console
from graphalign.cli.app import Rules, app

if TYPE_CHECKING:
    from graphalign.drift.compare import Drift
    from graphalign.patch.spec import PatchSpec
    from graphalign.sites.report import Report

MOVED = 5
"""Exit code if something moved."""

Format = Annotated[Literal["text", "markdown", "json"], typer.Option(help="markdown is fit for a pull-request comment.")]

rules_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(rules_app, name="rules", help="The data that ships with graphalign: opaque ops, group names, expected sites.")


@app.command("drift")
def drift_command(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A spec, a sites file or a capture: from before.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The same kind of file: from after. With an old spec, a sites file will do.")],
    format: Format = "text",
    rules: Rules = None,
) -> None:
    """Say what moved between two specs, two sites files or two captures, and whether the old patch still holds.

    Exits with 0 if nothing moved, 5 if something did, 2 if the two cannot be compared.

    Examples:

      graphalign drift old/patch.yaml new/patch.yaml

      graphalign drift old/sites.json new/sites.json --format markdown

      graphalign drift old/inference.json.gz new/inference.json.gz
    """
    from graphalign.dataflow.opaque import load_opaque_ops
    from graphalign.drift.compare import drift
    from graphalign.drift.snapshot import read
    from graphalign.rules import rules_dir

    folder = rules_dir(rules)
    inside = {name: rule.inside for name, rule in load_opaque_ops(folder).items()}
    result = drift(read(old, folder), read(new, folder), inside)
    _print(result, format)
    if result.moved:
        raise typer.Exit(MOVED)


def _print(result: Drift, format: str) -> None:
    from graphalign.drift import words

    if format == "json":
        print(result.model_dump_json(indent=1))
    else:
        print(words.markdown(result) if format == "markdown" else words.text(result), end="")


def read_baseline(path: Path | None) -> PatchSpec | None:
    """The spec behind `find --baseline`, read before the captures are made."""
    from graphalign.patch.spec import load

    return None if path is None else load(path)


def end_find(report: Report, rules: Path, baseline: PatchSpec | None, path: Path | None) -> bool:
    """What `find` says last: the counts against the expected ones, and the drift against an old spec.

    Returns:
        Whether something moved.
    """
    from graphalign.sites.expected import verdict

    print(verdict(report, rules))
    if baseline is None:
        return False
    from graphalign.drift.compare import drift
    from graphalign.drift.snapshot import of_report, of_spec

    result = drift(of_spec(baseline, str(path)), of_report(report, "this run"))
    print()
    _print(result, "text")
    return result.moved


@rules_app.command("check")
def check_command(
    rules: Rules = None,
    captures: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Folder of recorded captures, may be repeated. Default: those of the checkout's tests."),
    ] = None,
) -> None:
    """Run all rules on their test vectors and on recorded captures; a rule that matches nothing is an error.

    Examples:

      graphalign rules check

      graphalign rules check --rules my_rules --captures my_captures
    """
    from graphalign.rules import rules_dir
    from graphalign.rules_check import check_rules, recorded_folders

    folder = rules_dir(rules)
    with console.Stages() as stages:
        stages.start("rules")
        result = check_rules(folder, captures or recorded_folders(), progress=stages)
    print("\n".join(result.lines()))
    if result.problems:
        raise typer.Exit(2)
