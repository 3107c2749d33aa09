"""HTML as text, with one rule: a `str` is escaped, only `Html` is not."""

from __future__ import annotations

import html
from collections.abc import Iterable

from graphalign.render.words import clean


class Html(str):
    """Markup made here. Anything else is text, and is escaped where it is put in."""

    __slots__ = ()


Content = Html | str | int | None | Iterable["Html | str | int | None"]


def text(content: Content) -> Html:
    """Content as markup."""
    if content is None:
        return Html("")
    if isinstance(content, Html):
        return content
    if isinstance(content, str | int):
        return Html(html.escape(clean(content, 20000), quote=True))
    return Html("".join(text(c) for c in content))


def tag(name: str, content: Content = None, /, **attributes: str | int | bool | None) -> Html:
    """An element. Attribute names lose a closing underscore, other underscores become hyphens; False and None leave one out."""
    parts = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(f" {key}" if value is True else f' {key}="{html.escape(clean(value), quote=True)}"')
    start = f"<{name}{''.join(parts)}>"
    return Html(start if name in ("input", "meta", "br") else f"{start}{text(content)}</{name}>")


def anchor(site: str) -> str:
    """A site's id in the page."""
    return "site-" + "".join(c if c.isalnum() or c in "._-" else "-" for c in site)


def table(head: Iterable[tuple[str, str]], rows: Iterable[Html], **attributes: str) -> Html:
    """A table; `head` are (title, class)."""
    cells = [tag("th", title, scope="col", class_=css or None) for title, css in head]
    return tag("div", tag("table", [tag("thead", tag("tr", cells)), tag("tbody", rows)], **attributes), class_="scroll")
