"""What some tests need and skip without, with the reason in pytest's summary."""

from __future__ import annotations

import shutil

import pytest

dot = pytest.mark.skipif(not shutil.which("dot"), reason="no dot in PATH: apt-get install graphviz")
