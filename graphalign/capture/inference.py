"""Captures the inference side: starts an engine in its own process and reads what it wrote."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Literal

from graphalign.engines.dtypes import refuse_other_dtype
from graphalign.engines.gpu.targets import CPU, find_target
from graphalign.engines.model_folder import own_dtype, read_config, require_trust, use_weights
from graphalign.engines.quantised import refuse_quantised
from graphalign.errors import BadInputError, CaptureFailedError, CaptureFileError
from graphalign.ir.files import read_json, write_bytes
from graphalign.ir.inference import InferenceGraph

SCRIPT = Path(__file__).with_name("engine_script.py")
ROLLOUT_SCRIPT = SCRIPT.with_name("rollout_script.py")
"""Captures, and then generates on the engine that was captured."""
GPU_SCRIPT = Path(__file__).parents[1] / "engines" / "gpu" / "script.py"
"""Stands in for the engine on a GPU that isn't here."""
ENGINE_LOG = "graphalign-engine.log"
"""The engine's log, kept if it failed."""
MOST_CAUSES = 3
_PREFIX = re.compile(r"^(?:\((?:\w|[ =:])+\)\s*)?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*)?")
"""What vLLM puts before a line: the process, the level, time and place."""
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Refused)\b: .")
LOG_LINES = 12
"""Log lines shown when the engine fails."""

Progress = Callable[[str, float], None]
"""Called with a stage (`start`, `probe`, `load`, `compile`, `write`) and the share done, 0 to 1."""


def capture_inference(
    model_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    python: str | os.PathLike[str] | None = None,
    engine_args: Mapping[str, Any] | None = None,
    layers: int | None = None,
    weights: Literal["real", "dummy"] | None = None,
    timeout: float = 1800,
    progress: Progress | None = None,
    keep_kernels: str | os.PathLike[str] | None = None,
    values: Mapping[str, Any] | None = None,
    rollouts: Mapping[str, Any] | None = None,
    target: str = CPU,
    entry: Literal["llm", "server"] = "llm",
    logs: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
) -> InferenceGraph:
    """Start vLLM on a model, write what it compiled to `out`, and return it.

    Args:
        model_dir: directory with a config.json, and weights unless `weights` is "dummy".
        out: file to write; compressed if its name ends in .gz.
        python: interpreter of an environment that has vLLM; this one if None.
        engine_args: extra arguments of `vllm.LLM`.
        layers: capture only that many layers.
        weights: "real" loads the checkpoint, "dummy" random numbers; None is "real" if there are weight files.
        timeout: seconds after which the engine is ended.
        progress: see `Progress`.
        keep_kernels: directory for the generated source code.
        values: {"tokens": token ids, "out": path}: also score these tokens and write there what every anchor read and wrote; with
            "gemms", the names of ops to run again on fewer rows.
        rollouts: what `capture.rollouts.generate` asks for: also generate on the engine that was captured.
        target: "cpu", or the name of a GPU (`engines.gpu.targets`) that vLLM lowers the model for without having it.
        entry: for a GPU, whose defaults apply: those of the `LLM` class or of the server.
        logs: folder in which the engine's log is kept if it fails; that of `out` if None.
        trust_remote_code: let the engine run code that lies in `model_dir`.

    Raises:
        BadInputError: `model_dir`, `python` or `out` cannot be used, the model is quantised, or its checkpoint holds NaN.
        CaptureFailedError: the engine refused the model, died, did not finish in time, or its logits are no numbers.
    """
    model = Path(model_dir)
    raw = read_config(model)
    refuse_quantised(model, engine_args)
    require_trust(model, raw, trust_remote_code or (engine_args or {}).get("trust_remote_code") is True)
    note = refuse_other_dtype(model, engine_args or {})
    gpu = find_target(target)
    _check_ranks(engine_args or {}, gpu is not None)
    if gpu is not None and (values or rollouts or weights == "real"):
        what = "anchor values" if values else "rollouts" if rollouts else "the checkpoint's weights"
        raise BadInputError(f"{what} cannot be had on a simulated {target}", where="--target", hint="use --target cpu, or leave them out")
    if gpu is not None:
        weights = "dummy"
    weights = "real" if use_weights(model, weights) else "dummy"
    if layers is not None and layers < 1:
        raise BadInputError(f"cannot capture {layers} layers", hint="give a number of layers of at least 1")
    destination = Path(out)
    engine = interpreter(python)
    with tempfile.TemporaryDirectory(prefix="graphalign-") as folder:
        work = Path(folder)
        written = work / ("capture.json.gz" if str(destination).endswith(".gz") else "capture.json")
        request = {
            "model": str(model.resolve()),
            "name": model.resolve().name,
            "out": str(written),
            "layers": layers,
            "weights": weights,
            "engine_args": {**({"trust_remote_code": True} if trust_remote_code else {}), **(engine_args or {})},
            "notes": [note] if note else [],
            "own_dtype": own_dtype(model) if note else "",
            "values": {**values, "tokens": list(values["tokens"]), "out": str(values["out"])} if values else None,
            "rollouts": {**rollouts, "out": str(rollouts["out"])} if rollouts else None,
            "keep_kernels": str(Path(keep_kernels).resolve()) if keep_kernels is not None else None,
        }
        if gpu is not None:
            request |= {"target": gpu.model_dump(mode="json"), "entry": entry}
        (work / "request.json").write_text(json.dumps(request))
        with (work / "log.txt").open("w+") as log:
            script = GPU_SCRIPT if gpu is not None else ROLLOUT_SCRIPT if rollouts else SCRIPT
            try:
                _run(engine, script, work / "request.json", log, timeout, progress)
                graph = _read(written, log)
            except CaptureFailedError as e:
                raise _with_log(e, log, Path(logs) if logs is not None else destination.parent) from None
        write_bytes(destination, written.read_bytes())
    return graph


