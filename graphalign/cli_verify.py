"""`graphalign verify`: how far the trainer's log-probabilities are from the engine's, which group closes the gap, and what is left."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphalign import console
from graphalign.cli import EngineArgs, Layers, Model, Rules, Timeout, VllmPython, app
from graphalign.cli_patch import PROMPT, _build, _same_target
from graphalign.errors import BadInputError

if TYPE_CHECKING:
    from graphalign.capture.rollouts import Rollouts
    from graphalign.ir.inference import InferenceGraph
    from graphalign.patch.spec import PatchSpec

EMULATE = {"inductor_compile_config": {"emulate_precision_casts": True}}


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
    rules: Rules = None,
) -> None:
    """Measure the gap: vLLM generates, the trainer scores the same tokens, stock and patched group by group.

    Prompts: {"prompt": "text"}, {"messages": [{"role": "user", "content": "text"}]} or {"token_ids": [1, 2]} per line. What was
    measured is saved as it is done; the same command again goes on where it was.

    Examples:

      graphalign verify example:smollm2 --out out/verify

      graphalign verify ./my-model --patch patch.yaml --prompts mine.jsonl --max-tokens 512 --seeds 1 --out out/verify
    """
    from graphalign.capture.inference import has_weights
    from graphalign.engines.examples import resolve_model
    from graphalign.engines.prompts import read_prompts
    from graphalign.ir.files import write_bytes, write_json
    from graphalign.patch.spec import load
    from graphalign.render.gap_page import render_gap_page
    from graphalign.rules import rules_dir
    from graphalign.verify.gap.table import render_gap

    spec = load(patch_file) if patch_file else None
    if spec is not None and spec.simulated:
        raise BadInputError("the patch is for a simulated target: its engine cannot generate here", where=str(patch_file),
                            hint="verify it on a machine with that device, or make a patch for cpu")  # fmt: skip
    numbers, rules = _seeds(seeds), rules_dir(rules)
    arguments = console.parse_engine_args(engine_arg or ())
    function = _function(logprobs)
    console.require_folder(out)
    console.require_packages(*(() if vllm_python else ("vllm",)), "transformers")
    with console.Stages() as stages:
        stages.start("prompts")("find the model")
        folder = resolve_model(model)
        if not has_weights(folder):
            raise BadInputError("the model has no weights: both sides would draw their own", where=str(folder), hint="give a checkpoint")
        if spec is not None:
            _refuse_other_model(spec, folder, layers)
        asked = read_prompts(prompts or rules_dir(None) / "prompts" / "prompts.jsonl", folder, limit=limit)
        source = asked.source if prompts else f"{len(asked.ids)} built-in prompts"
        request = _Request(folder, out, asked.ids, numbers, samples, max_tokens, ignore_eos, vllm_python, arguments, layers, timeout, rules)
        stages.start("engine")
        inference, rollouts = request.run("engine", stages)
        if spec is not None:
            _same_target(spec, inference.header.target)
        notes = [asked.note] if asked.note else []
        report, page_data = _measure(
            stages, model, folder, out, spec, inference, rollouts, request, source, notes, function, attribution, resamples, emulate
        )
        stages.start("write")("verify.json, verify.html")
        write_json(out / "verify.json", report, indent=1)
        write_bytes(out / "verify.html", render_gap_page(report, *page_data).encode())
    render_gap(report, console.output())
    print(f"wrote {out / 'verify.json'} and {out / 'verify.html'}")


def _refuse_other_model(spec: PatchSpec, folder: Path, layers: int | None) -> None:
    """Refuse a patch of another model before an engine is started."""
    from graphalign.engines.trainer import load_config, quiet, truncate
    from graphalign.ir.config import config_digest

    with quiet():
        config = load_config(folder)
        truncate(config, layers)
    if (made := spec.model.get("config_digest")) and made != config_digest(config):
        text = config.get_text_config()
        theirs = f"{spec.model.get('architecture')}, {spec.model.get('layers')} layers"
        where = f"the patch: {theirs}; the model: {getattr(text, 'num_hidden_layers', '?')} layers"
        hint = "make a patch for this model with `graphalign find`"
        raise BadInputError("the patch is for a model with another config", where=where, hint=hint)


class _Request:
    """One engine run, and its files in the output folder."""

    def __init__(
        self, folder: Path, out: Path, prompts: Any, seeds: tuple[int, ...], samples: int, max_tokens: int, ignore_eos: bool,
        python: Path | None, arguments: dict[str, Any], layers: int | None, timeout: float, rules: Path,
    ) -> None:  # fmt: skip
        self.folder, self.out, self.prompts, self.seeds, self.samples = folder, out, prompts, seeds, samples
        self.max_tokens, self.ignore_eos, self.python, self.arguments = max_tokens, ignore_eos, python, arguments
        self.layers, self.timeout, self.rules = layers, timeout, rules

    def values(self, name: str) -> Path:
        return self.out / f"{name}.values"

    def run(self, name: str, stages: console.Stages, **extra: Any) -> tuple[InferenceGraph, Rollouts]:
        """Generate, or read what an earlier run of the same request generated."""
        from graphalign.capture.inference import ROLLOUT_SCRIPT, SCRIPT
        from graphalign.capture.rollouts import generate, read_rollouts
        from graphalign.errors import CaptureFileError, GapInputError
        from graphalign.evaluate.opaque import load_opaque_ops
        from graphalign.ir.files import read_json, write_bytes
        from graphalign.ir.inference import InferenceGraph
        from graphalign.verify.gap.store import digest, model_identity

        arguments = _merge(self.arguments, extra)
        gemms = sorted(op for op, rule in load_opaque_ops(self.rules).items() if rule.kind == "gemm")
        tokens = _replay_tokens(self.prompts)
        scripts = [SCRIPT.read_text(), ROLLOUT_SCRIPT.read_text()]
        key = digest(model_identity(self.folder), self.prompts, self.seeds, self.samples, self.max_tokens, self.ignore_eos,
                     str(self.python), arguments, self.layers, tokens, gemms, scripts)  # fmt: skip
        capture, file, mark = self.out / f"{name}.inference.json.gz", self.out / f"{name}.rollouts.json.gz", self.out / f"{name}.key"
        if mark.is_file() and mark.read_text() == key:
            try:
                found = read_json(capture, InferenceGraph, kind="inference capture"), read_rollouts(file)
                stages(f"reuse {file.name}", None)
                return found
            except (CaptureFileError, GapInputError):
                pass  # damaged since: run again
        mark.unlink(missing_ok=True)
        for left in self.out.glob("graphalign-*"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        found = generate(
            self.folder, capture, file, self.prompts, seeds=self.seeds, samples=self.samples, max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos, values={"tokens": tokens, "out": self.values(name), "gemms": gemms}, python=self.python,
            engine_args=arguments, layers=self.layers, timeout=self.timeout, progress=stages,
        )  # fmt: skip
        write_bytes(mark, key.encode())
        return found


def _measure(
    stages: console.Stages, model: str, folder: Path, out: Path, spec: Any, inference: InferenceGraph, rollouts: Rollouts,
    request: _Request, source: str, notes: list[str], function: Any, attribution: bool, resamples: int, emulate: bool,
) -> tuple[Any, Any]:  # fmt: skip
    from graphalign.align.align import prepare
    from graphalign.capture.training import record_forward
    from graphalign.engines.shared_kernels import SharedKernels, merged_parameters
    from graphalign.engines.trainer import build_trainer
    from graphalign.ir.files import write_json
    from graphalign.logprobs import DEFAULT, find_function
    from graphalign.patch.make import make_spec
    from graphalign.patch.spec import save
    from graphalign.sites.find import diff
    from graphalign.verify.gap.measure import Tokens
    from graphalign.verify.gap.report import GapReport
    from graphalign.verify.gap.run import measure_gap
    from graphalign.verify.gap.statistics import summarise
    from graphalign.verify.gap.store import Store, digest, model_identity
    from graphalign.verify.values import read_values

    stages.start("trainer")("build the model")
    trainer = _build(model, spec, request.layers) if spec is not None else build_trainer(folder, layers=request.layers)
    stages("capture the stock model", None)
    if function is None and spec is not None:
        function = find_function(spec.regime.get("logprobs", DEFAULT))
    training = record_forward(trainer, autocast=spec.regime.get("autocast") if spec is not None else None, logprobs=function or DEFAULT)
    if spec is None:
        stages("diff", None)
        found_sites = diff(inference, training, rules=request.rules)
        write_json(out / "sites.json", found_sites, indent=1)
        spec = make_spec(found_sites)
        save(spec, out / "patch.yaml")
    pair = prepare(inference, training, request.rules)
    tokens = Tokens(rollouts.prompts, rollouts.sequences)
    if tokens.empty:
        notes.append(f"{tokens.empty} of {len(rollouts.sequences)} responses are empty and left out")
    merged = merged_parameters(inference.parameters)
    skipped = ""
    shared = None
    if request.python is not None:
        skipped = "the engine ran in another environment"
    else:
        try:
            SharedKernels(trainer, merged, block_size=rollouts.block_size)
            shared = lambda m, kernels: SharedKernels(  # noqa: E731
                m, merged, gemm="gemm" in kernels, attention="attention" in kernels, block_size=rollouts.block_size
            )
        except Exception as e:
            skipped = str(e).splitlines()[0]
    store = Store(out / "variants", digest(model_identity(folder), [r.tokens for r in rollouts.sequences], rollouts.prompts, request.layers,
                                           str(function), spec.regime))  # fmt: skip
    stages.start("trainer")
    extra = {"logprobs": function} if function is not None else {}
    found = measure_gap(
        trainer, spec, pair, tokens, store, values=read_values(request.values("engine"), inference), shared=shared,
        attribution=attribution, resamples=resamples, progress=stages, **extra,
    )  # fmt: skip
    if store.reused:
        notes.append(f"{len(store.reused)} variants were taken from an earlier run of the same command")
    emulated = _emulated(stages, request, training, trainer, spec, function, resamples) if emulate else None
    stages.start("report")("collect")  # ends the trainer's job, so that its seconds count
    engine = tokens.engine
    report = GapReport(
        model=inference.header.model,
        versions=inference.header.versions | {f"trainer {k}": v for k, v in training.header.versions.items()},
        target=inference.header.target, regime=training.header.regime, prompts=source, notes=tuple(notes), seeds=rollouts.seeds,
        max_tokens=request.max_tokens, samples_per_prompt=request.samples, sequences=len(rollouts.sequences), tokens=rollouts.tokens,
        engine_gap=summarise(engine["sampled"], engine["prefill"], resamples=resamples, strata=tokens.seeds),
        floor=found.floor, variants=found.variants, attribution=found.attribution, residue=found.residue,
        shared_skipped=skipped, drift=found.drift,
        engine_tokens_per_second=rollouts.tokens_per_second, emulated=emulated, seconds=dict(stages.seconds),
    )  # fmt: skip
    return report, (tokens.engine, found.logprobs)


def _emulated(stages: console.Stages, request: _Request, training: Any, trainer: Any, spec: Any, function: Any, resamples: int) -> Any:
    """The other way round: patch the engine instead of the trainer."""
    from graphalign.sites.find import diff
    from graphalign.verify.gap.measure import Tokens, score_variant
    from graphalign.verify.gap.report import Emulated
    from graphalign.verify.gap.statistics import summarise
    from graphalign.verify.gap.variants import STOCK, Variant

    stages.start("engine that emulates casts")
    inference, rollouts = request.run("emulated", stages, compilation_config=EMULATE)
    stages("diff", None)
    sites = diff(inference, training, rules=request.rules)
    tokens = Tokens(rollouts.prompts, rollouts.sequences)
    extra = {"logprobs": function} if function is not None else {}
    stock = score_variant(trainer, Variant(STOCK, ""), tokens, autocast=spec.regime.get("autocast"),
                          progress=lambda f: stages("score with the stock trainer", f), **extra)  # fmt: skip
    return Emulated(
        sites=sites.sites, groups={g.name: sum(s.count for s in g.sites) for g in sites.groups},
        gap=summarise(tokens.engine["sampled"], stock, resamples=resamples, strata=tokens.seeds),
        prefill=summarise(tokens.engine["prefill"], stock, resamples=resamples, strata=tokens.seeds),
        tokens_per_second=rollouts.tokens_per_second,
    )  # fmt: skip


def _merge(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments with more of them, dictionaries merged."""
    out = dict(arguments)
    for key, value in extra.items():
        old = out.get(key)
        if old is not None and not isinstance(old, dict):
            raise BadInputError(f"--engine-arg {key} must be a JSON object to be combined with {value}", where="--engine-arg")
        out[key] = _merge(old or {}, value) if isinstance(value, dict) else value
    return out


def _replay_tokens(prompts: Any) -> list[int]:
    """As many tokens of the prompts, in order, as the replay's prompt has."""
    found = [t for p in prompts for t in p]
    while len(found) < len(PROMPT):
        found += found
    return found[: len(PROMPT)]


def _seeds(text: str) -> tuple[int, ...]:
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not parts or not all(p.isdecimal() for p in parts) or len(set(parts)) != len(parts):
        raise BadInputError(f"--seeds {text!r} is not a list of different numbers", where="--seeds", hint="for example --seeds 1,2,3")
    return tuple(int(p) for p in parts)


def _function(name: str | None) -> Any:
    """The trainer's log-probability function, or None for the built-in one."""
    if name is None:
        return None
    from graphalign.logprobs import find_function

    return find_function(name)
