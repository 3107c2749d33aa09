"""How tokens were drawn and what the engine reported of them, from the logits of the model that drew them.

A filter (top_k, top_p, min_p) leaves no token where chance would have drawn some; a temperature makes likely tokens too frequent or too
rare. Both thin out the tail, so they are compared by likelihood. What the engine reported is compared with the model's log-probabilities at
every temperature, and behind every filter, where q = p / (the probability that the filter keeps).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from graphalign.dumps.report import Finding, Sampling
from graphalign.dumps.rows import Array, Kept
from graphalign.logprobs import LogProbabilities

FILTERS: Final[dict[str, tuple[float, ...]]] = {
    "top_k": (1, 2, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128, 200, 256, 500),
    "top_p": (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999),
    "min_p": (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001),
}
"""Settings that are looked for, strongest first."""
TEMPERATURES: Final = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 2.0)
ONE: Final = TEMPERATURES.index(1.0)
EXPECTED: Final = 14.0
"""Tokens that chance draws where a filter draws none: e^−14 is 8e-7."""
STRAY: Final = 0.05
"""Share of them that may be there all the same: the trainer's order of tokens differs from the engine's by rounding."""
SIGMAS: Final = 5.0
NEAR: Final = 0.02
"""|log T| below which a temperature counts as 1 (as in gap.temperature)."""
HALF: Final = 0.5
"""What the engine reported is processed if the processing brings mean |d| down to this share."""
ROUNDING: Final = 0.2
"""Mean |d| in nats that it has to bring it below: other weights are not near the model's at any temperature."""
VISIBLE: Final = 1e-3
"""Mean |d| in nats below which nothing is said about it."""