class _Refused(CaptureFailedError):
    """The script's own refusal: its words are the cause, whatever else the log shows."""


def _read(written: Path, log: IO[str]) -> InferenceGraph:
    try:
        return read_json(written, InferenceGraph, kind="inference capture")
    except CaptureFileError as e:
        raise CaptureFailedError(f"the engine wrote no usable capture: {e.what}", where=_tail(log)) from None


def _with_log(error: CaptureFailedError, log: IO[str], folder: Path) -> CaptureFailedError:
    """The same error with its likely causes from the engine's log, which is kept as `folder`/graphalign-engine.log and named."""
    log.flush()
    log.seek(0)
    text = log.read()
    causes = [] if isinstance(error, _Refused) else [line for line in causes_in(text) if line not in error.what]
    where = "\n".join([*(f"cause: {line}" for line in causes), *error.where.splitlines()])
    hint = error.hint
    if missing := re.search(r"No module named '([\w.]+)'", "\n".join(causes)):
        package = missing[1].partition(".")[0]
        hint = f"the model needs {package}, which the engine's environment lacks: install a build that fits its torch\n{hint}"
    kept = folder / ENGINE_LOG
    try:
        write_bytes(kept, text.encode(errors="replace"))
    except BadInputError:
        return CaptureFailedError(error.what, where=where, hint=hint)
    return CaptureFailedError(error.what, where=where, hint=f"{hint}\nthe engine's whole log: {kept}".strip())


def causes_in(log: str) -> list[str]:
    """Exceptions that a log ends tracebacks with, the last first: what a summary ("failed to be inspected") hides."""
    found = [line.strip()[:300] for line in log.splitlines() if _EXCEPTION.match(_PREFIX.sub("", line.strip()))]
    found = [_PREFIX.sub("", line) for line in found]
    told = [line for line in dict.fromkeys(reversed(found)) if not line.endswith(":")]
    return sorted(told, key=lambda line: not line.startswith(("ModuleNotFoundError", "ImportError")))[:MOST_CAUSES]


def _check_ranks(engine_args: Mapping[str, Any], simulated: bool) -> None:
    """Refuse a tensor-parallel size that is none, or that there is no target for."""
    ranks = engine_args.get("tensor_parallel_size", 1)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise BadInputError(f"{ranks!r} is no tensor-parallel size", where="tensor_parallel_size", hint="give the number of GPUs")
    if ranks > 1 and not simulated:
        raise BadInputError(
            "the CPU engine cannot be captured tensor-parallel: its ranks are processes of their own",
            where=f"--target cpu, tensor_parallel_size={ranks}",
            hint="simulate a GPU (--target h100; `graphalign targets` lists them), or leave the size out",
        )


