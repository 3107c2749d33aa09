"""What every page has: head, policy, style, sections with links to them. A page is one file and needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from graphalign.render.markup import Html, tag

CSS = Path(__file__).with_name("page.css")
Sections = Sequence[tuple[str, str, Html]]
"""(id, heading, content)."""


def document(title: str, body: Sequence[Html], *, css: str = "", script: str = "", images: bool = False) -> str:
    """A page, whose policy allows its own style and script and nothing from elsewhere.

    Args:
        title: of the page.
        body: its elements.
        css: style beside `page.css`.
        script: the page's only script, put at the end.
        images: allow images that are part of the file (data URIs).
    """
    style = CSS.read_text() + css
    sources = ["default-src 'none'", *(["img-src data:"] if images else []), f"style-src 'sha256-{_hash(style)}'"]
    sources += [*([f"script-src 'sha256-{_hash(script)}'"] if script else []), "base-uri 'none'", "form-action 'none'"]
    head = [
        Html('<meta charset="utf-8">'),
        tag("meta", http_equiv="Content-Security-Policy", content="; ".join(sources)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(style)),
    ]
    whole = [*body, *([tag("script", Html(script))] if script else [])]
    return f'<!doctype html>\n<html lang="en">\n{tag("head", head)}\n{tag("body", whole)}\n</html>\n'


def navigation(sections: Sections) -> Html:
    """Links to the sections."""
    return tag("nav", tag("ul", [tag("li", tag("a", title, href=f"#{name}")) for name, title, _ in sections]), aria_label="Sections")


def contents(sections: Sections) -> Html:
    """The sections."""
    return tag(
        "main",
        [
            tag("section", [tag("h2", title, id=f"h-{name}"), content], id=name, aria_labelledby=f"h-{name}")
            for name, title, content in sections
        ],
    )


def _hash(code: str) -> str:
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
