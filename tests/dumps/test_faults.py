"""What looks like a gap and is none: named, left out or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphalign.dumps.adapters import load_formats
from graphalign.dumps.collect import Collection, collect
from graphalign.dumps.findings import precision
from graphalign.dumps.measure import report
from graphalign.dumps.rows import Fault
from graphalign.errors import GapInputError
from graphalign.gap.statistics import summarise
from tests.dumps import samples
from tests.gap.data import log_softmax

BIG = samples.run(40, 40)
"""Enough responses that one faulty one is below the share at which the dump is not trusted."""


def read(tmp_path: Path, rows: list[dict[str, Any]], name: str = "x.jsonl") -> Collection:
    return collect([samples.write_lines(tmp_path / name, rows)], load_formats(), progress=lambda *_: None)


def shift(row: dict[str, Any]) -> None:
    x = row["training_logprobs"]
    row["training_logprobs"] = [*x[1:], -1.0]


def nan(row: dict[str, Any]) -> None:
    row["training_logprobs"][3] = None


def filtered(row: dict[str, Any]) -> None:
    row["inference_logprobs"][3] = float("-inf")


def positive(row: dict[str, Any]) -> None:
    row["training_logprobs"][5] = 0.3


def shorter(row: dict[str, Any]) -> None:
    row["training_logprobs"] = row["training_logprobs"][1:]


def longer_mask(row: dict[str, Any]) -> None:
    row["mask"] = [1] * (len(row["response_token_ids"]) + 1)


def no_mask(row: dict[str, Any]) -> None:
    row["mask"] = [0.5] * len(row["response_token_ids"])


def zeros(row: dict[str, Any]) -> None:
    row["inference_logprobs"][10:20] = [0.0] * 10


def zero_column(row: dict[str, Any]) -> None:
    row["training_logprobs"] = [0.0] * len(row["training_logprobs"])


def tail(row: dict[str, Any]) -> None:
    for name in ("inference_logprobs", "training_logprobs"):
        row[name] = [*row[name], *[0.0] * 10]
    row["response_token_ids"] = [*row["response_token_ids"], *[0] * 10]


def text(row: dict[str, Any]) -> None:
    row["inference_logprobs"] = ["-1.0 nats"] * len(row["response_token_ids"])


def ids(row: dict[str, Any]) -> None:
    row["response_token_ids"] = [-1, *row["response_token_ids"][1:]]


FAULTS: list[tuple[Callable[[dict[str, Any]], None], Fault]] = [
    (shift, Fault.SHIFTED), (nan, Fault.UNDEFINED), (filtered, Fault.FILTERED), (positive, Fault.POSITIVE), (shorter, Fault.LENGTHS),
    (longer_mask, Fault.LENGTHS), (no_mask, Fault.MASK), (zeros, Fault.ZEROS), (zero_column, Fault.ZEROS), (tail, Fault.ZEROS),
    (text, Fault.NUMBERS), (ids, Fault.TOKENS),
]  # fmt: skip


@pytest.mark.parametrize(("break_it", "fault"), FAULTS, ids=lambda x: getattr(x, "__name__", None))
def test_one_faulty_row_is_left_out_and_named(break_it: Callable[[dict[str, Any]], None], fault: Fault, tmp_path: Path) -> None:
    rows = samples.own(BIG)
    break_it(rows[7])
    found = read(tmp_path, rows)
    assert {f: x.count for f, x in found.faults.items()} == {fault: 1}
    assert found.faults[fault].examples[0].startswith("x.jsonl line 8")
    result = report(found, resamples=200)
    kept = [i for i in range(len(BIG)) if i != 7]
    want = summarise([BIG.inference[i] for i in kept], [BIG.training[i] for i in kept], resamples=200)
    assert result.gap == want
    assert result.left_out[0].rows == 1


@pytest.mark.parametrize(("break_it", "fault"), FAULTS[:4], ids=lambda x: getattr(x, "__name__", None))
def test_many_faulty_rows_refuse_the_dump(break_it: Callable[[dict[str, Any]], None], fault: Fault, tmp_path: Path) -> None:
    rows = samples.own(BIG)
    for row in rows[:4]:
        break_it(row)
    result = report(read(tmp_path, rows), resamples=200)
    assert result.gap is None
    assert result.findings[0].refuses
    assert f"4 of 40 rows are faulty, 4 of them: {fault.value}" in result.findings[0].what
    assert report(read(tmp_path, rows), resamples=200, anyway=True).gap is not None


def test_a_row_of_six_tokens_shifted_by_one_is_found(tmp_path: Path) -> None:
    rows = samples.own(BIG)
    for name in ("inference_logprobs", "training_logprobs", "response_token_ids"):
        rows[3][name] = rows[3][name][:6]
    shift(rows[3])
    assert read(tmp_path, rows).faults[Fault.SHIFTED].count == 1


@pytest.mark.parametrize("by", [1, -1])
def test_a_mask_of_predicted_tokens_is_found(by: int, tmp_path: Path) -> None:
    rows = samples.nemo(BIG)
    rows[5]["input_lengths"] = [len(rows[5]["token_ids"][0])]  # padding included, or the mask's last 1 would be cut off
    rows[5]["token_loss_mask"] = [np.roll(rows[5]["token_loss_mask"][0], by).tolist()]
    found = read(tmp_path, rows, "train_data_step1.jsonl")
    assert {f: x.count for f, x in found.faults.items()} == {Fault.MASK_SHIFTED: 1}


def test_certain_tokens_are_no_fault(tmp_path: Path) -> None:
    """Exact zeros, also in runs, and a trainer that is nearly as sure."""
    rows = samples.own(BIG)
    for row in rows:
        row["inference_logprobs"][4:9] = [0.0] * 5
        row["training_logprobs"][4:9] = [-1e-7, 0.0, -3e-6, 0.0, -1e-4]
    assert not read(tmp_path, rows).faults


@pytest.mark.parametrize(
    ("rounding", "words"),
    [
        (lambda x: (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64), "BF16 numbers"),
        (lambda x: x.astype(np.float16).astype(np.float64), "FP16 numbers"),
        (lambda x: np.round(x, 4), "numbers with 4 decimals"),
        (lambda x: np.round(x, 3).astype(np.float32).astype(np.float64), "numbers with 3 decimals"),
        (lambda x: x, None),
        (lambda x: np.round(x, 7), None),
    ],
)
@pytest.mark.parametrize("column", ["inference", "training"])
def test_columns_that_were_rounded_are_refused(rounding: Any, words: str | None, column: str, tmp_path: Path) -> None:
    run = samples.run(40, 40)
    setattr(run, column, [rounding(x) for x in getattr(run, column)])
    result = report(read(tmp_path, samples.own(run)), resamples=200)
    assert (result.gap is None) == (words is not None)
    assert [f.what for f in result.findings if f.kind == "precision"] == (
        [f"the {column} column holds {words} only: its own rounding would be shown as the gap"] if words else []
    )


def test_few_values_and_zeros_say_nothing_about_precision() -> None:
    assert precision(np.array([-1.0, -2.0, -0.5] * 50)) is None
    assert precision(np.zeros(100)) is None


def truncate(run: samples.Run, top_p: float) -> samples.Run:
    """The same policy, sampled with top_p and reported as processed log-probabilities: renormalised on what was kept."""
    rng = np.random.default_rng(5)
    inference, training, responses = [], [], []
    for z in run.policy.logits:
        log_p = log_softmax(z)
        order = np.argsort(-log_p, axis=1)
        ordered = np.take_along_axis(np.exp(log_p), order, 1)
        kept = np.cumsum(ordered, 1) - ordered < top_p
        mass = np.where(kept, ordered, 0)
        ranks = np.array([rng.choice(len(m), p=m / m.sum()) for m in mass])
        token = order[np.arange(len(z)), ranks]
        raw = log_p[np.arange(len(z)), token]
        inference.append(np.minimum(raw - np.log(mass.sum(1)), 0).astype(np.float32).astype(np.float64))
        training.append(np.minimum(raw + 0.01 * rng.normal(size=len(raw)) * np.minimum(1, -raw), 0).astype(np.float32).astype(np.float64))
        responses.append(token.tolist())
    return samples.Run(run.prompts, responses, inference, training, run.policy)


@pytest.mark.parametrize("top_p", [0.9, 0.95, 0.98])
def test_truncated_log_probabilities_are_no_gap(top_p: float, tmp_path: Path) -> None:
    run = truncate(samples.run(60, 120), top_p)
    result = report(read(tmp_path, samples.own(run)), resamples=500)
    assert result.gap is None
    assert any(f.refuses and ("truncated distribution" in f.what or "processed" in f.what) for f in result.findings), result.findings
    shown = report(read(tmp_path, samples.own(run)), resamples=500, anyway=True)
    assert shown.gap is not None
    assert shown.sampling_bias is not None
    assert shown.sampling_bias.value > 0.2 * (1 - top_p)


def test_rounding_alone_is_not_taken_for_truncation(tmp_path: Path) -> None:
    """The trainer is off by rounding on logits that are its own: p is a distribution, and tokens are drawn from q."""
    for seed in range(4):
        run = samples.run(60, 120, seed=seed)
        rng = np.random.default_rng(seed)
        training = [log_softmax(z + 0.05 * rng.normal(size=z.shape)) for z in run.policy.logits]
        run.training = [x[np.arange(len(i)), i].astype(np.float32).astype(np.float64) for x, i in zip(training, run.responses, strict=True)]
        result = report(read(tmp_path, samples.own(run)), resamples=500)
        assert result.findings == ()
        assert result.gap is not None
        assert result.sampling_bias is not None
        assert abs(result.sampling_bias.value) < 2e-3


@pytest.mark.parametrize("temperature", [0.7, 0.95, 1.05])
def test_another_temperature_is_no_gap(temperature: float, tmp_path: Path) -> None:
    run = samples.run(60, 120, temperature=temperature)
    rng = np.random.default_rng(2)
    training = [log_softmax(z + 0.05 * rng.normal(size=z.shape)) for z in run.policy.logits]
    run.training = [x[np.arange(len(i)), i].astype(np.float32).astype(np.float64) for x, i in zip(training, run.responses, strict=True)]
    result = report(read(tmp_path, samples.own(run)), resamples=500)
    assert result.gap is None
    assert "temperature" in result.findings[0].hint or "temperature" in result.findings[0].what


def test_tokens_that_were_drawn_at_another_temperature_are_named_by_the_entropy(tmp_path: Path) -> None:
    """Both columns at temperature 1, tokens drawn at 0.8: the difference is rounding, but no KL divergence."""
    made = samples.run(60, 120, temperature=0.8)
    made.inference = [x.astype(np.float32).astype(np.float64) for x in made.policy.logprobs(1.0)]
    made.training = [x.astype(np.float32).astype(np.float64) for x in samples.rounded(made.inference)]
    entropy = [-(np.exp(log_softmax(z)) * log_softmax(z)).sum(1) for z in made.policy.logits]
    result = report(read(tmp_path, samples.prime(made, entropy=entropy)), resamples=500)
    assert result.gap is not None
    assert [f.kind for f in result.findings] == ["sampling"]
    assert "a temperature below 1" in result.findings[0].what
    fair = samples.run(60, 120)
    entropy = [-(np.exp(log_softmax(z)) * log_softmax(z)).sum(1) for z in fair.policy.logits]
    assert report(read(tmp_path, samples.prime(fair, entropy=entropy)), resamples=500).findings == ()


def test_columns_that_are_the_same_are_said_to_be(tmp_path: Path) -> None:
    run = samples.run(10, 40)
    run.training = run.inference
    result = report(read(tmp_path, samples.own(run)), resamples=200)
    assert result.gap is not None
    assert result.gap.k3.value == 0
    assert [f.kind for f in result.findings] == ["copied"]


def test_responses_in_another_order_are_no_gap(tmp_path: Path) -> None:
    run = samples.run(40, 40)
    same = [i for i in range(40) if len(run.training[i]) == 40]
    for i, j in zip(same, [*same[1:], same[0]], strict=True):
        run.training[i] = BIG.training[j]
    rows = [samples.own(run)[i] for i in same]
    result = report(read(tmp_path, rows), resamples=200)
    assert result.gap is None
    assert "not of the same tokens" in result.findings[0].what
    assert "furthest apart at x.jsonl line " in result.findings[0].where


def test_a_column_that_was_never_computed_names_the_switch(tmp_path: Path) -> None:
    """NeMo-RL writes zeros for prev_logprobs with force_on_policy_ratio."""
    rows = samples.nemo(BIG)
    for row in rows:
        row["prev_logprobs"] = [[0.0] * len(row["prev_logprobs"][0])]
        row["sample_loss_mask"] = [0.5]  # a weight, which does count
    with pytest.raises(GapInputError, match="zeros where log-probabilities should be") as e:
        report(read(tmp_path, rows, "train_data_step1.jsonl"), resamples=200)
    assert "force_on_policy_ratio=false" in e.value.hint


def test_rows_of_top_tokens_that_hold_everything_were_renormalised(tmp_path: Path) -> None:
    run = samples.run(6, 40)
    lines = samples.completions(run)
    for i, line in enumerate(lines):
        inner = line["choices"][0]["logprobs"]
        inner["top_logprobs"] = [{"a": float(q), "b": float(np.log(-np.expm1(q)))} for q in run.inference[i]]
        line["request"] = {"temperature": 0.6, "top_p": 0.95, "top_k": -1}
        line["response"] = {"choices": line.pop("choices")}
    result = report(read(tmp_path, lines), resamples=200)
    assert [f.kind for f in result.findings] == ["truncated", "sampling"]
    assert "temperature=0.6 (6 responses), top_p=0.95 (6 responses)" in result.findings[1].what


def test_what_is_kept_of_a_large_dump_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphalign.dumps import collect as module

    kept = module._Reservoir(500)
    found = read(tmp_path, samples.own(BIG))
    for k in found.kept:
        kept.offer(k)
    assert kept.held <= 500 + 60
    assert kept.offered == len(BIG)
    order = [k.where for k in kept.in_order()]
    assert order == [k.where for k in found.kept if k.where in order]
