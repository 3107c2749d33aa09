"""`graphalign gap MODEL | --dump FILE…`: the training–inference mismatch, with a live engine or in what a trainer wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphalign.cli.app import EngineArgs, Layers, Rules, Timeout, TrustRemoteCode, VllmPython, app
from graphalign.errors import BadInputError

DUMP_ONLY = {"format", "adapter", "step", "anyway", "model", "temperature"}
"""Options that say how to read a dump."""
ENGINE_ONLY = {
    "prompts", "max_tokens", "samples", "seeds", "ignore_eos", "attribution", "emulate", "vllm_python", "engine_arg", "timeout",
    "trust_remote_code", "rules",
}  # fmt: skip
"""Options that say how to run the engine and the trainer."""
WAYS = "graphalign gap MODEL --out DIR   measures with a live engine\ngraphalign gap --dump FILE…   measures what a trainer wrote"


@app.command("verify", hidden=True)
@app.command("gap")
def gap(
    ctx: typer.Context,
    subject: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL | FILE…", help="A model folder, a hub id or example:NAME; after --dump FILE, more files or folders."),
    ] = None,
    dump: Annotated[
        list[Path] | None, typer.Option("--dump", metavar="FILE", help="A dump of a trainer or of vLLM's server, or a folder of them.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for gap.json and gap.html, and what makes a run resumable. For a dump, tables may be all."
        ),
    ] = None,
    patch_file: Annotated[
        Path | None,
        typer.Option("--patch", metavar="PATCH", help="The patch. Default: found anew, written to DIR; for a dump, none."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Prompts, one JSON object per line. Default: built-in ones.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="The first N prompts, or responses of a dump, only.")
    ] = None,
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
    format: Annotated[str | None, typer.Option("--format", metavar="NAME", help="The dump's format, where it is not recognised.")] = None,
    adapter: Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="More formats, described as in docs/dumps.md.")] = None,
    step: Annotated[str | None, typer.Option(metavar="N", help="Rows of this training step only.")] = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="Show figures also where they are no numeric gap.")] = False,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Score the dump's tokens here with this model: the weights that sampled them.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.01, metavar="T", help="Divide the model's logits by this: the engine's log-probabilities are of it.")
    ] = 1.0,
) -> None:
    """Measure the gap: vLLM generates, the trainer scores the same tokens, stock and patched group by group. Or: read what a trainer wrote.

    With MODEL: prompts are {"prompt": "text"}, {"messages": [{"role": "user", "content": "text"}]} or {"token_ids": [1, 2]} per line.
    What was measured is saved as it is done; the same command again goes on where it was.

    With --dump: no model, no engine. Reads dumps of NeMo-RL, prime-rl, open-instruct, slime, miles and torchtitan, answers of vLLM's
    server, and rows of our own (docs/dumps.md). The format is recognised. What looks like a gap and is none is named instead: processed or
    rounded log-probabilities, shifted lists, padding.

    Examples:

      graphalign gap example:smollm2 --out out/gap

      graphalign gap ./my-model --patch patch.yaml --prompts mine.jsonl --max-tokens 512 --seeds 1 --out out/gap

      graphalign gap --dump logs/exp_001/train_data_step*.jsonl --out out/gap

      graphalign gap --dump rollouts/ --model ./my-model --patch patch.yaml --limit 64 --out out/gap
    """
    named = list(subject or ())
    if dump:
        _refuse(ctx, ENGINE_ONLY, "is about a live engine, and a dump has none")
        from graphalign.cli.gap_dump import measure_dump

        measure_dump(
            [*dump, *map(Path, named)], out=out, format=format, adapter=adapter, step=step, limit=limit, anyway=anyway, model=model,
            patch_file=patch_file, temperature=temperature, logprobs=logprobs, layers=layers, resamples=resamples,
        )  # fmt: skip
        return
    if not named:
        raise BadInputError("gap needs a model, or a dump", where="MODEL, --dump", hint=WAYS)
    _refuse(ctx, DUMP_ONLY, "is about a dump")
    if len(named) > 1 or Path(named[0]).is_file():
        raise BadInputError("gap takes one model; files go behind --dump", where=" ".join(named), hint=WAYS)
    if out is None:
        raise BadInputError("a run with a live engine needs a folder", where="--out", hint=f"graphalign gap {named[0]} --out DIR")
    from graphalign.cli.gap_engine import measure_engine

    measure_engine(
        named[0], out=out, patch_file=patch_file, prompts=prompts, limit=limit, max_tokens=max_tokens, samples=samples, seeds=seeds,
        ignore_eos=ignore_eos, attribution=attribution, emulate=emulate, logprobs=logprobs, resamples=resamples, layers=layers,
        vllm_python=vllm_python, engine_args=engine_arg or [], timeout=timeout, trust_remote_code=trust_remote_code, rules=rules,
        name="verify" if ctx.info_name == "verify" else "gap",  # who calls it by its old name reads its old files
    )  # fmt: skip


def _refuse(ctx: typer.Context, names: set[str], why: str) -> None:
    """Refuse options that would be ignored."""
    for p in ctx.command.params:
        source = ctx.get_parameter_source(p.name or "")
        if p.name in names and source is not None and source.name == "COMMANDLINE":
            raise BadInputError(f"{p.opts[0]} {why}", where=p.opts[0], hint=WAYS)
