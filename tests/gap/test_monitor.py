"""GapMonitor: what it takes, what it says, when it warns."""

from __future__ import annotations

import json
import logging
import math
import socket
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

import graphalign
from graphalign.errors import GapInputError
from graphalign.gap.drift import Drift
from graphalign.gap.statistics import summarise
from graphalign.monitor import GapDriftWarning, GapMonitor, sequences


def batch(scale: float = 0.02, rows: int = 8, tokens: int = 30, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rollout, training and mask, padded on the right with zeros."""
    rng = np.random.default_rng(seed)
    q = -rng.exponential(2, (rows, tokens)) - 0.1
    p = np.minimum(q + scale * rng.normal(size=q.shape), 0)
    mask = np.arange(tokens) < rng.integers(tokens // 2, tokens + 1, (rows, 1))
    return torch.tensor(np.where(mask, q, 0)), torch.tensor(np.where(mask, p, 0)), torch.tensor(mask)


def test_it_is_exported() -> None:
    assert graphalign.GapMonitor is GapMonitor
    assert graphalign.GapDriftWarning is GapDriftWarning


def test_a_step_gives_the_statistics_of_the_tokens_that_count() -> None:
    q, p, mask = batch()
    lists = [[x[m].numpy() for x, m in zip(side, mask, strict=True)] for side in (q, p)]
    expected = summarise(*lists, resamples=500)
    assert GapMonitor().step(q, p, mask) == expected
    assert GapMonitor().step(q.numpy(), p.numpy(), mask.int().numpy()) == expected
    assert GapMonitor().step(q, p) == expected, "trailing zeros on both sides are padding"
    assert GapMonitor().step(*lists) == expected
    noisy = torch.where(mask, p, torch.nan)
    assert GapMonitor().step(q, noisy, mask) == expected, "what is masked is not looked at"


def test_dtypes_and_gradients_do_not_matter() -> None:
    q, p, mask = batch()
    found = GapMonitor().step(q.float(), p.float().requires_grad_(), mask.float())
    assert found is not None
    assert found.k3.value == pytest.approx(GapMonitor().step(q, p, mask).k3.value, rel=1e-3)  # type: ignore[union-attr]


def test_one_line_is_logged_and_metrics_are_flat(caplog: pytest.LogCaptureFixture) -> None:
    monitor = GapMonitor()
    assert monitor.metrics() == {}
    with caplog.at_level(logging.INFO, "graphalign"):
        found = monitor.step(*batch(), step=7)
    assert found is not None
    (record,) = caplog.records
    assert record.getMessage().startswith("gap step 7: ")
    assert "\n" not in record.getMessage()
    assert list(monitor.metrics()) == [
        "gap/k3", "gap/mean_d", "gap/mean_abs_d", "gap/max_abs_d", "gap/equal_share", "gap/tokens", "gap/drift",
    ]  # fmt: skip
    assert monitor.metrics("x/")["x/k3"] == found.k3.value
    assert json.dumps(monitor.metrics())


def test_recent_pools_the_window() -> None:
    monitor = GapMonitor(window=3)
    with pytest.raises(GapInputError, match="no steps yet"):
        monitor.recent()
    steps = [monitor.step(*batch(seed=i)) for i in range(5)]
    assert [at for at, _ in monitor.history] == [2, 3, 4]
    last = [s for s in steps[2:] if s is not None]
    found = monitor.recent()
    assert found.tokens == sum(s.tokens for s in last)
    assert found.k3.value == pytest.approx(sum(s.k3.value * s.tokens for s in last) / found.tokens)
    assert found.max_abs_d == max(s.max_abs_d for s in last)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, p, m: (q, p[:, :-1], m), r"rollout_logps has shape \(8, 30\), train_logps \(8, 29\)"),
        (lambda q, p, m: (q, p, m[:, 1:]), r"mask has shape \(8, 29\), rollout_logps \(8, 30\)"),
        (lambda q, p, m: (q, p, m * 2), "the mask holds other values than 0 and 1"),
        (lambda q, p, m: (q[None], p[None], None), r"rollout_logps has shape \(1, 8, 30\)"),
        (lambda q, p, m: (q, p, m * 0), "8 of 8 responses are empty"),
        (lambda q, p, m: (q * torch.nan, p, m), "is NaN"),
        (lambda q, p, m: ([["a"]], [[0]], None), "rollout_logps is not an array of numbers"),
        (lambda q, p, m: ([[None, -1.0]], [[-1.0, -1.0]], None), "is NaN"),
        (lambda q, p, m: (q.exp(), p, m), "is positive"),
    ],
)
def test_bad_input_is_named(change, message: str, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    arguments = change(*batch())
    with pytest.raises(GapInputError, match=message):
        GapMonitor().step(*arguments)
    lenient = GapMonitor(bad_input="warn")
    assert lenient.step(*arguments) is None
    assert "gap step 0 left out" in caplog.text
    assert lenient.step(*batch()) is not None
    assert [at for at, _ in lenient.history] == [1]


def test_a_row_that_is_masked_as_a_whole_is_left_out() -> None:
    q, p, mask = batch()
    mask[3] = False
    found = GapMonitor().step(q, p, mask)
    assert found is not None
    assert found.sequences == 7
    assert len(sequences(q, p, mask)[0][3]) == 0


def test_bfloat16_training_logprobs_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    q, p, mask = batch(tokens=60)
    monitor = GapMonitor()
    for _ in range(3):
        monitor.step(q, p.bfloat16(), mask)
    assert caplog.text.count("log_softmax of logits.float()") == 1


def run(values: np.ndarray, **settings: float) -> list[int]:
    """Steps at which the chart gives the alarm."""
    chart = Drift(**settings)  # type: ignore[arg-type]
    return [i for i, x in enumerate(values) if chart.add(float(x))]


def test_false_alarms_on_stationary_noise_are_rarer_than_those_of_the_chart_with_a_known_baseline() -> None:
    # Siegmund's approximation with slack 0.5 and limit 4: one in 338 steps (Montgomery's tables: 336).
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(150):
        chart, n = Drift(limit=4), 0
        while n < 3000 and not chart.add(float(rng.normal(-7, 0.3))):
            n += 1
        steps.append(n - chart.warmup)
    assert np.mean(steps) > 338


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_the_default_is_quiet_for_a_long_run(rho: float) -> None:
    rng = np.random.default_rng(1)
    alarmed = 0
    for sigma in (0.01, 0.1, 0.3, 1.0) * 10:
        x = rng.normal(0, sigma, 2000)
        for i in range(1, 2000):  # waves: AR(1)
            x[i] += rho * x[i - 1]
        alarmed += bool(run(-7 + x))
    assert alarmed <= 3


@pytest.mark.parametrize(("shift", "most"), [(1, 40), (2, 10), (5, 4)])
def test_a_shift_is_found_soon_and_warned_about_once(shift: int, most: int) -> None:
    rng = np.random.default_rng(2)
    delays, early = [], 0
    for _ in range(40):
        alarms = run(np.concatenate([rng.normal(-7, 0.2, 200), rng.normal(-7 + 0.2 * shift, 0.2, 200)]))
        found = [a - 200 for a in alarms if a >= 200]
        assert len(found) <= 1
        delays += found
        early += len(alarms) > len(found)
    assert early <= 1
    assert len(delays) >= 38
    assert np.median(delays) <= most


def test_a_slow_drift_is_found() -> None:
    # The gap grows by 0.4 % a step, under noise of 20 % from step to step: × 1.5 after 100 steps.
    rng = np.random.default_rng(3)
    delays = [run(-7 + np.maximum(0, np.arange(600) - 100) * 0.004 + rng.normal(0, 0.2, 600))[0] - 100 for _ in range(40)]
    assert np.median(delays) < 100
    assert max(delays) < 300


def test_a_falling_gap_is_no_alarm() -> None:
    rng = np.random.default_rng(4)
    assert run(-7 - 0.01 * np.arange(300) + rng.normal(0, 0.2, 300)) == []


def test_a_second_excursion_is_a_second_alarm() -> None:
    rng = np.random.default_rng(5)
    low, high = rng.normal(-7, 0.1, (2, 100)), rng.normal(-6.5, 0.1, (2, 10))
    first, second = run(np.concatenate([low[0], high[0], low[1], high[1]]))
    assert 100 <= first < 110
    assert 210 <= second < 220


def test_an_exact_gap_of_zero_is_no_trouble() -> None:
    monitor = GapMonitor()
    q, _, mask = batch()
    for _ in range(60):
        found = monitor.step(q, q, mask)
        assert found is not None
        assert found.equal_share.value == 1
    assert monitor.warned == []


@pytest.mark.parametrize("settings", [{"slack": -1}, {"limit": 0}, {"warmup": 2}])
def test_settings_that_make_no_chart(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="slack must be"):
        GapMonitor(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="window must be"):
        GapMonitor(window=0)


def test_the_monitor_warns_once_per_excursion(caplog: pytest.LogCaptureFixture) -> None:
    monitor = GapMonitor()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(50):
            monitor.step(*batch(seed=i))
    with pytest.warns(GapDriftWarning, match=r"the gap drifted upward: k3 is .* at step 5\d") as caught:  # noqa: PT031
        for i in range(50, 80):
            monitor.step(*batch(0.05, seed=i))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert len(monitor.warned) == 1
    assert 50 <= monitor.warned[0] < 57
    assert monitor.metrics()["gap/drift"] > 1
    assert caplog.text.count("the gap drifted upward") == 1


def test_a_resumed_monitor_goes_on_as_if_nothing_had_happened() -> None:
    whole, first = GapMonitor(window=5, warmup=5), GapMonitor(window=5, warmup=5)
    for i in range(20):
        whole.step(*batch(seed=i))
        if i < 12:
            first.step(*batch(seed=i))
    second = GapMonitor(window=5, warmup=5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for i in range(12, 20):
        second.step(*batch(seed=i))
    assert second.history == whole.history
    assert second.state_dict() == whole.state_dict()
    assert second.recent() == whole.recent()


@pytest.mark.parametrize("state", [{}, {"version": 0}, {"version": 1, "history": 3}, []])
def test_a_state_that_is_none(state: object) -> None:
    with pytest.raises(GapInputError, match="monitor's state"):
        GapMonitor().load_state_dict(state)  # type: ignore[arg-type]


def test_the_callback_adds_to_the_logs_once_and_comes_first() -> None:
    from graphalign.engines.callback import GapCallback

    monitor = GapMonitor()
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=["reporter"]))
    callback = GapCallback(monitor).attach(trainer)
    assert trainer.callback_handler.callbacks == [callback, "reporter"]
    state, logs = SimpleNamespace(log_history=[{"loss": 1.0}]), {"loss": 1.0}
    callback.on_log(None, state, None, logs=logs)
    assert logs == {"loss": 1.0}
    monitor.step(*batch())
    callback.on_log(None, state, None, logs=logs)
    assert logs == {"loss": 1.0, **monitor.metrics()} == state.log_history[-1]
    again: dict[str, float] = {}
    callback.on_log(None, state, None, logs=again)
    assert again == {}


def test_a_trainer_reports_it_and_resumes_it(tmp_path: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from graphalign.engines.callback import GapCallback

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            monitor.step(*batch())
            return {"loss": (super().forward(x) - labels).square().mean()}

    class Reporter(TrainerCallback):  # type: ignore[misc]
        seen: list[dict[str, float]] = []

        def on_log(self, args, state, control, logs=None, **kwargs) -> None:  # type: ignore[no-untyped-def]
            self.seen.append(dict(logs))

    def trainer(steps: int) -> Trainer:
        args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=steps, logging_steps=1, report_to=[], save_steps=2)
        made = Trainer(Model(2, 1), args, train_dataset=[{"x": torch.ones(2), "labels": torch.ones(1)}] * 64, callbacks=[Reporter()])
        GapCallback(monitor).attach(made)
        return made

    monitor = GapMonitor()
    first = trainer(2)
    first.train()
    assert [("gap/k3" in x) for x in Reporter.seen] == [True, True, False]
    assert first.state.log_history[0]["gap/k3"] == Reporter.seen[0]["gap/k3"]
    assert math.isfinite(Reporter.seen[1]["gap/drift"])

    monitor = GapMonitor()
    trainer(3).train(resume_from_checkpoint=True)
    assert [at for at, _ in monitor.history] == [0, 1, 2]


def ranked(rank: int, port: int, out: str) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=rank)
    monitor = GapMonitor(gather=True)
    q, p, mask = batch(rows=4, seed=rank)
    found = monitor.step(q, p, mask)
    assert found is not None
    message = ""
    try:
        monitor.step(q * (torch.nan if rank else 1), p, mask)
    except GapInputError as e:
        message = str(e)
    Path(out, f"{rank}.json").write_text(json.dumps([found.model_dump(), message]))
    torch.distributed.destroy_process_group()


def test_two_ranks_see_the_same_and_fail_together(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(ranked, (port, str(tmp_path)), nprocs=2)
    (first, message), (second, other) = (json.loads((tmp_path / f"{r}.json").read_text()) for r in (0, 1))
    assert first == second
    assert first["sequences"] == 8
    assert message == other
    assert message.startswith("log-probability nan is NaN")
    assert "rank 1: inference, sequence 0, token 0" in message


def test_a_step_that_is_left_out_has_no_metrics() -> None:
    monitor = GapMonitor(bad_input="warn")
    good = np.full((2, 40), -1.0)
    assert monitor.step(good, good + 0.001) is not None
    assert monitor.metrics()
    assert monitor.step(good, np.full((2, 40), np.nan)) is None
    assert monitor.metrics() == {}
    assert monitor.step(good, good + 0.001) is not None
    assert monitor.metrics()


def test_nothing_and_a_misspelt_option_are_named() -> None:
    with pytest.raises(GapInputError, match="train_logps is None"):
        GapMonitor().step(np.zeros((1, 2)), None)
    with pytest.raises(GapInputError, match="bad_input is 'wran'"):
        GapMonitor(bad_input="wran")  # type: ignore[arg-type]
