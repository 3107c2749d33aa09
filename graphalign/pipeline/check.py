"""Prove a patch on the real engine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphalign import console

if TYPE_CHECKING:
    from torch import nn

    from graphalign.ir.training import TrainingGraph
    from graphalign.patch.spec import PatchSpec
    from graphalign.proof.verdict import Proof

PROMPT = tuple((17 * i + 5) % 997 for i in range(57))
"""Token ids of the replay's prompt (taken modulo the vocabulary)."""

WEIGHTS_IN_MEMORY = 4
"""How often the weights lie in memory while a patch is proven: the trainer's, the engine's, and its packed GEMM operands."""
WHY_SIMULATED = "the target is simulated, so there are no values of its engine"


def check(
    model: str,
    patch: str | Path | PatchSpec,
    *,
    layers: int | None = None,
    vllm_python: str | Path | None = None,
    engine_args: Mapping[str, Any] | None = None,
    timeout: float = 1800.0,
    trust_remote_code: bool = False,
    rules: str | Path | None = None,
    logs: Path | None = None,
    stages: console.Stages | None = None,
) -> Proof:
    """Capture the patched model again, and replay its regions on the engine's real values.

    Args:
        model: a folder, a hub id, or `example:NAME`.
        patch: the spec to prove, or its file.
        layers: use the first so many decoder layers only.
        vllm_python: interpreter of another environment's vLLM.
        engine_args: arguments of vLLM's engine.
        timeout: seconds after which the engine is ended.
        trust_remote_code: run code that comes with the model.
        rules: folder of rules; None for those that ship with graphalign.
        logs: folder for a failed engine's log; None for the one that this process works in.
        stages: shows progress and warnings; None shows no progress, and warnings are Python's.

    Raises:
        BadInputError: a model or a patch that cannot be used, or a patch for another target.
        CaptureFailedError: the engine or the trainer failed.
        PatchError: the patch does not fit the model.
    """
    from graphalign.align.positions import reach_of
    from graphalign.capture.inference import capture_inference
    from graphalign.capture.training import record_forward
    from graphalign.dataflow.ranges import tokens_to_record
    from graphalign.engines.dtypes import words
    from graphalign.engines.examples import resolve_model
    from graphalign.engines.model_folder import has_weights
    from graphalign.engines.prompts import vocabulary_size
    from graphalign.logprobs import DEFAULT
    from graphalign.patch.spec import PatchSpec, load, refuse_other_target
    from graphalign.proof.prove import prove
    from graphalign.proof.values import read_values
    from graphalign.rules import rules_dir

    spec, folder_of_rules = patch if isinstance(patch, PatchSpec) else load(Path(patch)), rules_dir(rules)
    arguments = dict(engine_args or {})
    console.require_packages(*(() if vllm_python else ("vllm",)), "transformers")
    with stages or console.Silent() as say, tempfile.TemporaryDirectory(prefix="graphalign-") as work:
        say.start("inference")("find the model")
        folder, skipped = resolve_model(model), WHY_SIMULATED if spec.simulated else ""
        if said := words(folder, trainer=str(spec.regime.get("param_dtype") or "")):
            say.warn(said)
        if not skipped and not has_weights(folder):
            say("make random weights for both sides", None)
            skipped = share_weights(folder, Path(work) / folder.name, spec, layers, trust_remote_code)
            if not skipped:
                model, folder, layers = str(Path(work) / folder.name), Path(work) / folder.name, None
        real = not skipped
        recorded, key = Path(work) / "values", str(spec.target.get("key", "cpu"))
        vocabulary = vocabulary_size(folder)
        tokens = [t % vocabulary for t in PROMPT]
        inference = capture_inference(
            folder,
            Path(work) / "inference.json.gz",
            python=Path(vllm_python) if vllm_python else None,
            engine_args=arguments if key == "cpu" else {"tensor_parallel_size": spec.target.get("tp", 1), **arguments},
            layers=layers,
            timeout=timeout,
            progress=say,
            values={"tokens": tokens, "out": recorded} if real else None,
            target=key,
            entry=spec.target.get("entry", "llm"),
            logs=logs or Path(),  # the work folder goes with its content
            trust_remote_code=trust_remote_code,
        )
        refuse_other_target(spec, inference.header.target)
        size, reach = tokens_to_record(inference) or 8, reach_of(inference, folder_of_rules)
        say.start("check")("build the model")
        trainer = build(model, spec, layers, trust_remote_code)
        regime = spec.regime

        def capture(m: nn.Module) -> TrainingGraph:
            cast, device = regime.get("autocast"), regime.get("autocast_device")
            function = regime.get("logprobs", DEFAULT)
            return record_forward(m, autocast=cast, autocast_device=device, logprobs=function, tokens=size, reach=reach)

        return prove(
            trainer,
            spec,
            inference,
            capture,
            read_values(recorded, inference) if real else None,
            rules=folder_of_rules,
            skipped=skipped,
            progress=say,
        )


def build(model: str, spec: PatchSpec, layers: int | None, trust: bool = False, *, read_only: bool = False) -> nn.Module:
    """The trainer's model in the patch's regime, see `build_trainer`."""
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


def share_weights(folder: Path, out: Path, spec: PatchSpec, layers: int | None, trust: bool = False) -> str:
    """Write a checkpoint of random weights for a model that has none, so that both sides have the same; why not, if there is no room."""
    import shutil

    from graphalign.engines.trainer import build_trainer, quiet

    attention = str(spec.regime.get("attention") or "sdpa")
    trainer = build_trainer(folder, layers=layers, attention=attention, trust_remote_code=trust)
    size = sum(p.numel() * p.element_size() for p in trainer.parameters())
    memory = available_memory()
    disk = shutil.disk_usage(out.parent).free
    if WEIGHTS_IN_MEMORY * size > memory or size > disk:
        return (
            f"the model has no weights, and random ones of {size / 1e9:.1f} GB for both sides do not fit "
            f"({memory / 1e9:.1f} GB of memory, {disk / 1e9:.1f} GB of disk are free; use fewer --layers)"
        )
    with quiet():
        trainer.save_pretrained(out)  # type: ignore[operator]
    return ""


def available_memory() -> int:
    """Bytes that can be had without swapping, the page cache included where the system tells (Linux)."""
    import os

    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
