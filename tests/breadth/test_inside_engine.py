"""The real engine runs its composite ops on drawn weights: the trainer's experts are compared with what it gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphalign.capture.inference import capture_inference
from graphalign.capture.training import capture_training
from graphalign.cli.app import app
from graphalign.engines.trainer import build_trainer
from graphalign.ir.files import write_json
from tests.breadth import models

pytestmark = pytest.mark.vllm


def test_another_alpha_in_the_experts(tmp_path: Path) -> None:
    """GPT-OSS's experts as they are, and with the factor in their activation that a trainer might have instead: exit code 3."""
    folder = models.save("gpt_oss", tmp_path)
    engine = capture_inference(folder, tmp_path / "inf.json.gz", layers=1)
    (record,) = engine.composites
    assert record.failed == ""
    assert record.op == "_C.cpu_fused_moe.default"
    assert record.experts == 4
    assert len(record.results) == len(record.scales)
    trainer = build_trainer(folder, layers=1, attention="eager")
    for alpha, code in ((1.702, 0), (1.0, 3)):
        for module in trainer.modules():
            if hasattr(module, "alpha"):
                module.alpha = alpha
        write_json(tmp_path / "train.json.gz", capture_training(trainer))
        files = [str(tmp_path / x) for x in ("inf.json.gz", "train.json.gz")]
        result = CliRunner().invoke(app, ["diff", *files, "-o", str(tmp_path / "sites.json")])
        assert result.exit_code == code, result.output
        assert ("another function inside" in result.output) == (code == 3)
        assert "assumed" not in result.output
