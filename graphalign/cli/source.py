"""The command that writes a patch as source: `graphalign source`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from graphalign import console
from graphalign.cli.app import Layers, Rules, TrustRemoteCode, app
from graphalign.cli.patch import Spec, _build
from graphalign.errors import BadInputError

if TYPE_CHECKING:
    from graphalign.ir.inference import InferenceGraph
    from graphalign.patch.spec import PatchSpec

MOVED = 5
"""Exit code of `--check` if a file is not what would be written now."""


@app.command()
def source(
    patch_file: Spec,
    model: Annotated[str, typer.Option(metavar="MODEL", help="Model folder, hub id or example:NAME.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The module, `modeling_x_aligned.py`; its diff beside it.")
    ],
    inference: Annotated[
        Path | None,
        typer.Option(metavar="INF", help="The engine's capture that the patch was made from. Default: the one beside the patch."),
    ] = None,
    style: Annotated[
        Literal["module", "override", "patchgen"],
        typer.Option(help="A whole module; only the changed functions, for a fork of one's own; a configuration of VeOmni's patchgen."),
    ] = "module",
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 5 if a file is not what would be written now.")] = False,
    layers: Layers = None,
    allow_stale: Annotated[bool, typer.Option("--allow-stale", help="Also for a model whose config is another one.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    rules: Rules = None,
) -> None:
    """Write a patch as source: the modeling file with its casts moved, and a diff to review. Needs nothing of graphalign at run time.

    A file is written only if it is verified: logits and all gradients bitwise those of `graphalign.apply`, in four shapes and with both
    kinds of checkpointing; no site left when it is captured again; and no change that could be left out unnoticed.

    Example:

      graphalign source out/qwen3/patch.yaml --model example:qwen3 -o modeling_qwen3_aligned.py
    """
    from graphalign.patch.spec import load
    from graphalign.rules import rules_dir

    spec, rules = load(patch_file), rules_dir(rules)
    console.require_packages("transformers")
    if not check:
        console.require_output(output)
    engine = _read_engine(spec, patch_file, inference)
    with console.Stages() as stages:
        from graphalign.align.positions import reach_of
        from graphalign.capture.training import record_forward
        from graphalign.dataflow.ranges import tokens_to_record
        from graphalign.logprobs import DEFAULT
        from graphalign.sites.find import diff
        from graphalign.source.verify import Reference, generate_verified
        from graphalign.source.write import files, moved, write

        stages.start("source")("build the model")
        trainer = _build(model, spec, layers, trust_remote_code)
        stages("run it with the patch applied", None)
        reference = Reference(trainer, spec, allow_stale=allow_stale)
        stages("write the source and verify it", None)
        size, reach = tokens_to_record(engine) or 8, reach_of(engine, rules)

        def again(m: Any) -> Any:
            recorded = record_forward(m, tokens=size, logprobs=spec.regime.get("logprobs", DEFAULT), reach=reach)
            return diff(engine, recorded, rules=rules)

        shown = generate_verified(reference, again)
        generated = shown.generated
    contents = files(generated, output, style)
    if check:
        if found := moved(contents):
            print("\n".join(found))
            raise typer.Exit(MOVED)
        print(f"{output}: as it would be written now, and verified")
        return
    write(contents)
    print(f"{output}: {spec.edges} edges in {generated.changed_lines} changed lines of {generated.stock.file}")
    print(f"  bitwise graphalign.apply, logits and all gradients: {'; '.join(shown.runs)}")
    print(f"  captured again: 0 sites; each of {shown.edits} casts left out alone was noticed")
    print(f"{output.with_suffix('.diff')}: the diff for review")


def _read_engine(spec: PatchSpec, patch_file: Path, inference: Path | None) -> InferenceGraph:
    """The engine's side, which the generated file is compared with once more."""
    from graphalign.ir.files import read_json
    from graphalign.ir.inference import InferenceGraph
    from graphalign.patch.spec import refuse_other_target

    path = inference or patch_file.with_name("inference.json.gz")
    if not path.exists():
        raise BadInputError(
            "there is no capture of the engine to compare the generated file with", where=str(path),
            hint="give the one that the patch was made from: --inference out/NAME/inference.json.gz",
        )  # fmt: skip
    graph = read_json(path, InferenceGraph, kind="inference capture")
    refuse_other_target(spec, graph.header.target)
    return graph
