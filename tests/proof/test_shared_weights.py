"""`check` of a model without weights: random ones for both sides, where there is room."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphalign.engines.model_folder import has_weights
from graphalign.engines.trainer import build_trainer
from graphalign.pipeline import check
from graphalign.pipeline.check import share_weights
from tests.rewrite.tiny import config, recorded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config(3).save_pretrained(tmp_path / "bare")
    return tmp_path / "bare"


def test_both_sides_get_the_same_weights(folder: Path, tmp_path: Path) -> None:
    assert not has_weights(folder)
    assert share_weights(folder, tmp_path / "made", recorded(), 2) == ""
    assert has_weights(tmp_path / "made")
    one, two = build_trainer(tmp_path / "made"), build_trainer(tmp_path / "made")
    assert len(one.model.layers) == 2
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.float().std() > 0, name


def test_what_does_not_fit_is_said_with_its_size(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    why = share_weights(folder, tmp_path / "made", recorded(), None)
    assert "do not fit" in why
    assert "fewer --layers" in why
    assert not (tmp_path / "made").exists()
    monkeypatch.undo()
    monkeypatch.setattr(check, "available_memory", lambda: 10)
    assert "do not fit" in share_weights(folder, tmp_path / "made", recorded(), None)
