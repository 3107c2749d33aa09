"""Where the rule files are: in `rules/` of a checkout, in `graphalign/_rules` of an installed wheel."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import yaml

from graphalign.errors import BadInputError

ENVIRONMENT_VARIABLE = "GRAPHALIGN_RULES"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml


def read_yaml(path: Path) -> Any:
    """Content of a rule file: plain data; None if it is empty.

    Raises:
        yaml.YAMLError: it is not YAML, or has tags.
    """
    return yaml.load(path.read_text(), Loader=_LOADER)


def data_dir(name: str, path: str | os.PathLike[str] | None = None) -> Path:
    """Where data that is not about ops, groups or counts lies (`prompts`, `targets`): an own rules folder may bring its own, and need not.

    Args:
        name: the folder inside `rules/`.
        path: the rules folder asked for, as in `rules_dir`.
    """
    asked = path or os.environ.get(ENVIRONMENT_VARIABLE)
    own = Path(asked) / name if asked else None
    return own if own is not None and own.is_dir() else _shipped() / name


def rules_dir(path: str | os.PathLike[str] | None = None) -> Path:
    """The folder to read rules from: `path`, else `$GRAPHALIGN_RULES`, else the installed ones, else the checkout's.

    Raises:
        BadInputError: the folder asked for does not exist, or this installation carries no rules.
    """
    for asked, by in ((path, "--rules"), (os.environ.get(ENVIRONMENT_VARIABLE), f"${ENVIRONMENT_VARIABLE}")):
        if asked:
            if not Path(asked).is_dir():
                raise BadInputError(f"no rules folder {asked}", where=by, hint="give an existing folder; an empty one is allowed")
            if not any(Path(asked).rglob("*.yaml")):
                said = f"warning: {by}: there is no rule file in {asked}: every custom op is opaque, and groups get generated names"
                print(said, file=sys.stderr)
            return Path(asked)
    return _shipped()


def _shipped() -> Path:
    """The rules of this installation.

    Raises:
        BadInputError: it carries none.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "_rules", package.parent / "rules"):
        if folder.is_dir():
            return folder
    raise BadInputError(
        "this installation of graphalign carries no rules",
        where=str(package),
        hint=f"install graphalign again, or set {ENVIRONMENT_VARIABLE} to a rules folder",
    )
