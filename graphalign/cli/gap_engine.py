"""`graphalign gap MODEL`: how far the trainer's log-probabilities are from the engine's, which group closes the gap, and what is left."""

from __future__ import annotations

from pathlib import Path

from graphalign import console
from graphalign.errors import BadInputError


def measure_engine(
    model: str, *, out: Path, patch_file: Path | None, prompts: Path | None, limit: int | None, max_tokens: int, samples: int, seeds: str,
    ignore_eos: bool, attribution: bool, emulate: bool, logprobs: str | None, resamples: int, layers: int | None, vllm_python: Path | None,
    engine_args: list[str], timeout: float, trust_remote_code: bool, rules: Path | None, name: str,
) -> None:  # fmt: skip
    """What `gap MODEL` does; the arguments are its options, `name` that of the files with the result."""
    from graphalign.engines.dtypes import words
    from graphalign.engines.examples import resolve_model
    from graphalign.engines.model_folder import has_weights
    from graphalign.engines.prompts import read_prompts
    from graphalign.engines.trainer import refuse_other_model
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
                            hint="measure it on a machine with that device, or make a patch for cpu")  # fmt: skip
    numbers, rules = _seeds(seeds), rules_dir(rules)
    arguments = console.parse_engine_args(engine_args)
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
        stages.start("write")(f"{name}.json, {name}.html")
        write_json(out / f"{name}.json", measured.report, indent=1)
        write_bytes(out / f"{name}.html", render_gap_page(measured.report, measured.engine, measured.training).encode())
    render_gap(measured.report, console.output())
    print(f"wrote {out / f'{name}.json'} and {out / f'{name}.html'}")


def _seeds(text: str) -> tuple[int, ...]:
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not parts or not all(p.isdecimal() for p in parts) or len(set(parts)) != len(parts):
        raise BadInputError(f"--seeds {text!r} is not a list of different numbers", where="--seeds", hint="for example --seeds 1,2,3")
    return tuple(int(p) for p in parts)
