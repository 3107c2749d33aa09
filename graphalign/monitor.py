"""`graphalign.GapMonitor`: the gap between rollout and training, step by step, in a training loop."""

from __future__ import annotations

import logging
import math
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from graphalign.errors import GapInputError
from graphalign.gap.drift import LIMIT, SLACK, WARMUP, Drift
from graphalign.gap.inputs import check, rounded_to_bfloat16
from graphalign.gap.statistics import GapStatistics, differences, from_sums, sequence_sums

log = logging.getLogger("graphalign")

Array = NDArray[np.float64]
Batch = torch.Tensor | NDArray[Any] | Sequence[Any]
_SMALLEST_K3: Final = 1e-12
"""Nats; a gap of exactly 0 has a logarithm too."""
_VERSION: Final = 1


class GapDriftWarning(UserWarning):
    """The gap between rollout and training has risen above its own baseline."""


class GapMonitor:
    """Follows the gap between the engine that samples and the trainer that learns.

    ```python
    monitor = graphalign.GapMonitor()
    for batch in loop:
        stats = monitor.step(batch.rollout_logps, batch.train_logps, batch.mask)
        logger.log(monitor.metrics())
    ```
    Each step is logged in one line (logger `graphalign`), with intervals over the sequences of that step. A `GapDriftWarning` is issued,
    and logged, when log k3 has drifted upward: see graphalign.gap.drift for the rule, its rate of false alarms and its delay.

    The training log-probabilities have to be those of the weights that sampled, so take them before the optimiser's step (TRL's and verl's
    `old_log_probs`), else the difference contains the update.

    Args:
        window: steps that `history` keeps and `recent` pools.
        warmup: steps before the first one that is judged.
        slack, limit: of the CUSUM chart, in standard deviations of log k3.
        resamples: bootstrap resamples per step.
        seed: of the bootstrap.
        bad_input: "raise" a GapInputError for log-probabilities that cannot be compared, or "warn" and leave the step out.
        gather: pool the sequences of all ranks of torch.distributed (every rank must call `step` then, and gets the same statistics).
        group: the process group to gather over; None for all ranks.
    """

    def __init__(
        self,
        window: int = 50,
        *,
        warmup: int = WARMUP,
        slack: float = SLACK,
        limit: float = LIMIT,
        resamples: int = 500,
        seed: int = 0,
        bad_input: Literal["raise", "warn"] = "raise",
        gather: bool = False,
        group: Any = None,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1: {window}")
        if bad_input not in ("raise", "warn"):
            raise GapInputError(f"bad_input is {bad_input!r}", hint='give "raise" or "warn"')
        self.resamples, self.seed, self.bad_input, self.gather, self.group = resamples, seed, bad_input, gather, group
        self._left_out = False
        self.drift = Drift(slack=slack, limit=limit, warmup=warmup)
        self.history: deque[tuple[int, GapStatistics]] = deque(maxlen=window)
        """The last steps: number and statistics."""
        self.warned: list[int] = []
        """Steps at which the gap was found to have drifted."""
        self._sums: deque[tuple[Array, float]] = deque(maxlen=window)
        self._next = 0
        self._told_rounded = False

    def step(self, rollout_logps: Batch, train_logps: Batch, mask: Batch | None = None, step: int | None = None) -> GapStatistics | None:
        """Add one step.

        Args:
            rollout_logps: what the engine reported for the tokens that it sampled: `[batch, tokens]` (tensor or array, any float dtype),
                or a list of 1-D arrays of different lengths.
            train_logps: the trainer's log-probabilities of the same tokens, in the same shape.
            mask: 1 for generated tokens, 0 for padding, prompt and tool output, in the same shape. Without it trailing positions where both
                sides are exactly 0 are taken for padding.
            step: number of the step; counted if None.

        Returns:
            The statistics of this step; None only if the input was bad and `bad_input="warn"`.

        Raises:
            GapInputError: the log-probabilities cannot be compared; the message says why and where. With `gather`, on all ranks.
        """
        if rollout_logps is None or train_logps is None:
            side = "rollout_logps" if rollout_logps is None else "train_logps"
            raise GapInputError(f"{side} is None", hint="give the log-probabilities of the generated tokens, [batch, tokens]")
        at = self._next if step is None else step
        self._next = at + 1
        try:
            sums, largest = self._collect(rollout_logps, train_logps, mask)
        except GapInputError as e:
            if self.bad_input == "raise":
                raise
            self._left_out = True
            log.warning("gap step %d left out: %s", at, e)
            return None
        self._left_out = False
        found = from_sums(sums, max_abs_d=largest, resamples=self.resamples, seed=self.seed + at)
        self.history.append((at, found))
        self._sums.append((sums, largest))
        alarm = self.drift.add(math.log(max(found.k3.value, _SMALLEST_K3)))
        log.info("gap step %d: %s, drift %.2f", at, found, self.drift.level)
        if alarm:
            self._warn(at, found)
        return found

    def recent(self) -> GapStatistics:
        """Statistics of all sequences of the last `window` steps together, resampled within steps.

        Raises:
            GapInputError: no step yet.
        """
        if not self._sums:
            raise GapInputError("the monitor has no steps yet", hint="call step first")
        strata = [i for i, (sums, _) in enumerate(self._sums) for _ in sums]
        return from_sums(
            np.concatenate([s for s, _ in self._sums]),
            max_abs_d=max(m for _, m in self._sums),
            resamples=self.resamples,
            seed=self.seed,
            strata=strata,
        )

    def metrics(self, prefix: str = "gap/") -> dict[str, float]:
        """The last step for a logger; empty before the first, and if the last was left out. `drift` above 1 is an alarm."""
        if not self.history or self._left_out:
            return {}
        found = self.history[-1][1]
        values = {
            "k3": found.k3.value,
            "mean_d": found.mean_d.value,
            "mean_abs_d": found.mean_abs_d.value,
            "max_abs_d": found.max_abs_d,
            "equal_share": found.equal_share.value,
            "tokens": float(found.tokens),
            "drift": self.drift.level,
        }
        return {prefix + k: v for k, v in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, in plain Python (it can be written as JSON)."""
        return {
            "version": _VERSION,
            "next": self._next,
            "drift": self.drift.state_dict(),
            "warned": list(self.warned),
            "history": [[at, found.model_dump()] for at, found in self.history],
            "sums": [[sums.tolist(), largest] for sums, largest in self._sums],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            GapInputError: not a monitor's state, or of another version.
        """
        try:
            if state["version"] != _VERSION:
                raise GapInputError(
                    f"a monitor's state of version {state['version']}",
                    hint=f"this graphalign reads version {_VERSION}: start a new monitor",
                )
            history = [(int(at), GapStatistics.model_validate(found)) for at, found in state["history"]]
            sums = [(np.asarray(s, np.float64).reshape(-1, 5), float(largest)) for s, largest in state["sums"]]
            following, warned = int(state["next"]), [int(i) for i in state["warned"]]
            self.drift.load_state_dict(state["drift"])
        except (KeyError, TypeError, ValueError) as e:
            raise GapInputError(f"this is not a monitor's state: {e!r}", hint="pass what state_dict returned") from None
        self._next, self.warned = following, warned
        self.history, self._sums = deque(history, self.history.maxlen), deque(sums, self._sums.maxlen)

    def _collect(self, rollout: Batch, train: Batch, mask: Batch | None) -> tuple[Array, float]:
        """`sequence_sums` and the largest |d|, of all ranks if wanted."""
        error: GapInputError | None = None
        sums, largest = np.zeros((0, 5)), 0.0
        try:
            q, p = sequences(rollout, train, mask)
            check(q, p, allow_empty=True)
            if not self._told_rounded and rounded_to_bfloat16(p):
                self._told_rounded = True
                log.warning("training log-probabilities are BF16 numbers: take log_softmax of logits.float(), as vLLM does")
            d = differences(q, p)
            sums, largest = sequence_sums(d), max(float(np.abs(x).max()) for x in d)
        except GapInputError as e:
            error = e
        if self.gather and torch.distributed.is_available() and torch.distributed.is_initialized():
            # A rank that raised alone would leave the others waiting.
            ranks: list[Any] = [None] * torch.distributed.get_world_size(self.group)
            mine = (sums, largest, None if error is None else (error.what, error.where, error.hint))
            torch.distributed.all_gather_object(ranks, mine, group=self.group)
            for rank, (_, _, why) in enumerate(ranks):
                if why is not None:
                    raise GapInputError(why[0], where=f"rank {rank}: {why[1]}", hint=why[2])
            return np.concatenate([s for s, _, _ in ranks]), max(m for _, m, _ in ranks)
        if error is not None:
            raise error
        return sums, largest

    def _warn(self, at: int, found: GapStatistics) -> None:
        self.warned.append(at)
        message = (
            f"the gap drifted upward: k3 is {found.k3.value:.3g} at step {at}, against a baseline of {math.exp(self.drift.mean):.3g} "
            f"(geometric mean of {self.drift.count} steps)\n"
            "  try:   look whether the engine still gets the trainer's weights, whether the patch is live, and at entropy and length; "
            "`graphalign gap` says where the gap comes from"
        )
        log.warning("%s", message)
        warnings.warn(message, GapDriftWarning, stacklevel=3)


def sequences(rollout: Batch, train: Batch, mask: Batch | None) -> tuple[list[Array], list[Array]]:
    """Padded batches as lists of 1-D arrays, one per sequence, of the tokens that count. Arguments as in `GapMonitor.step`.

    Raises:
        GapInputError: shapes differ, or the mask is not one of zeros and ones.
    """
    q, p = _rows(rollout, "rollout_logps"), _rows(train, "train_logps")
    if len(q) != len(p) or any(a.shape != b.shape for a, b in zip(q, p, strict=True)):
        raise GapInputError(
            f"rollout_logps has shape {_shape(rollout)}, train_logps {_shape(train)}",
            hint="give one log-probability per generated token on both sides; TRL and verl return completions without the prompt",
        )
    if mask is None:
        keep = [np.arange(len(a)) < _end((a != 0) | (b != 0)) for a, b in zip(q, p, strict=True)]
    else:
        rows = _rows(mask, "mask")
        if len(rows) != len(q) or any(a.shape != m.shape for a, m in zip(q, rows, strict=True)):
            raise GapInputError(f"mask has shape {_shape(mask)}, rollout_logps {_shape(rollout)}", hint="give the completion's mask")
        if any(not np.isin(m, (0, 1)).all() for m in rows):
            raise GapInputError("the mask holds other values than 0 and 1", hint="give True or 1 for generated tokens, else False or 0")
        keep = [m == 1 for m in rows]
    return [a[k] for a, k in zip(q, keep, strict=True)], [b[k] for b, k in zip(p, keep, strict=True)]


def _end(used: NDArray[np.bool_]) -> int:
    """One past the last position in use."""
    at = np.flatnonzero(used)
    return int(at[-1]) + 1 if len(at) else 0


def _rows(batch: Batch, name: str) -> list[Array]:
    rows = [_array(row, name) for row in (batch if isinstance(batch, list | tuple) else _array(batch, name))]
    if any(row.ndim != 1 for row in rows):
        raise GapInputError(f"{name} has shape {_shape(batch)}", hint="give [batch, tokens], or a list of 1-D arrays")
    return rows


def _array(x: Any, name: str) -> Array:
    try:
        if isinstance(x, torch.Tensor):
            return np.asarray(x.detach().to("cpu", torch.float64).numpy(), np.float64)
        return np.asarray(x, np.float64)  # None, as TRL has it for NaN, becomes NaN
    except (TypeError, ValueError) as e:
        raise GapInputError(f"{name} is not an array of numbers: {e}", hint="give [batch, tokens], or a list of 1-D arrays") from None


def _shape(batch: Batch) -> Any:
    return tuple(batch.shape) if hasattr(batch, "shape") else f"({len(batch)} sequences)"
