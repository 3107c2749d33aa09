"""The two sides of a comparison, as a user asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphalign import console
from graphalign.errors import BadInputError

if TYPE_CHECKING:
    from torch import nn

    from graphalign.ir.inference import InferenceGraph
    from graphalign.ir.training import TrainingGraph


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The inference side that a command asks for; fields are those of `capture_inference`."""

    model: str
    python: Path | None
    engine_args: Mapping[str, Any]
    layers: int | None
    weights: Literal["dummy", "real"] | None
    timeout: float
    target: str
    entry: Literal["llm", "server"]
    keep_kernels: Path | None = None
    trust: bool = False
    trainer: str = ""
    """Dtype of the trainer's parameters; empty if it is not known, or there is no trainer."""

    def capture(self, out: Path, stages: console.Stages) -> InferenceGraph:
        """Start the engine, and write its capture to `out`."""
        stages.start("inference")("find the model")
        from graphalign.capture.inference import capture_inference
        from graphalign.engines.dtypes import words
        from graphalign.engines.examples import resolve_model
        from graphalign.engines.quantised import refuse_quantised

        folder = resolve_model(self.model)
        refuse_quantised(folder, self.engine_args)  # before it is said that both sides run in BF16
        if said := words(folder, trainer=self.trainer):
            stages.warn(said)
        return capture_inference(
            folder,
            out,
            python=self.python,
            engine_args=self.engine_args,
            layers=self.layers,
            weights=self.weights,
            timeout=self.timeout,
            progress=stages,
            target=self.target,
            entry=self.entry,
            keep_kernels=self.keep_kernels,
            trust_remote_code=self.trust,
        )


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The training side that a command asks for; fields are those of `capture_training`."""

    model: str
    factory: str | None
    layers: int | None
    dtype: str
    autocast: str
    attention: str
    weights: Literal["dummy", "real"] | None
    logprobs: str
    trust: bool = False
    python: Path | None = None
    """Another environment's, in which it runs."""
    target: str = "cpu"
    """Where it trains: on a GPU, autocast computes other ops in FP32."""
    alone: bool = False
    """Whether no engine is started beside it, which says what the model's own dtype is."""

    def capture(
        self,
        stages: console.Stages,
        *,
        tokens: int | None = None,
        reach: int | None = None,
        then: Callable[[nn.Module], None] | None = None,
    ) -> TrainingGraph:
        """Record one forward of so many tokens, spread over `reach` positions; `then` is called with the model afterwards."""
        stages.start("training")("find the model")
        from graphalign.capture.training import capture_training
        from graphalign.engines.dtypes import words
        from graphalign.engines.examples import resolve_model

        folder = resolve_model(self.model)
        if self.alone and self.factory is None and (said := words(folder, engine=False, trainer=self.dtype)):
            stages.warn(said)
        arguments: dict[str, Any] = {
            "factory": self.factory,
            "layers": self.layers,
            "dtype": self.dtype,
            "autocast": None if self.autocast == "none" else self.autocast,
            "autocast_device": None if self.target == "cpu" else "cuda",
            "attention": self.attention,
            "weights": "checkpoint" if self.weights == "real" else self.weights,
            "logprobs": self.logprobs,
            "reach": reach,
            "trust_remote_code": self.trust,
            **({} if tokens is None else {"tokens": tokens}),
        }
        if self.python is not None:
            from graphalign.capture.elsewhere import capture_training_with

            return capture_training_with(self.python, {"model": folder, **arguments}, progress=stages)
        return capture_training(folder, progress=stages, then=then, **arguments)


def require_trainer(python: Path | None) -> None:
    """Refuse what is no interpreter before the engine starts."""
    if python is not None:
        from graphalign.capture.inference import interpreter

        try:
            interpreter(python)
        except BadInputError as e:
            hint = "give the bin/python of an environment with torch and Transformers"
            raise BadInputError(e.what, where=f"--trainer-python {e.where}", hint=hint) from None
