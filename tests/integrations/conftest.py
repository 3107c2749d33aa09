"""Dynamo's caches and settings are global: every test starts and ends without any."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

# pytest's log capture switches on torch's structured trace, which takes longer than compiling (torch 2.13)
_TRACE = logging.getLogger("torch.__trace")
_TRACE.propagate = False
_TRACE.setLevel(logging.CRITICAL)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()
