"""The commands that make, apply and prove patches: `graphalign patch | apply | check | schema`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphalign import console
from graphalign.cli.app import PARTIAL, EngineArgs, Layers, Model, Rules, Timeout, TrustRemoteCode, VllmPython, app
from graphalign.errors import BadInputError

if TYPE_CHECKING:
    from torch import nn

    from graphalign.ir.training import TrainingGraph
    from graphalign.patch.spec import PatchSpec

NOT_PROVEN = 6
"""Exit code of `check` if an edit of the patch is wrong, or was not shown to be right."""
PROMPT = tuple((17 * i + 5) % 997 for i in range(57))
"""Token ids of the replay's prompt (taken modulo the vocabulary)."""

WEIGHTS_IN_MEMORY = 4
"""How often the weights lie in memory while a patch is proven: the trainer's, the engine's, and its packed GEMM operands."""
WHY_SIMULATED = "the target is simulated, so there are no values of its engine"

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
    from graphalign.rewrite.describe import describe

    loaded = load(spec)
    console.require_packages("transformers")
    with console.Stages() as stages:
        stages.start("apply")("build the model")
        trainer = _build(model, loaded, layers, trust_remote_code, read_only=True)
        stages("apply", None)
        import graphalign
        from graphalign.capture.training import record_forward

        with graphalign.apply(trainer, loaded, allow_stale=allow_stale):
            record_forward(trainer, autocast=loaded.regime.get("autocast"))
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
    from graphalign.align.positions import reach_of
    from graphalign.capture.inference import capture_inference
    from graphalign.capture.training import record_forward
    from graphalign.dataflow.ranges import tokens_to_record
    from graphalign.engines.dtypes import words
    from graphalign.engines.examples import resolve_model
    from graphalign.engines.model_folder import has_weights
    from graphalign.engines.prompts import vocabulary_size
    from graphalign.ir.files import write_bytes
    from graphalign.logprobs import DEFAULT
    from graphalign.patch.spec import load, refuse_other_target
    from graphalign.proof.prove import prove
    from graphalign.proof.values import read_values
    from graphalign.render.proof_table import render_proof
    from graphalign.rules import rules_dir

    spec, rules = load(patch_file), rules_dir(rules)
    arguments = console.parse_engine_args(engine_arg or ())
    console.require_packages(*(() if vllm_python else ("vllm",)), "transformers")
    if output is not None:
        console.require_output(output)
    with console.Stages() as stages, tempfile.TemporaryDirectory(prefix="graphalign-") as work:
        stages.start("inference")("find the model")
        folder, skipped = resolve_model(model), WHY_SIMULATED if spec.simulated else ""
        if said := words(folder, trainer=str(spec.regime.get("param_dtype") or "")):
            console.warn(said)
        if not skipped and not has_weights(folder):
            stages("make random weights for both sides", None)
            skipped = _share_weights(folder, Path(work) / folder.name, spec, layers, trust_remote_code)
            if not skipped:
                model, folder, layers = str(Path(work) / folder.name), Path(work) / folder.name, None
        real = not skipped
        recorded, key = Path(work) / "values", str(spec.target.get("key", "cpu"))
        vocabulary = vocabulary_size(folder)
        tokens = [t % vocabulary for t in PROMPT]
        inference = capture_inference(
            folder,
            Path(work) / "inference.json.gz",
            python=vllm_python,
            engine_args=arguments if key == "cpu" else {"tensor_parallel_size": spec.target.get("tp", 1), **arguments},
            layers=layers,
            timeout=timeout,
            progress=stages,
            values={"tokens": tokens, "out": recorded} if real else None,
            target=key,
            entry=spec.target.get("entry", "llm"),
            logs=output.parent if output is not None else Path(),  # the work folder goes with its content
            trust_remote_code=trust_remote_code,
        )
        refuse_other_target(spec, inference.header.target)
        size, reach = tokens_to_record(inference) or 8, reach_of(inference, rules)
        stages.start("check")("build the model")
        trainer = _build(model, spec, layers, trust_remote_code)
        regime = spec.regime

        def capture(m: nn.Module) -> TrainingGraph:
            cast, device = regime.get("autocast"), regime.get("autocast_device")
            function = regime.get("logprobs", DEFAULT)
            return record_forward(m, autocast=cast, autocast_device=device, logprobs=function, tokens=size, reach=reach)

        proof = prove(
            trainer,
            spec,
            inference,
            capture,
            read_values(recorded, inference) if real else None,
            rules=rules,
            skipped=skipped,
            progress=stages,
        )
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


def _build(model: str, spec: PatchSpec, layers: int | None, trust: bool = False, *, read_only: bool = False) -> Any:
    from graphalign.engines.examples import resolve_model
    from graphalign.engines.trainer import build_trainer

    regime = spec.regime
    return build_trainer(
        resolve_model(model),
        layers=layers,
        dtype=str(regime.get("param_dtype") or "bfloat16"),
        attention=str(regime.get("attention") or "sdpa"),
        trust_remote_code=trust,
        read_only=read_only,
    )


def _share_weights(folder: Path, out: Path, spec: PatchSpec, layers: int | None, trust: bool = False) -> str:
    """Write a checkpoint of random weights for a model that has none, so that both sides have the same; why not, if there is no room."""
    import shutil

    from graphalign.engines.trainer import build_trainer, quiet

    attention = str(spec.regime.get("attention") or "sdpa")
    trainer = build_trainer(folder, layers=layers, attention=attention, trust_remote_code=trust)
    size = sum(p.numel() * p.element_size() for p in trainer.parameters())
    memory = _available_memory()
    disk = shutil.disk_usage(out.parent).free
    if WEIGHTS_IN_MEMORY * size > memory or size > disk:
        return (
            f"the model has no weights, and random ones of {size / 1e9:.1f} GB for both sides do not fit "
            f"({memory / 1e9:.1f} GB of memory, {disk / 1e9:.1f} GB of disk are free; use fewer --layers)"
        )
    with quiet():
        trainer.save_pretrained(out)  # type: ignore[operator]
    return ""


def _available_memory() -> int:
    """Bytes that can be had without swapping, the page cache included where the system tells (Linux)."""
    import os

    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _split(names: str) -> list[str]:
    return [n.strip() for n in names.split(",") if n.strip()]
