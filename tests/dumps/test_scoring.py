"""Stock and patched trainers on a dump's tokens. The engine is played by the patched trainer, so what must come out is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import graphalign
import graphalign.cli.gap
from graphalign.cli.app import app
from graphalign.dumps.adapters import load_formats
from graphalign.dumps.collect import Collection, collect
from graphalign.dumps.measure import report
from graphalign.dumps.report import DumpReport
from graphalign.dumps.scoring import score_rows
from graphalign.errors import GapInputError
from graphalign.gap.store import Store
from graphalign.gap.variants import EVERYTHING, STOCK
from graphalign.logprobs import fp32_log_softmax
from graphalign.patch.spec import PatchSpec, save
from tests.dumps import samples
from tests.rewrite.tiny import VOCAB, build, spec_for

pytestmark = pytest.mark.slow
LAYERS = 2
GROUPS = ("rope", "swiglu")
COUNT, LENGTH, TOOL = 12, 16, 3
"""Responses, sampled tokens in each half, tokens that a tool writes between the halves."""


def draw(model: torch.nn.Module, *, top_p: float = 1.0, temperature: float = 1.0, seed: int = 0) -> list[dict[str, Any]]:
    """Responses that the model samples, in our own rows: two halves with a tool's tokens between them, which do not count."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (COUNT, 6), generator=g)
    prompts, logprobs, mask = ids.tolist(), [], []
    with torch.no_grad():
        for t in range(2 * LENGTH + TOOL):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1].float()
            p = (logits / temperature).softmax(-1)
            ordered, order = p.sort(-1, descending=True)
            ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
            token = order.gather(-1, torch.multinomial(ordered, 1, generator=g))
            tool = LENGTH <= t < LENGTH + TOOL
            if tool:
                token = torch.randint(1, VOCAB, (COUNT, 1), generator=g)
            mask.append(0 if tool else 1)
            ids = torch.cat([ids, token], 1)
    rows = []
    for i in range(COUNT):
        response = ids[i, 6:].tolist()
        # one sequence at a time, as the trainer scores them: a batch has other bits
        with torch.no_grad():
            logits = model(input_ids=ids[i : i + 1], use_cache=False).logits[0]
        logprobs = fp32_log_softmax(logits[5:-1], ids[i, 6:]).double().numpy()
        values = np.where(np.array(mask) == 1, logprobs, 0.0).tolist()
        rows.append({"prompt_token_ids": prompts[i], "response_token_ids": response, "inference_logprobs": values, "mask": mask})
    return rows


@pytest.fixture(scope="module")
def played() -> tuple[torch.nn.Module, PatchSpec, list[dict[str, Any]]]:
    torch._dynamo.reset()
    model, spec = build(LAYERS), spec_for(LAYERS, GROUPS)
    # A head with larger weights: random ones would predict all tokens alike, and no filter would show.
    with torch.no_grad():
        model.lm_head.weight.mul_(16)
    with graphalign.apply(model, spec):
        rows = draw(model)
    return model, spec, rows


def read(path: Path, rows: list[dict[str, Any]]) -> Collection:
    return collect([samples.write_lines(path, rows)], load_formats(), progress=lambda *_: None)


def scored(tmp_path: Path, model: torch.nn.Module, rows: list[dict[str, Any]], spec: PatchSpec | None, **options: Any) -> DumpReport:
    found = read(tmp_path / "rows.jsonl", rows)
    store = Store(tmp_path / "variants", "k")
    options |= {"spec": spec, "function": fp32_log_softmax, "resamples": 200, "progress": lambda *_: None}
    return score_rows(model, found.kept, report(found, resamples=200), store, **options).report


def test_the_patched_trainer_is_the_engine(played: tuple[torch.nn.Module, PatchSpec, list[dict[str, Any]]], tmp_path: Path) -> None:
    model, spec, rows = played
    result = scored(tmp_path, model, rows, spec)
    by_name = {s.name: s for s in result.scored}
    assert by_name[EVERYTHING].gap.k3.value == 0
    assert by_name[EVERYTHING].gap.equal_share.value == 1
    assert by_name[EVERYTHING].gap.tokens == COUNT * 2 * LENGTH  # without the tool's
    assert by_name[STOCK].gap.k3.value > 0
    against = by_name[EVERYTHING].against_stock
    assert against is not None
    assert against.k3.value == -by_name[STOCK].gap.k3.value
    assert by_name[STOCK].against_dump is None
    assert result.floor is not None
    assert result.floor.k3.value > 0
    assert not [f for f in result.findings if f.refuses]
    assert result.sampling is not None
    assert result.sampling.top_p is None
    assert result.sampling.temperature == pytest.approx(1, abs=5 * result.sampling.temperature_error)


def test_the_dumps_own_trainer_is_compared_with_those_that_run_here(
    played: tuple[torch.nn.Module, PatchSpec, list[dict[str, Any]]], tmp_path: Path
) -> None:
    model, spec, rows = played
    signs = np.resize([0.01, -0.01], 2 * LENGTH + TOOL)
    off = [row | {"training_logprobs": np.minimum(np.array(row["inference_logprobs"]) + signs * row["mask"], 0).tolist()} for row in rows]
    result = scored(tmp_path, model, off, spec)
    assert result.gap is not None
    by_name = {s.name: s for s in result.scored}
    against = by_name[EVERYTHING].against_dump
    assert against is not None
    assert against.k3.value == pytest.approx(-result.gap.k3.value)


