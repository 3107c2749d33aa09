"""Has a series moved up? A one-sided CUSUM chart that learns its baseline while it runs."""

from __future__ import annotations

from math import copysign, log, sqrt
from typing import Any, Final

SLACK: Final = 0.5
"""In standard deviations: half the shift that is found soonest (1 σ)."""
LIMIT: Final = 10.0
"""In standard deviations. See `Drift` for what follows from it."""
WARMUP: Final = 30
"""Observations before the first one that is judged."""
SMALLEST: Final = 0.05
"""Standard deviation that is assumed at least: of log k3, so changes of a few percent are never an alarm in a handful of steps."""
_STATE: Final = {"count": int, "mean": float, "squares": float, "lagged": float, "last": float, "sum": float, "excursion": bool}


class Drift:
    """CUSUM for an upward drift (Page, "Continuous Inspection Schemes", 1954), self-starting in the manner of Hawkins ("Self-Starting
    CUSUM Charts for Location and Scale", 1987): S ← max(0, S + u − slack), and S > limit is an alarm.

    u is how unusual an observation is, as a standard normal number: its distance from the mean of the n observations learned before is
    a t statistic with n − 1 degrees of freedom, whatever mean and variance are. Three things keep S low if nothing moves:

    * what is suspicious is not learned: while S > 0 observations wait, and are learned when S is back at 0, or dropped after an alarm.
      From an alarm until S is back at 0 (an excursion) there is no second one;
    * the mean is uncertain by 1/√n standard deviations, which is added to the slack;
    * a gap goes in waves: if neighbours are correlated by ρ > 0, sums vary √((1 + ρ)/(1 − ρ)) times as much (exact for an AR(1)
      process), so u is divided by that, with ρ estimated from what was learned.

    With the defaults, on simulated series: no alarm in 99 of 100 of 3000 steps, and in 96 of 100 if ρ is 0.6; after 100 steps a lasting
    shift of 1, 2, 3 σ is found 22, 7, 4 steps later (medians). tests/gap/test_monitor.py holds part of that.
    """

    def __init__(self, *, slack: float = SLACK, limit: float = LIMIT, warmup: int = WARMUP) -> None:
        if slack < 0 or limit <= 0 or warmup < 3:
            raise ValueError(f"slack must be at least 0, limit above 0 and warmup at least 3: {slack}, {limit}, {warmup}")
        self.slack, self.limit, self.warmup = slack, limit, warmup
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        """Observations learned, their mean, and the sum of squared deviations from it."""
        self.lagged, self.last = 0.0, 0.0
        """Sum of products of neighbouring deviations, and the last deviation."""
        self.sum = 0.0
        """S."""
        self.excursion = False
        """Whether the series is above its baseline since an alarm."""
        self.waiting: list[float] = []
        """Observations since S was last 0."""

    @property
    def deviation(self) -> float:
        """Standard deviation of the baseline, at least `SMALLEST`."""
        return max(sqrt(self.squares / (self.count - 1)), SMALLEST) if self.count > 1 else SMALLEST

    @property
    def correlation(self) -> float:
        """Correlation of neighbours in the baseline, between 0 and 0.9."""
        return min(max(self.lagged / self.squares, 0.0), 0.9) if self.squares > 0 else 0.0

    @property
    def level(self) -> float:
        """S over the limit: above 1 is an alarm."""
        return self.sum / self.limit

    def add(self, x: float) -> bool:
        """Add an observation; whether it raises the alarm (once per excursion)."""
        if self.count >= self.warmup:
            self.sum = max(0.0, self.sum + self._unusual(x) - self.slack - 1 / sqrt(self.count))
        alarm = not self.excursion and self.sum > self.limit
        self.excursion = alarm or (self.excursion and self.sum > 0)
        if self.excursion:
            self.waiting.clear()
            return alarm
        self.waiting.append(x)
        if self.sum == 0:
            for y in self.waiting:
                self._learn(y)
            self.waiting.clear()
        return False

    def _unusual(self, x: float) -> float:
        """u: Wallace's approximation of the t distribution by the normal one (1959), over the effect of correlation."""
        n = self.count
        t = (x - self.mean) / self.deviation * sqrt(n / (n + 1))
        normal = copysign((8 * n - 7) / (8 * n - 5) * sqrt((n - 1) * log(1 + t * t / (n - 1))), t)
        return normal / sqrt((1 + self.correlation) / (1 - self.correlation))

    def _learn(self, x: float) -> None:
        """Welford's running mean and squares (1962), and the same for products of neighbours."""
        self.count += 1
        step = x - self.mean
        self.lagged, self.last = self.lagged + self.last * step, step
        self.mean += step / self.count
        self.squares += step * (x - self.mean)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {**{k: getattr(self, k) for k in _STATE}, "waiting": list(self.waiting)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        for k, kind in _STATE.items():
            setattr(self, k, kind(state[k]))
        self.waiting = [float(x) for x in state["waiting"]]
