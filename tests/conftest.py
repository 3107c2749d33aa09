"""Shared by all tests. Nothing is skipped silently: a test whose needs are missing fails and says what to install."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

ENGINE_TIMEOUT = 1800
"""Seconds for a test that starts the engine."""

settings.register_profile("graphalign", deadline=None)
settings.register_profile("graphalign-ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("graphalign-ci" if os.environ.get("CI") else "graphalign")


SLOW = frozenset({"breadth", "compiler", "drift", "integrations", "render", "rewrite", "source"})
"""Folders whose tests compile, patch or draw models: `make test-slow`, not the minute of `make test-fast`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SLOW & set(item.path.parent.parts) and not item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("vllm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT))