@pytest.mark.parametrize(("top_p", "temperature"), [(0.9, 1.0), (1.0, 0.6)])
def test_how_the_tokens_were_drawn_is_seen_in_the_logits(
    top_p: float, temperature: float, played: tuple[torch.nn.Module, PatchSpec, list[dict[str, Any]]], tmp_path: Path
) -> None:
    model, _, _ = played
    result = scored(tmp_path, model, draw(model, top_p=top_p, temperature=temperature, seed=3), None)
    assert result.sampling is not None
    assert [f.kind for f in result.findings] == ["sampling"]
    if top_p < 1:
        assert result.sampling.top_p == pytest.approx(0.9, abs=0.05)
    else:
        assert result.sampling.temperature == pytest.approx(0.6, abs=5 * result.sampling.temperature_error)
    assert result.scored[0].gap.k3.value == 0  # raw log-probabilities of the same model


def test_log_probabilities_at_another_temperature_need_it(
    played: tuple[torch.nn.Module, PatchSpec, list[dict[str, Any]]], tmp_path: Path
) -> None:
    model, _, _ = played
    rows = draw(model, temperature=0.7, seed=4)
    for row in rows:
        ids = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, 5:-1].float() / 0.7
        values = fp32_log_softmax(logits, ids[0, 6:]).double().numpy()
        row["inference_logprobs"] = np.where(np.array(row["mask"]) == 1, values, 0.0).tolist()
    refused = scored(tmp_path / "a", model, rows, None)
    assert refused.scored == ()
    assert refused.findings[0].refuses
    assert "processed, with about temperature=0.7" in refused.findings[0].what
    result = scored(tmp_path / "b", model, rows, None, temperature=0.7)
    assert result.scored[0].gap.k3.value == 0
    assert not [f for f in result.findings if f.refuses]


def test_processed_log_probabilities_of_a_filter_are_named_by_the_logits(
    played: tuple[torch.nn.Module, PatchSpec, list[dict[str, Any]]], tmp_path: Path
) -> None:
    model, _, _ = played
    rows = draw(model, top_p=0.95, seed=5)
    for row in rows:
        ids = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"]])
        with torch.no_grad():
            ordered = model(input_ids=ids, use_cache=False).logits[0, 5:-1].float().softmax(-1).sort(-1, descending=True).values
        kept = (ordered * (ordered.cumsum(-1) - ordered < 0.95)).sum(-1).double().numpy()
        row["inference_logprobs"] = ((np.array(row["inference_logprobs"]) - np.log(kept)) * row["mask"]).tolist()
    result = scored(tmp_path, model, rows, None)
    assert result.scored == ()
    assert any("processed, with about top_p=0.95" in f.what for f in result.findings)


def test_other_weights_are_not_scored_as_if_they_had_sampled(
    played: tuple[torch.nn.Module, PatchSpec, list[dict[str, Any]]], tmp_path: Path
) -> None:
    model, spec, rows = played
    other = build(LAYERS)
    with torch.no_grad():
        other.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    result = scored(tmp_path, other, rows, spec)
    assert result.scored == ()
    assert "the patched trainer was not scored: the stock one is not the policy that sampled" in result.notes


def test_the_command_line_scores_a_folder(played: tuple[torch.nn.Module, PatchSpec, list[dict[str, Any]]], tmp_path: Path) -> None:
    model, spec, rows = played
    model.save_pretrained(tmp_path / "model")
    save(spec, tmp_path / "patch.yaml")
    path = samples.write_lines(tmp_path / "rows.jsonl", rows)
    arguments = ["gap", "--dump", path, "--model", tmp_path / "model", "--patch", tmp_path / "patch.yaml", "--out", tmp_path / "out",
                 "--resamples", 200]  # fmt: skip
    first = CliRunner().invoke(app, [str(a) for a in arguments])
    assert first.exit_code == 0, first.output
    found = json.loads((tmp_path / "out" / "gap.json").read_text())
    k3 = {s["name"]: s["gap"]["k3"]["value"] for s in found["scored"]}
    assert k3["everything"] == 0
    assert k3["stock"] > 0
    assert "http://" not in (tmp_path / "out" / "gap.html").read_text().replace("http://www.w3.org", "")
    again = CliRunner().invoke(app, [str(a) for a in arguments])
    assert "variants were taken from an earlier run" in again.output
    assert json.loads((tmp_path / "out" / "gap.json").read_text())["scored"] == found["scored"]


def test_a_response_that_was_written_twice_is_scored_once(tmp_path: Path) -> None:
    from graphalign.dumps.scoring import scorable

    run = samples.run()
    paths = [samples.write_torch(tmp_path / "rollout_data" / "12.pt", samples.slime_rollout(run)),
             samples.write_torch(tmp_path / "train_data" / "12.pt", samples.slime_train(run))]  # fmt: skip
    kept = scorable(collect(paths, load_formats(), progress=lambda *_: None))
    assert len(kept) == len(run)
    assert all(k.training is not None for k in kept)


def test_rows_that_cannot_be_scored_are_named(tmp_path: Path) -> None:
    from graphalign.dumps.scoring import score_dump

    run = samples.run()
    found = collect([samples.write_torch(tmp_path / "rank_0_call_0.pt", samples.miles_loss(run))], load_formats(), progress=lambda *_: None)
    options: dict[str, Any] = {"spec": None, "function": None, "resamples": 200, "progress": lambda *_: None}
    with pytest.raises(GapInputError, match="no token ids") as e:
        score_dump(found, report(found, resamples=200), tmp_path, **options)
    assert "rollout_data" in e.value.hint
    rows = [*samples.own(run, step=1), *samples.own(run, step=2)]
    found = read(tmp_path / "x.jsonl", rows)
    with pytest.raises(GapInputError, match="rows of 2 training steps") as e:
        score_dump(found, report(found, resamples=200), tmp_path, **options)
    assert "--step" in e.value.hint
