"""Names from captures as text that is safe to show, and the few phrases that all outputs share."""

from __future__ import annotations

import textwrap
import unicodedata

from graphalign.evaluate.parts import SEPARATOR, step_words
from graphalign.ir.paths import ranges
from graphalign.sites.report import End, Report, Site

SHORT = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "float8_e4m3fn": "FP8 e4m3", "float8_e5m2": "FP8 e5m2"}


def clean(text: object, most: int = 2000) -> str:
    """Text of a capture without control, surrogate and direction characters (they could hide or reorder what is shown)."""
    out = "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for c in str(text)[:most])
    return out + ("…" if len(str(text)) > most else "")


def shorten(text: str, width: int) -> str:
    """One line of at most `width` characters."""
    line = " ".join(clean(text).split())
    return line if len(line) <= width else line[: width - 1] + "…"


def wrap(text: str, width: int, most: int = 2) -> list[str]:
    """At most `most` lines of about `width` characters."""
    lines = textwrap.wrap(" ".join(clean(text).split()), width, break_long_words=True) or [""]
    return lines if len(lines) <= most else [*lines[: most - 1], shorten(" ".join(lines[most - 1 :]), width)]


def formats(roundings: tuple[str, ...]) -> str:
    """`BF16`, `BF16 then FP8 e4m3`, `FP32` where nothing is rounded."""
    return " then ".join(SHORT.get(r, clean(r, 40)) for r in roundings) or "FP32"


def kernel_name(name: str, width: int = 34) -> str:
    """A generated kernel's name with its middle left out: `cpp_fused_…_unsqueeze_view_1`."""
    line = shorten(name, 400)
    return line if len(line) <= width else f"{line[:9]}…{line[-(width - 10) :]}"


def layer_words(layers: tuple[int, ...]) -> str:
    """`layers 0-5`, `layer 3`, `outside the layers`."""
    return f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}" if layers else "outside the layers"


def place(end: End) -> str:
    """`modeling_qwen3.py:160`, or the module where there is no source."""
    return f"{clean(end.file).split('/')[-1]}:{end.line}" if end.file else clean(end.module)


def expression(end: End, width: int = 60) -> str:
    """An end in source code, or in words where it has none."""
    if end.op in ("parameter", "table"):
        return f"{end.op} {shorten(end.module, width)}"
    if end.op == "logprobs":
        return "log-probabilities"
    words = shorten(end.text, width) or f"{shorten(end.op.partition(SEPARATOR)[0], 40)} in {shorten(end.module, width)}"
    return step_words(end.op, words)


def action(site: Site) -> str:
    """What the site says, without its ends."""
    if site.kind == "keep":
        return f"trainer rounds to {formats(site.training)}, engine keeps {formats(site.inference)}"
    return f"engine rounds to {formats(site.inference)}, trainer keeps {formats(site.training)}"


def headline(report: Report) -> str:
    """Model and versions in one line."""
    m, v = report.model, report.versions
    name = m.get("architecture") or m.get("name") or "model"
    device = report.target.get("device_name") or report.target.get("device", "?")
    return clean(f"{name}: vLLM {v.get('vllm', '?')} on {device} against Transformers {v.get('transformers', '?')}", 300)


def backend(report: Report) -> str:
    """That vLLM runs the model through its Transformers backend, or as another class than its own; empty if neither, or if unknown."""
    name, architecture = (clean(report.model.get(k) or "", 100) for k in ("engine_class", "architecture"))
    if not name or name == architecture:
        return ""
    if name.startswith("Transformers"):  # TransformersForCausalLM, TransformersMoEForCausalLM, … (vLLM 0.28 to 0.32)
        return (
            f"vLLM has no model code of its own for {architecture}: it runs Transformers' code through its Transformers backend ({name})."
        )
    return f"vLLM runs {architecture} as {name}."
