"""The patch as source (`graphalign source`), for a reviewer who looks at a site: which lines of the modeling file serve it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from graphalign.errors import BadInputError
from graphalign.patch.spec import digest
from graphalign.render.markup import Html, anchor, tag, text
from graphalign.source.ids import MARK, all_ids

_DIGEST = re.compile(r"^# patch sha256 ([0-9a-f]{64})$", re.MULTILINE)
HEADER = 4000
"""Characters of a generated file in which its header ends."""


@dataclass(frozen=True)
class Line:
    """One line of a hunk."""

    sign: str
    """`+`, `-` or a space."""
    number: int
    """In the file that the sign is of."""
    text: str
    """Without the comment that names the sites."""
    sites: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hunk:
    """Lines that stand together."""

    where: str
    """`transformers/models/qwen3/modeling_qwen3.py:57`."""
    lines: tuple[Line, ...]

    @property
    def sites(self) -> set[str]:
        """The sites that its lines serve."""
        return {s for line in self.lines for s in line.sites}


@dataclass(frozen=True)
class SourceDiff:
    """A generated diff."""

    name: str
    hunks: tuple[Hunk, ...]

    def serving(self, sites: Iterable[str]) -> list[Hunk]:
        """The hunks with a line for one of some sites."""
        wanted = set(sites)
        return [h for h in self.hunks if wanted & h.sites]

    def lines(self, site: str) -> list[str]:
        """The changed lines for a site, as `file:line  text`."""
        return [
            f"{h.where.rpartition(':')[0]}:{line.number}  {line.text.strip()}" for h in self.hunks for line in h.lines if site in line.sites
        ]


def read_source(path: Path) -> SourceDiff:
    """The diff of a generated module, given itself or by the module.

    Raises:
        BadInputError: there is none, or it is no diff that `graphalign source` made.
    """
    file = path if path.suffix == ".diff" else path.with_suffix(".diff")
    try:
        found = PatchSet(file.read_text())
    except (OSError, UnicodeDecodeError, UnidiffParseError) as e:
        raise BadInputError(
            f"cannot read {file}: {e}", hint="give what `graphalign source` wrote: the module, or the diff beside it"
        ) from None
    hunks = tuple(Hunk(f"{f.path}:{h.target_start}", tuple(map(_line, h))) for f in found for h in f)
    if not any(h.sites for h in hunks):
        raise BadInputError(
            f"no line of {file} names a site", where=str(file),
            hint="give what `graphalign source` wrote from a patch of this version: the module, or the diff beside it",
        )  # fmt: skip
    return SourceDiff(file.name, hunks)


def source_beside(sites: Path) -> SourceDiff | None:
    """The diff in a sites file's folder that was made from the patch there; None if there is no such file."""
    try:
        made_from = digest(sites.with_name("patch.yaml").read_bytes())
        modules = sorted(p for p in sites.parent.glob("*.py") if p.with_suffix(".diff").is_file())
        fitting = [p for p in modules if (m := _DIGEST.search(p.read_text(errors="replace")[:HEADER])) is not None and m[1] == made_from]
        return read_source(fitting[0]) if fitting else None
    except (OSError, BadInputError):
        return None


def as_html(hunks: Iterable[Hunk]) -> Html:
    """Hunks for a page, with links to the sites."""
    return text(
        [tag("div", [tag("div", h.where, class_="small soft"), tag("pre", [_row(x) for x in h.lines], tabindex="0")]) for h in hunks]
    )


def as_text(hunks: Iterable[Hunk]) -> list[str]:
    """Hunks for a terminal: lines as in a diff, behind a changed line its sites."""
    out = []
    for h in hunks:
        out.append(f"    {h.where}")
        out += [f"    {x.sign} {x.text}{f'  {MARK}{chr(32).join(x.sites)}' if x.sites else ''}" for x in h.lines if x.sign != " "]
    return out


def _line(line: object) -> Line:
    sign, raw = str(getattr(line, "line_type", " ")), str(getattr(line, "value", "")).rstrip("\n")
    number = getattr(line, "source_line_no" if sign == "-" else "target_line_no", None)
    code, mark, ids = raw.rpartition(MARK)
    return Line(sign, int(number or 0), code.rstrip() if mark else raw, tuple(all_ids(ids)) if mark and sign == "+" else ())


def _row(line: Line) -> Html:
    body = [f"{line.number:>5} {line.sign} {line.text}"]
    links: list[Html | str] = []
    for site in line.sites:
        links += ["  ", tag("a", site, href=f"#{anchor(site)}")]
    css = {"+": "added", "-": "removed"}.get(line.sign)
    return text([tag("span", [*body, *links], class_=css), Html("\n")])
