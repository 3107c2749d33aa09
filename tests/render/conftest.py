"""A browser for the tests that look at the page; they skip, and say so, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from graphalign.render.page import render_page
from tests.fixtures.recorded import report
from tests.render.browser import Browser, find


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    executable = find()
    if executable is None:
        pytest.skip("no chromium or chrome in PATH: apt-get install chromium")
    with Browser(executable) as b:
        yield b


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(report("qwen3")))
    return path
