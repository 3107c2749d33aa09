"""The commands that make, apply and prove patches: `graphalign patch | apply | check | schema`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graphalign import console
from graphalign.cli.app import PARTIAL, EngineArgs, Layers, Model, Rules, Timeout, TrustRemoteCode, VllmPython, app
from graphalign.errors import BadInputError

NOT_PROVEN = 6
"""Exit code of `check` if an edit of the patch is wrong, or was not shown to be right."""

Names = Annotated[str, typer.Option(metavar="GROUPS", help="Group names, separated by commas.")]
Spec = Annotated[Path, typer.Argument(metavar="PATCH", help="A spec, `patch.yaml`.")]


@app.command()
def patch(
    sites: Annotated[Path, typer.Argument(metavar="SITES", help="A sites file, from `find` or `diff`.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The spec, `patch.yaml`.")],
    only: Annotated[str, typer.Option(metavar="GROUPS", help="Take only these groups, `rope,swiglu`.")] = "",
    without: Annotated[str, typer.Option("--except", metavar="GROUPS", help="Leave these groups out.")] = "",
    layers: Annotated[str, typer.Option(metavar="RANGES", help="Only these layers, `0-11` or `0-3,8`.")] = "",
) -> None:
    """Make a patch spec from sites.

    Examples:

      graphalign patch out/qwen3/sites.json -o patch.yaml

      graphalign patch out/qwen3/sites.json -o rope.yaml --only rope
    """
    from graphalign.ir.files import read_json
    from graphalign.patch.make import make_spec
    from graphalign.patch.spec import parse_layers, save
    from graphalign.sites.report import Report

    try:
        parse_layers(layers)
    except ValueError as e:
        raise BadInputError(f"--layers {layers}: {e}", hint="give numbers and ranges, ascending: 0-11 or 0-3,8") from None
    console.require_output(output)
    report = read_json(sites, Report, kind="sites file")
    spec = make_spec(report, only=_split(only), without=_split(without), layers=layers)
    save(spec, output)
    print(f"{output}: {spec.edges} edges in {len(spec.groups)} groups ({', '.join(g.name for g in spec.groups) or 'none'})")
    for s in spec.skipped:
        print(f"  not patched: {s.site}: {s.reason}")


@app.command("apply")
def apply_command(
    spec: Spec,
    model: Annotated[str, typer.Option(metavar="MODEL", help="Model folder, hub id or example:NAME.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change (this command never writes a model).")] = False,
    layers: Layers = None,
    allow_stale: Annotated[
        bool, typer.Option("--allow-stale", help="Apply although modeling files differ; edits must still match.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Try a patch on a model: resolve every edit, run one forward with it, and say per module what changes.

    In a trainer the same is `graphalign.apply(model, "patch.yaml")`.

    Example:

      graphalign apply patch.yaml --model example:qwen3 --dry-run
    """
    from graphalign.patch.spec import load
    from graphalign.pipeline.check import build
    from graphalign.rewrite.describe import describe

    loaded = load(spec)
    console.require_packages("transformers")
    with console.Stages() as stages:
        stages.start("apply")("build the model")
        trainer = build(model, loaded, layers, trust_remote_code, read_only=True)
        stages("apply", None)
        import graphalign
        from graphalign.capture.training import record_forward

        with graphalign.apply(trainer, loaded, allow_stale=allow_stale):
            cast, device = loaded.regime.get("autocast"), loaded.regime.get("autocast_device")
            record_forward(trainer, autocast=cast, autocast_device=device)
    print("\n".join(describe(loaded)))
    print(
        f"{loaded.edges} edges, all resolved and executed in one forward"
        + ("" if dry_run else "; nothing was written: use graphalign.apply in your trainer")
    )


@app.command()
def check(
    model: Model,
    patch_file: Annotated[Path, typer.Option("--patch", metavar="PATCH", help="The spec to prove.")],
    layers: Layers = None,
    vllm_python: VllmPython = None,
    engine_arg: EngineArgs = None,
    timeout: Timeout = 1800.0,
    trust_remote_code: TrustRemoteCode = False,
    rules: Rules = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Also write the figures as JSON.")] = None,
) -> None:
    """Prove a patch: capture the patched model again, and replay its regions on the engine's real values.

    Exit code 0 if the whole model is proven; 7 if the patch's edits are, but other differences stay (a partial patch, what no
    patch can remove, what could not be compared); 6 if anything speaks against an edit, or nothing shows that it is right.

    Example:

      graphalign check example:qwen3 --patch out/qwen3/patch.yaml
    """
    from graphalign.ir.files import write_bytes
    from graphalign.pipeline.check import check as run
    from graphalign.render.proof_table import render_proof

    arguments = console.parse_engine_args(engine_arg or ())
    if output is not None:
        console.require_output(output)
    proof = run(
        model, patch_file, layers=layers, vllm_python=vllm_python, engine_args=arguments, timeout=timeout,
        trust_remote_code=trust_remote_code, rules=rules, logs=output.parent if output is not None else Path(), stages=console.Stages(),
    )  # fmt: skip
    render_proof(proof, console.output())
    if output is not None:
        figures = {
            "sites": {"stock": proof.stock.sites, "patched": proof.patched.sites},
            "edges": proof.edges,
            "verdict": proof.verdict,
            "problems": proof.problems,
            "assumed": sum(e.count for e in proof.patched.assumed),
            "unexercised": sum(e.count for e in proof.stock.unexercised),
            "unpatched": proof.unpatched,
            "left_out": proof.left_out,
            "not_replayed": proof.missing,
            "replay": {k: vars(v) for k, v in proof.summaries.items()},
        }
        write_bytes(output, json.dumps(figures, indent=1).encode())
    if proof.verdict != "proven":
        raise typer.Exit(NOT_PROVEN if proof.verdict == "not proven" else PARTIAL)


@app.command()
def schema(
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write it there instead of printing it.")] = None,
) -> None:
    """The JSON schema of patch specs, for editors and validators.

    Example:

      graphalign schema -o patch.schema.json
    """
    from graphalign.ir.files import write_bytes
    from graphalign.patch.spec import PatchSpec

    text = json.dumps(PatchSpec.model_json_schema(), indent=2)
    if output is None:
        print(text)
    else:
        console.require_output(output)
        write_bytes(output, text.encode() + b"\n")


def _split(names: str) -> list[str]:
    return [n.strip() for n in names.split(",") if n.strip()]