class Observer:
    """A log-probability function that looks at the logits as they pass.

    Args:
        function: the trainer's log-probabilities of (logits, tokens).
        keep: per sequence in the order of the calls, which tokens count, `[tokens]` bool.
        reported: per sequence, the engine's log-probabilities of those, `[tokens that count]`.
        temperature: that the function divides the logits by; all that is found is relative to it.
    """

    def __init__(self, function: LogProbabilities, keep: list[Kept], reported: list[Array], temperature: float = 1.0) -> None:
        self.function, self.keep, self.reported, self.temperature, self.calls = function, keep, reported, temperature, 0
        self.tokens = 0
        self.filters = {name: np.zeros((len(grid), 4)) for name, grid in FILTERS.items()}
        """By filter and setting: tokens that chance draws from what it cuts, those that were, Σ −log(kept), Σ |q − log(p / kept)|."""
        self.temperatures = np.zeros((len(TEMPERATURES), 2))
        """By temperature: log-likelihood of the tokens, Σ |q − log p|."""

    def __call__(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        keep = torch.from_numpy(self.keep[self.calls]).to(logits.device)
        reported = torch.from_numpy(self.reported[self.calls]).to(logits.device)
        self.calls += 1
        if bool(keep.any()):
            self._look(logits[keep].float() / self.temperature, tokens[keep], reported)
        return self.function(logits, tokens)

    def _look(self, logits: torch.Tensor, tokens: torch.Tensor, reported: torch.Tensor) -> None:
        self.tokens += len(tokens)
        logits = logits - logits.max(-1, keepdim=True).values
        chosen = logits.gather(-1, tokens[:, None])[:, 0]
        for i, t in enumerate(TEMPERATURES):
            log_p = (chosen / t - (logits / t).logsumexp(-1)).double()
            self.temperatures[i] += (float(log_p.sum()), float((reported - log_p).abs().sum()))
        p = logits.softmax(-1)
        drawn, log_p = p.gather(-1, tokens[:, None]), (chosen - logits.logsumexp(-1)).double()
        likelier = p > drawn
        rank, above = likelier.sum(-1), (p * likelier).sum(-1)
        ordered = p.sort(-1, descending=True).values
        total = ordered.cumsum(-1)
        before = total - ordered
        for name, grid in FILTERS.items():
            for i, setting in enumerate(grid):
                if name == "top_k":
                    kept = total[:, min(int(setting), p.shape[-1]) - 1]
                    outside = rank >= setting
                elif name == "top_p":
                    kept = (ordered * (before < setting)).sum(-1)
                    outside = above >= setting
                else:
                    kept = (ordered * (ordered >= setting * ordered[:, :1])).sum(-1)
                    outside = drawn[:, 0] < setting * ordered[:, 0]
                kept = kept.double().clamp(1e-30, 1)
                off = (reported - log_p + kept.log()).abs()
                self.filters[name][i] += (float((1 - kept).sum()), int(outside.sum()), float(-kept.log().sum()), float(off.sum()))

    def result(self) -> Sampling | None:
        """What was found; None without tokens."""
        if not self.tokens:
            return None
        likelihoods = self.temperatures[:, 0]
        best = int(np.argmax(likelihoods))
        at, curvature = _vertex(best, likelihoods)
        error = 1 / np.sqrt(curvature) if curvature > 0 else np.inf
        gain = float(likelihoods[best] - likelihoods[ONE])
        found: tuple[str, float] | None = None
        for name, grid in FILTERS.items():
            for setting, (expected, seen, likelier, _) in zip(grid, self.filters[name], strict=True):
                if expected >= EXPECTED and seen <= STRAY * expected:
                    if likelier > gain:
                        gain, found = float(likelier), (name, setting)
                    break
        chosen = {name: (found[1] if found is not None and found[0] == name else None) for name in FILTERS}
        top_k = None if chosen["top_k"] is None else int(chosen["top_k"])
        return Sampling(
            tokens=self.tokens, top_k=top_k, top_p=chosen["top_p"], min_p=chosen["min_p"],
            temperature=None if found is not None else float(np.exp(at)), temperature_error=float(np.exp(at) * min(error, 1e3)),
            reported=self._reported(),
        )  # fmt: skip

    def _reported(self) -> str | None:
        """What brings the engine's log-probabilities to the model's, in words; None if they are the model's as they are."""
        plain = self.temperatures[ONE, 1] / self.tokens
        if plain < VISIBLE:
            return None
        options = {f"temperature={t:g}": x for t, x in zip(TEMPERATURES, self.temperatures[:, 1], strict=True)}
        options |= {f"{name}={s:g}": x for name, grid in FILTERS.items() for s, x in zip(grid, self.filters[name][:, 3], strict=True)}
        best = min(options, key=lambda n: options[n])
        left = options[best] / self.tokens
        return f"{best}: mean |d| {left:.3g}, and {plain:.3g} without" if left < min(HALF * plain, ROUNDING) else None


def _vertex(best: int, values: Array) -> tuple[float, float]:
    """Log temperature of the parabola through the best point and its neighbours, and its curvature (the Fisher information of log T)."""
    i = min(max(best, 1), len(values) - 2)
    x, y = np.log(TEMPERATURES[i - 1 : i + 2]), values[i - 1 : i + 2]
    a, b, _ = np.polyfit(x - x[1], y - y[1], 2)
    if a >= 0:
        return float(np.log(TEMPERATURES[best])), 0.0
    return float(np.clip(x[1] - b / (2 * a), x[0], x[2])), float(-2 * a)


def findings_of(s: Sampling) -> list[Finding]:
    """Findings if the tokens were not drawn from the model's own distribution, or the engine reported another."""
    out = []
    if s.reported is not None:
        what = f"the engine's log-probabilities are not the model's, but processed, with about {s.reported}"
        hint = 'start vLLM with logprobs_mode="raw_logprobs", or give --temperature'
        out.append(Finding(kind="processed", what=what, hint=hint, side="inference", refuses=True))
    drawn = [f"{n} about {v:g}" for n, v in (("top_k", s.top_k), ("top_p", s.top_p), ("min_p", s.min_p)) if v is not None]
    if s.temperature is not None and abs(np.log(s.temperature)) > max(NEAR, SIGMAS * s.temperature_error / s.temperature):
        drawn.append(f"a temperature of {s.temperature:.2f} ± {s.temperature_error:.2f} times the one that is compared")
    if drawn:
        what = f"the tokens were drawn with {', '.join(drawn)}, by the stock trainer's logits"
        hint = "the figures hold for these tokens, and estimate no KL divergence: sample with temperature=1, top_p=1, top_k=0, min_p=0"
        out.append(Finding(kind="sampling", what=what, hint=hint, refuses=False))
    return out
