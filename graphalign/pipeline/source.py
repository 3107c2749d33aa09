"""A patch written as source, verified before anybody sees it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphalign import console
from graphalign.errors import BadInputError

if TYPE_CHECKING:
    from graphalign.ir.inference import InferenceGraph
    from graphalign.patch.spec import PatchSpec
    from graphalign.source.verify import Verified


def write(
    spec: PatchSpec,
    model: str,
    engine: InferenceGraph,
    *,
    layers: int | None = None,
    allow_stale: bool = False,
    trust_remote_code: bool = False,
    rules: Path,
    stages: console.Stages | None = None,
) -> Verified:
    """Generate a patch's source and verify it; `graphalign.source.write` makes files of it.

    Args:
        spec: the patch.
        model: a folder, a hub id, or `example:NAME`.
        engine: the engine's capture that the patch was made from.
        layers: use the first so many decoder layers only.
        allow_stale: also for a model whose config is another one.
        trust_remote_code: run code that comes with the model.
        rules: folder of rules.
        stages: shows progress and warnings; None shows no progress, and warnings are Python's.

    Raises:
        PatchError: the patch does not fit the model, cannot be written as source, or what was written is not what `apply` does.
    """
    from graphalign.align.positions import reach_of
    from graphalign.capture.training import record_forward
    from graphalign.dataflow.ranges import tokens_to_record
    from graphalign.logprobs import DEFAULT
    from graphalign.pipeline.check import build
    from graphalign.sites.find import diff
    from graphalign.source.verify import Reference, generate_verified

    with stages or console.Silent() as say:
        say.start("source")("build the model")
        trainer = build(model, spec, layers, trust_remote_code)
        say("run it with the patch applied", None)
        reference = Reference(trainer, spec, allow_stale=allow_stale)
        say("write the source and verify it", None)
        size, reach = tokens_to_record(engine) or 8, reach_of(engine, rules)

        def again(m: Any) -> Any:
            recorded = record_forward(m, tokens=size, logprobs=spec.regime.get("logprobs", DEFAULT), reach=reach)
            return diff(engine, recorded, rules=rules)

        return generate_verified(reference, again)


def read_engine(spec: PatchSpec, patch_file: Path, inference: Path | None) -> InferenceGraph:
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
