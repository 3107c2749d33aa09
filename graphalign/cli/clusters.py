"""`graphalign clusters`: how unevenly values fall between adjacent BF16 numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphalign import console
from graphalign.cli.app import Attention, Autocast, Dtype, Factory, Layers, Model, TrustRemoteCode, Weights, app


@app.command()
def clusters(
    model: Model,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for clusters.json and clusters.html.")],
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Text, one JSON object per line as for `gap`. Default: built-in prompts.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens per sequence; the prompts are joined and cut.")] = 128,
    sequences: Annotated[int, typer.Option(min=1, metavar="N", help="Most sequences. Four or more give intervals.")] = 16,
    sites: Annotated[
        Path | None, typer.Option(metavar="SITES", help="A sites file of this model: say which values are those of sites.")
    ] = None,
    layers: Layers = None,
    weights: Weights = None,
    factory: Factory = None,
    dtype: Dtype = "bfloat16",
    autocast: Autocast = "none",
    attention: Attention = "sdpa",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure where unrounded values fall between adjacent BF16 numbers, at every place where the trainer rounds.

    Where many values fall into similar spots, rounding errors have a direction and add up. The score is the root mean square of the first
    16 Fourier coefficients of the positions (0 to 1): 0 for a uniform distribution.

    Examples:

      graphalign clusters example:smollm2 --out out/clusters

      graphalign clusters ./my-model --out out/mine --prompts mine.jsonl --tokens 1024 --sites out/find/sites.json
    """
    from graphalign.clusters.report import with_sites
    from graphalign.engines.examples import resolve_model
    from graphalign.ir.files import read_json, write_bytes, write_json
    from graphalign.pipeline.clustering import build, check_same, check_weights, read_text
    from graphalign.pipeline.clustering import run as measure
    from graphalign.render.clusters_page import render_clusters_page
    from graphalign.render.clusters_table import render_clusters
    from graphalign.sites.report import Report

    factory = console.check_factory(factory)
    report = read_json(sites, Report, kind="sites file") if sites else None
    console.require_folder(out)
    console.require_packages("transformers")
    with console.Stages() as stages:
        stages.start("clusters")("find the model")
        folder = resolve_model(model)
        check_weights(model, folder, weights)
        text = read_text(prompts, folder, tokens, sequences, trust_remote_code)
        stages("build the model", None)
        module = build(folder, factory, layers, dtype, attention, weights, trust_remote_code)
        if report is not None:
            check_same(report, module)
        result = measure(module, text, autocast, weights == "dummy", stages)
        if report is not None:
            result = with_sites(result, report)
        write_json(out / "clusters.json", result, indent=1)
        write_bytes(out / "clusters.html", render_clusters_page(result).encode())
    render_clusters(result, console.output())
    print(f"wrote {out / 'clusters.json'} and {out / 'clusters.html'} after {result.seconds:.0f} s")
