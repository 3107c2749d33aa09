"""Site ids as a line's comment has them: `rope.1, rope.3-5`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

MARK = "# graphalign: "
"""What stands in front of the sites that a line of a generated file serves."""
_PART = re.compile(r"(\w+)\.(\d+)(?:-(\d+))?")


def short_ids(sites: Iterable[str]) -> str:
    """Ids in order, runs of a group's numbers as ranges."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for site in sites:
        group, _, number = site.rpartition(".")
        numbers[group].append(int(number))
    out = []
    for group, found in sorted(numbers.items()):
        found.sort()
        for first, last in _runs(found):
            out.append(f"{group}.{first}" if first == last else f"{group}.{first}-{last}")
    return ", ".join(out)


def all_ids(text: str) -> list[str]:
    """The ids that `short_ids` made a text of."""
    found = (m.groups() for m in _PART.finditer(text))
    return [f"{group}.{n}" for group, first, last in found for n in range(int(first), int(last or first) + 1)]


def _runs(numbers: list[int]) -> Iterable[tuple[int, int]]:
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[start], numbers[i - 1]
            start = i
