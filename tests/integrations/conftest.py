"""These tests run patched models too: Dynamo's caches and settings are those of `tests/rewrite`."""

from tests.rewrite.conftest import _fresh_dynamo

__all__ = ["_fresh_dynamo"]
