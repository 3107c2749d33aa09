"""What some tests need and skip without, with the reason in pytest's summary."""

from __future__ import annotations

import shutil

import pytest

from graphalign.render import wheel
from graphalign.render.dot import can_draw

drawing = pytest.mark.skipif(not can_draw(), reason="no Graphviz: pip install graphviz-pure, or apt-get install graphviz")
dot = pytest.mark.skipif(not shutil.which("dot"), reason="no dot in PATH: apt-get install graphviz")
wheels = pytest.mark.skipif(wheel.program() is None, reason="the wheel is missing: pip install graphviz-pure")
