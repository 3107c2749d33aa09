"""The command that writes a patch as source: `graphalign source`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from graphalign import console
from graphalign.cli.app import Layers, Rules, TrustRemoteCode, app
from graphalign.cli.patch import Spec

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
    from graphalign.pipeline.source import read_engine
    from graphalign.pipeline.source import write as run
    from graphalign.rules import rules_dir
    from graphalign.source.write import files, moved, write

    spec, rules = load(patch_file), rules_dir(rules)
    console.require_packages("transformers")
    if not check:
        console.require_output(output)
    engine = read_engine(spec, patch_file, inference)
    shown = run(
        spec, model, engine, layers=layers, allow_stale=allow_stale, trust_remote_code=trust_remote_code, rules=rules,
        stages=console.Stages(),
    )  # fmt: skip
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
