"""Building a trainer's model."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import BloomConfig

from graphalign.engines.trainer import build_trainer
from graphalign.errors import CaptureFailedError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2, architectures=["BloomForCausalLM"]).save_pretrained(tmp_path)
    return tmp_path


def test_a_model_without_sdpa_gets_what_transformers_would_take(folder: Path) -> None:
    assert build_trainer(folder).config._attn_implementation == "eager"


def test_what_was_asked_for_by_name_is_not_replaced(folder: Path) -> None:
    with pytest.raises(CaptureFailedError, match="could not be built"):
        build_trainer(folder, attention="flex_attention")
