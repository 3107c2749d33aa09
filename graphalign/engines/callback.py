"""The gap in the logs of a Transformers `Trainer` (also TRL's)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Self

from transformers import TrainerCallback

from graphalign.monitor import GapMonitor

FILE: Final = "gap_monitor.json"
"""The monitor's state inside a checkpoint folder."""


class GapCallback(TrainerCallback):
    """Adds a monitor's metrics (`gap/k3`, `gap/mean_d`, …) to what the Trainer logs.

    It only passes on: the training loop calls `monitor.step`. A step's metrics are logged once. The monitor's state goes into each
    checkpoint, and is read when training resumes from one.

    A Trainer's callbacks run in order, and its reporters (Weights & Biases, TensorBoard, …) come before those of `callbacks=[…]` and so
    would not see what this one adds: use `attach`, which puts it in front.

    Args:
        monitor: the monitor that the training loop feeds.
        prefix: in front of every metric's name.
    """

    def __init__(self, monitor: GapMonitor, prefix: str = "gap/") -> None:
        self.monitor, self.prefix = monitor, prefix
        self._last: int | None = None

    def attach(self, trainer: Any) -> Self:
        """Put this callback in front of a Trainer's others; returns it."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the metrics of the last step to `logs`, and to the entry of `state.log_history` that was just made of them."""
        step = self.monitor.history[-1][0] if self.monitor.history else None
        if logs is None or step is None or step == self._last:
            return
        self._last = step
        metrics = self.monitor.metrics(self.prefix)
        logs.update(metrics)
        if state.log_history:  # Trainer.log copies logs into it before it calls back (Transformers 5.19)
            state.log_history[-1].update(metrics)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the monitor's state into the checkpoint that was just made, on rank 0."""
        folder = _checkpoint(args, state)
        if state.is_world_process_zero and folder.is_dir():
            (folder / FILE).write_text(json.dumps(self.monitor.state_dict()))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the monitor's state if training resumes from a checkpoint that has one.

        Raises:
            GapInputError: the file holds something else.
        """
        path = _checkpoint(args, state) / FILE
        if state.global_step and path.is_file():
            self.monitor.load_state_dict(json.loads(path.read_text()))


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
