"""`graphalign verify`: how far the trainer's log-probabilities are from the engine's, which group closes the gap, and what is left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphalign import console
from graphalign.cli.app import EngineArgs, Layers, Model, Rules, Timeout, TrustRemoteCode, VllmPython, app
from graphalign.errors import BadInputError

if TYPE_CHECKING:
    from graphalign.patch.spec import PatchSpec


@app.command()
def verify(
    model: Model,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for verify.json, verify.html and everything that makes the run resumable.")
    ],
    patch_file: Annotated[
        Path | None, typer.Option("--patch", metavar="PATCH", help="The patch. Default: found anew, written to DIR.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Prompts, one JSON object per line. Default: built-in ones.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Take the first N prompts only.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Most tokens per response.")] = 256,
    samples: Annotated[int, typer.Option("--samples-per-prompt", min=1, metavar="N", help="Responses per prompt and seed.")] = 1,
    seeds: Annotated[
        str, typer.Option(metavar="LIST", help="Sampling seeds; every prompt is answered once (or N times) for each.")
    ] = "1,2,3",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")] = False,
    attribution: Annotated[
        bool, typer.Option("--attribution/--no-attribution", help="Measure subsets of groups and their Shapley shares.")
    ] = True,
    emulate: Annotated[bool, typer.Option("--engine-emulate-casts", help="Also run an engine that rounds where the source does.")] = False,
    logprobs: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The trainer's own log-probabilities: fp32, trl, or PKG.MODULE:FUNCTION of (logits, tokens)."),
    ] = None,
    resamples: Annotated[int, typer.Option(min=100, metavar="N", help="Bootstrap resamples.")] = 2000,
    layers: Layers = None,
    vllm_python: VllmPython = None,
    engine_arg: EngineArgs = None,
    timeout: Timeout = 7200.0,
    trust_remote_code: TrustRemoteCode = False,
    rules: Rules = None,
) -> None:
    """Measure the gap: vLLM generates, the trainer scores the same tokens, stock and patched group by group.

    Prompts: {"prompt": "text"}, {"messages": [{"role": "user", "content": "text"}]} or {"token_ids": [1, 2]} per line. What was
    measured is saved as it is done; the same command again goes on where it was.

    Examples:

      graphalign verify example:smollm2 --out out/verify

      graphalign verify ./my-model --patch patch.yaml --prompts mine.jsonl --max-tokens 512 --seeds 1 --out out/verify
    """
    from graphalign.engines.dtypes import words
    from graphalign.engines.examples import resolve_model
    from graphalign.engines.model_folder import has_weights
    from graphalign.engines.prompts import read_prompts
    from graphalign.gap.session import Settings, run
    from graphalign.ir.files import write_bytes, write_json
    from graphalign.logprobs import find_function
    from graphalign.patch.spec import load
    from graphalign.render.gap_page import render_gap_page
    from graphalign.render.gap_table import render_gap
    from graphalign.rules import data_dir, rules_dir

    spec = load(patch_file) if patch_file else None
    if spec is not None and spec.simulated:
        raise BadInputError("the patch is for a simulated target: its engine cannot generate here", where=str(patch_file),
                            hint="verify it on a machine with that device, or make a patch for cpu")  # fmt: skip
    numbers, rules = _seeds(seeds), rules_dir(rules)
    arguments = console.parse_engine_args(engine_arg or ())
    function = find_function(logprobs) if logprobs is not None else None
    console.require_folder(out)
    console.require_packages(*(() if vllm_python else ("vllm",)), "transformers")
    with console.Stages() as stages:
        stages.start("prompts")("find the model")
        folder = resolve_model(model)
        if not has_weights(folder):
            raise BadInputError("the model has no weights: both sides would draw their own", where=str(folder), hint="give a checkpoint")
        if spec is not None:
            refuse_other_model(spec, folder, layers, trust_remote_code)
        regime = spec.regime if spec is not None else {}
        if said := words(folder, trainer=str(regime.get("param_dtype") or "bfloat16")):
            console.warn(said)
        built_in = data_dir("prompts") / "prompts.jsonl"
        asked = read_prompts(prompts or built_in, folder, limit=limit, trust_remote_code=trust_remote_code)
        settings = Settings(
            folder=folder,
            out=out,
            prompts=asked.ids,
            source=asked.source if prompts else f"{len(asked.ids)} built-in prompts",
            notes=tuple(note for note in (said, asked.note) if note),
            rules=rules,
            spec=spec,
            function=function,
            seeds=numbers,
            samples=samples,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            attribution=attribution,
            emulate=emulate,
            resamples=resamples,
            layers=layers,
            python=vllm_python,
            engine_args=arguments,
            timeout=timeout,
            trust=trust_remote_code,
        )
        measured = run(settings, stages)
        stages.start("write")("verify.json, verify.html")
        write_json(out / "verify.json", measured.report, indent=1)
        write_bytes(out / "verify.html", render_gap_page(measured.report, measured.engine, measured.training).encode())
    render_gap(measured.report, console.output())
    print(f"wrote {out / 'verify.json'} and {out / 'verify.html'}")


def refuse_other_model(spec: PatchSpec, folder: Path, layers: int | None, trust: bool = False) -> None:
    """Refuse a patch of another model before an engine is started."""
    from graphalign.engines.trainer import load_config, quiet, truncate
    from graphalign.ir.config import config_digest

    with quiet():
        config = load_config(folder, trust_remote_code=trust)
        truncate(config, layers)
    if (made := spec.model.get("config_digest")) and made != config_digest(config):
        text = config.get_text_config()
        theirs = f"{spec.model.get('architecture')}, {spec.model.get('layers')} layers"
        where = f"the patch: {theirs}; the model: {getattr(text, 'num_hidden_layers', '?')} layers"
        hint = "make a patch for this model with `graphalign find`"
        raise BadInputError("the patch is for a model with another config", where=where, hint=hint)


def _seeds(text: str) -> tuple[int, ...]:
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not parts or not all(p.isdecimal() for p in parts) or len(set(parts)) != len(parts):
        raise BadInputError(f"--seeds {text!r} is not a list of different numbers", where="--seeds", hint="for example --seeds 1,2,3")
    return tuple(int(p) for p in parts)
