"""What a user named as a model, looked at before anything is started: says in one line what it is if it is no model's folder."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from graphalign.errors import BadInputError

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Files that both sides load weights from."""
OTHER_WEIGHTS = ("*.gguf", "*.bin", "*.pt", "*.pth", "*.npz", "*.h5", "*.msgpack")
ADAPTER = "adapter_config.json"
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
POINTER = b"version https://git-lfs"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
OPTION = "--trust-remote-code"
_LONGEST_HEADER = 1 << 28
_NO_WEIGHTS = re.compile(r"^(adapter_|training_args|optimizer|scheduler|rng_state)")
"""Files that trainers leave beside a checkpoint, or instead of one."""


def read_config(path: Path) -> dict[str, Any]:
    """The content of a model folder's config.json.

    Raises:
        BadInputError: `path` is no model's folder; says what it is, and how to go on.
    """
    if not path.is_dir():
        raise _no_folder(path)
    config = path / "config.json"
    if (path / ADAPTER).is_file() and not (config.is_file() and has_weights(path)):
        raise _adapter(path)
    if not config.is_file():
        raise _no_config(path)
    try:
        raw = json.loads(config.read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise BadInputError(f"cannot read {config}: {e}", where=str(config), hint="download the model again") from None
    if not isinstance(raw, dict):
        raise BadInputError(f"{config} is not a model's config", where=str(config), hint="download the model again")
    return raw


def require_kind(path: Path, raw: Mapping[str, Any]) -> None:
    """Refuse a config that says of no model what it is.

    Raises:
        BadInputError: it has neither a type, nor an architecture, nor code of its own.
    """
    if not any(raw.get(key) for key in ("model_type", "architectures", "auto_map")):
        what = f"{path / 'config.json'} is no config of a Transformers model: it names neither model_type nor architectures"
        raise BadInputError(what, where=str(path), hint="give the folder of a causal language model in Transformers' layout")


def has_weights(model: Path) -> bool:
    """Are there weights in a folder that both sides can load? An adapter's are none, nor what a trainer keeps beside them."""
    return bool(_weight_files(model, WEIGHTS))


def _weight_files(model: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({file for p in patterns for file in model.glob(p) if not _NO_WEIGHTS.match(file.name)})


def use_weights(path: Path, asked: str | None) -> bool:
    """Whether a side loads the folder's weights.

    Args:
        path: the model's folder.
        asked: "dummy" for random ones; "real" or "checkpoint" for those of the folder; None for those of the folder if it has any.

    Raises:
        BadInputError: they are asked for and not there; are in no layout that both sides load; or the checkpoint is not whole.
    """
    if asked == "dummy":
        return False
    if not has_weights(path):
        if other := _weight_files(path, OTHER_WEIGHTS):
            what = f"{path} holds weights ({other[0].name}) that Transformers does not load from a model's folder"
            raise BadInputError(what, where=str(path), hint="convert them to safetensors (save_pretrained), or take --weights dummy")
        if asked is not None:
            hint = "take dummy weights, or download the checkpoint"
            raise BadInputError(f"{path} holds no weight files", where=str(path), hint=hint)
        return False
    require_whole(path)
    return True


def require_whole(path: Path) -> None:
    """Refuse a checkpoint of which files are missing, cut short, or pointers of Git LFS; only headers are read.

    Raises:
        BadInputError: it names the first.
    """
    again = "download the checkpoint again"
    for name in INDICES:
        named = set(map(str, (_json(path / name).get("weight_map") or {}).values()))
        lost = sorted(n for n in named if not (path / n).is_file())
        if lost and len(lost) < len(named):
            raise BadInputError(
                f"the checkpoint is not whole: {len(lost)} of the {len(named)} files that {name} names are missing, the first is {lost[0]}",
                where=str(path), hint=again,
            )  # fmt: skip
    for file in _weight_files(path, WEIGHTS):
        try:
            with file.open("rb") as f:
                pointer = f.read(len(POINTER)) == POINTER
        except OSError as e:
            raise BadInputError(f"cannot read {file}: {e.strerror or e}", where=str(file), hint=again) from None
        if pointer:
            what = f"{file} is a pointer of Git LFS, not a weight file"
            raise BadInputError(what, where=str(file), hint="run `git lfs pull` in the folder, or download the checkpoint again")
        if file.suffix == ".safetensors" and (why := _cut_short(file)):
            raise BadInputError(f"{file} is {why}", where=str(file), hint=again)


def own_dtype(path: Path) -> str:
    """The dtype that a model's config names (`dtype`, before Transformers 5 `torch_dtype`), else the one most of its weights have; empty if
    neither is known."""
    raw = _json(path / "config.json")
    inner = raw.get("text_config")
    for config in (raw, inner if isinstance(inner, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if isinstance(config.get(key), str) and config[key] != "auto":
                return str(config[key]).removeprefix("torch.")
    sizes: Counter[str] = Counter()
    for file in path.glob("*.safetensors"):
        for entry in _entries(file):
            start, end = entry.get("data_offsets", (0, 0))
            sizes[DTYPES.get(str(entry.get("dtype")), str(entry.get("dtype")))] += end - start
    return max(sizes, key=sizes.__getitem__) if sizes else ""


def needs_own_code(raw: Mapping[str, Any]) -> bool:
    """Whether Transformers can build the model only with code that comes with it (`auto_map`).

    Transformers is imported to find out; where it is not installed the answer is no.
    """
    brought = raw.get("auto_map")
    if not isinstance(brought, dict) or not brought:
        return False
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        return False
    kind = raw.get("model_type")
    return kind not in CONFIG_MAPPING_NAMES or ("AutoModelForCausalLM" in brought and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def require_trust(path: Path, raw: Mapping[str, Any], trust: bool) -> None:
    """Refuse a model that comes with its own code, unless that may be run.

    Raises:
        BadInputError: it names the option.
    """
    if not trust and needs_own_code(raw):
        files = ", ".join(sorted({str(v).rpartition(".")[0] + ".py" for v in raw["auto_map"].values() if isinstance(v, str)}))
        what = f"the model comes with code of its own ({files or 'auto_map'}), which is run only with {OPTION}"
        raise BadInputError(what, where=f"{path / 'config.json'}, auto_map", hint=f"read that code, then add {OPTION} (trust_remote_code)")


def code_left_out(path: Path) -> str:
    """What to say of a model that comes with its own code if Transformers' was taken; empty for others."""
    raw = _json(path / "config.json")
    if not raw.get("auto_map") or needs_own_code(raw):
        return ""
    return f"the model comes with code of its own (auto_map), which was not run: Transformers' class is captured; {OPTION} runs it"


def _no_folder(path: Path) -> BadInputError:
    """Why something that is no folder is no model."""
    if not path.exists():
        return BadInputError(f"there is no folder {path}", where=str(path), hint="check the path; give a folder with a config.json")
    if path.suffix == ".gguf":
        return _gguf(path)
    if path.name == "config.json":
        return BadInputError(f"{path} is a file, not a model's folder", where=str(path), hint=f"give its folder: {path.parent}")
    kind = "a weight file" if any(path.match(p) for p in WEIGHTS + OTHER_WEIGHTS) else "a file"
    hint = "give the folder that holds it and its config.json"
    return BadInputError(f"{path} is {kind}, not a model's folder", where=str(path), hint=hint)


def _no_config(path: Path) -> BadInputError:
    """What a folder without a config.json holds instead."""
    try:
        names = sorted(p.name for p in path.iterdir())
    except OSError as e:
        return BadInputError(f"cannot read {path}: {e.strerror or e}", where=str(path), hint="give a folder that you may read")
    if not names:
        return BadInputError(f"{path} holds no config.json: it is empty", where=str(path), hint="check the path, or download the model")
    below = sorted(p.parent.name for p in path.glob("*/config.json"))
    if below:
        hint = "give one of these" if len(below) > 1 else f"give {path / below[0]}"
        what = f"{path} holds no config.json, but its folders do: {', '.join(below[:5])}{', …' if len(below) > 5 else ''}"
        return BadInputError(what, where=str(path), hint=hint)
    if packed := [n for n in names if n.endswith(".gguf")]:
        return _gguf(path / packed[0])
    if found := _weight_files(path, WEIGHTS + OTHER_WEIGHTS):
        weights = found[0].name
        other = " (params.json is of another layout)" if "params.json" in names else ""
        hint = "copy config.json from where the weights come from, or convert them to Transformers' layout"
        return BadInputError(f"{path} holds weights ({weights}) but no config.json{other}", where=str(path), hint=hint)
    some = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    return BadInputError(f"{path} holds no config.json", where=f"{path}: {some}", hint="give a folder as save_pretrained writes it")


def _gguf(file: Path) -> BadInputError:
    hint = (
        "give the BF16 checkpoint that it was made from; or write one: AutoModelForCausalLM.from_pretrained(folder, "
        f"gguf_file={file.name!r}, dtype='bfloat16').save_pretrained(new_folder)"
    )
    return BadInputError(f"{file} is a GGUF file; graphalign reads checkpoints in Transformers' layout", where=str(file), hint=hint)


def _adapter(path: Path) -> BadInputError:
    raw = _json(path / ADAPTER)
    base, kind = raw.get("base_model_name_or_path"), raw.get("peft_type")
    of = f" of {base}" if isinstance(base, str) and base else ""
    merge = "AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload().save_pretrained(new_folder)"
    hint = (
        f"engines serve merged weights: merge it, {merge}\nor give its base model{f', {base}' if of else ''}: it rounds in the same places"
    )
    what = f"{path} is an adapter ({kind if isinstance(kind, str) else 'PEFT'}{of}), not a model"
    return BadInputError(what, where=str(path / ADAPTER), hint=hint)


def _cut_short(file: Path) -> str:
    """What is wrong with the length of a safetensors file; empty if nothing is."""
    size = file.stat().st_size
    entries = list(_entries(file))
    if not entries:
        return "" if _header(file) is not None else f"no safetensors file, or its header is cut short ({size} bytes)"
    with file.open("rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
    whole = 8 + length + max(e["data_offsets"][1] for e in entries)
    return f"cut short: {size} of {whole} bytes" if size < whole else ""


def _entries(file: Path) -> Iterator[dict[str, Any]]:
    """The tensors in a safetensors file's header."""
    for name, entry in (_header(file) or {}).items():
        if name != "__metadata__" and isinstance(entry, dict) and _offsets(entry.get("data_offsets")):
            yield entry


def _offsets(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(isinstance(x, int) for x in found)


def _header(file: Path) -> dict[str, Any] | None:
    try:
        with file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            found = json.loads(f.read(length)) if length < _LONGEST_HEADER else None
    except (OSError, ValueError, struct.error, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
