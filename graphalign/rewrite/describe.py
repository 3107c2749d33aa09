"""What a spec changes, module by module, as text."""

from __future__ import annotations

from collections import defaultdict

from graphalign.evaluate.parts import step_words
from graphalign.patch.spec import Edit, PatchSpec


def describe(spec: PatchSpec) -> list[str]:
    """One block per module pattern, one line per edit."""
    blocks: dict[str, list[str]] = defaultdict(list)
    for group in spec.groups:
        for edit in group.edits:
            blocks[edit.consumer.module].append(_line(group.name, edit))
    out = []
    for module in sorted(blocks):
        out += [module, *(f"    {line}" for line in blocks[module])]
    return out


def _line(group: str, e: Edit) -> str:
    verb = "reads unrounded" if e.kind == "keep" else f"reads rounded to {e.format}"
    where = f"layers {e.layers}" if e.layers else "outside the layers"
    source = step_words(e.producer.op, e.producer.text) or e.producer.op
    reader = step_words(e.consumer.op, e.consumer.text) if e.consumer.text else e.consumer.op
    return f"[{group}] {reader}  operand {e.operand} {verb}: {source}  ({e.producer.module}; {where})"