def interpreter(python: str | os.PathLike[str] | None) -> str:
    """The Python interpreter that is meant: a file, the folder of an environment, or this one.

    Raises:
        BadInputError: there is none.
    """
    if python is None:
        return sys.executable
    path = Path(python)
    if path.is_dir():
        path = path / "bin" / "python"
    if not path.is_file() or not os.access(path, os.X_OK):
        hint = "give the bin/python of an environment with vLLM"
        raise BadInputError(f"{python} is not a Python interpreter", where=str(path), hint=hint)
    return str(path)


def _run(interpreter: str, script: Path, request: Path, log: IO[str], timeout: float, progress: Progress | None) -> None:
    """Run the script to its end; on any way out, no process of its session is left."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PYTHONUNBUFFERED"] = "1"
    try:
        process = subprocess.Popen(
            [interpreter, str(script), str(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
    except OSError as e:
        raise BadInputError(f"cannot run {interpreter}: {e.strerror or e}", where=interpreter) from None
    expired = threading.Event()

    def watch() -> None:
        # Ends the whole session also after a normal exit: a process left in it would keep the pipe open.
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            expired.set()
        _end(process)

    watcher = threading.Thread(target=watch, daemon=True)
    failure: dict[str, Any] = {}
    try:
        watcher.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("@graphalign "):
                _heed(line, failure, progress)
            else:
                log.write(line)
        code = process.wait()
    finally:
        _end(process)
    watcher.join()
    if expired.is_set():
        raise CaptureFailedError(
            f"the engine did not finish within {timeout:g} s", where=_tail(log), hint="allow more time, or capture fewer layers"
        )
    if code != 0 or failure:
        _explain(code, failure, interpreter, log)


def _heed(line: str, failure: dict[str, Any], progress: Progress | None) -> None:
    try:
        message = json.loads(line.removeprefix("@graphalign "))
    except ValueError:
        return
    if "error" in message:
        failure.update(message)
    elif progress is not None and isinstance(message.get("stage"), str):
        progress(message["stage"], float(message.get("fraction") or 0))


def _explain(code: int, failure: dict[str, Any], interpreter: str, log: IO[str]) -> None:
    tail = _tail(log)
    if failure:
        first = str(failure["error"]).strip().splitlines()[0]
        where = str(failure.get("where") or "")
        if failure.get("usage") is True:
            raise BadInputError(first, where=where, hint=str(failure.get("hint") or ""))
        kind = _Refused if "usage" in failure else CaptureFailedError
        raise kind(
            f"the engine could not be captured: {first}",
            where=tail if where in ("", "vLLM") else where,
            hint=str(failure.get("hint") or "") or "check that this vLLM supports the model; engine arguments can be passed on",
        )
    if "No module named 'vllm'" in tail or "No module named 'torch'" in tail:
        raise CaptureFailedError(f"{interpreter} has no vLLM", where=tail, hint="install vLLM there, or name another environment's Python")
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    hint = "it may have run out of memory: capture fewer layers, or dummy weights" if code == -signal.SIGKILL else "see the log above"
    raise CaptureFailedError(f"the engine {how}", where=tail, hint=hint)


def _tail(log: IO[str]) -> str:
    log.flush()
    log.seek(0)
    lines = [line.rstrip()[:300] for line in log if line.strip()]
    return "\n".join(lines[-LOG_LINES:])


def _die_with_parent() -> Callable[[], None] | None:
    """For Linux: a function, run in the child, that makes the kernel kill it when the parent dies (PR_SET_PDEATHSIG)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # loaded here: nothing may be imported between fork and exec
    parent = os.getpid()

    def ask() -> None:
        prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def _end(process: subprocess.Popen[str]) -> None:
    """End every process of the engine's session."""
    for sig, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, sig)
        except (ProcessLookupError, PermissionError):
            break
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except (ProcessLookupError, PermissionError):
                break
            time.sleep(0.05)
    process.wait()
