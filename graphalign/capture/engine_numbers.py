"""Looks for NaN and Inf on the engine's side: in the checkpoint as it is loaded, and in the logits of one prompt.

Works beside `engine_script` in the engine's process, so it needs only the standard library, torch and vLLM. `broken` is also
the trainer's side's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

TOKENS = 57
"""Length of the prompt whose logits are looked at if none is given."""
BROKEN = "download or convert the checkpoint again; `find --weights dummy` maps roundings without it"
OVERFLOW = "the weights overflow, or are broken: try another checkpoint; `find --weights dummy` maps roundings without it"


def broken(t: Any) -> str:
    """What of a tensor is no number, in words (`3 NaN, 1 Inf of 4096 elements`); empty if nothing is."""
    import torch

    # formats of one byte are quantised weights, of which some have no Inf
    if not isinstance(t, torch.Tensor) or not t.is_floating_point() or t.device.type == "meta" or not t.numel() or t.element_size() == 1:
        return ""
    ends = torch.aminmax(t.detach())  # one pass without a copy, through which NaN comes too
    if torch.isfinite(ends.min) and torch.isfinite(ends.max):
        return ""
    counts = {"NaN": int(t.isnan().sum()), "Inf": int(t.isinf().sum())}
    return ", ".join(f"{n} {kind}" for kind, n in counts.items() if n) + f" of {t.numel()} elements"


def checked(weights: Iterable[tuple[str, Any]], refused: Any) -> Iterator[tuple[str, Any]]:
    """Pass a checkpoint's tensors on, and raise `refused` (`engine_script.Refused`) at the first one that holds NaN or Inf."""
    for name, t in weights:
        if what := broken(t):
            raise refused(f"the checkpoint is broken: {name} holds {what}", where=name, hint=BROKEN, usage=True)
        yield name, t


def look(llm: Any, model: Any, graphs: list[dict[str, Any]], tokens: list[int] | None, limit: int) -> tuple[str, str] | None:
    """Let the engine score one prompt, and look at the log-probabilities that its logits give.

    Args:
        llm: the engine.
        model: its model, in this process.
        graphs: the captured graphs.
        tokens: the prompt; None for one that is spread over the vocabulary.
        limit: most tokens of a prompt.

    Returns:
        What is no number, and where it comes from, in words; None if all logits can be used.
    """
    size = int(model_size(llm))
    given = tokens or [(17 * i + 5) % size for i in range(TOKENS)]
    given = given[: max(limit - 1, 1)]
    seen = _Logits()
    with seen.watching(model):
        _score(llm, given)
    if not seen.bad:
        return None
    first = _First(graphs)
    with first.watching():
        _score(llm, given)
    kinds = " and ".join(sorted(seen.kinds))
    return f"the engine's logits are no numbers: {kinds} for {seen.bad} of {seen.rows} tokens of a prompt", first.words()


def model_size(llm: Any) -> int:
    """Size of the vocabulary."""
    config = llm.llm_engine.model_config if hasattr(llm.llm_engine, "model_config") else llm.llm_engine.vllm_config.model_config
    return int(config.get_vocab_size())


def _score(llm: Any, tokens: list[int]) -> None:
    from vllm import SamplingParams

    # with the prompt's log-probabilities, or only the last token's logits are computed
    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    llm.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)


class _Logits:
    """Counts the rows of logits that give no log-probabilities."""

    def __init__(self) -> None:
        self.rows = self.bad = 0
        self.kinds: set[str] = set()

    @contextlib.contextmanager
    def watching(self, model: Any) -> Any:
        import torch

        original = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = original(*args, **kwargs)
            if isinstance(logits, torch.Tensor):
                # -Inf alone is a masked token; a row of nothing else, and +Inf, give NaN
                lost = logits.float().log_softmax(-1).isnan().any(-1)
                self.rows, self.bad = self.rows + lost.numel(), self.bad + int(lost.sum())
                if lost.any():
                    self.kinds |= {kind for kind, has in (("NaN", logits[lost].isnan()), ("Inf", logits[lost].isinf())) if has.any()}
            return logits

        model.compute_logits = compute_logits
        try:
            yield
        finally:
            del model.compute_logits


class _First:
    """Finds the first op outside Inductor's kernels (GEMM, attention) that reads or writes what is no number."""

    def __init__(self, graphs: list[dict[str, Any]]) -> None:
        nodes = [n for g in graphs if g.get("name") != "tail" for k in g["kernels"] for n in k["nodes"] if n["kind"] == "extern"]
        self.nodes = [n for n in nodes if n["op"] not in ("", "inductor.multi_output")]
        self.ops = {n["op"] for n in self.nodes}
        self.calls: list[str] = []
        self.found: tuple[int, str] | None = None
        """Number of the call, and what it reads or writes."""

    @contextlib.contextmanager
    def watching(self) -> Any:
        import torch

        original, watch = torch._ops.OpOverload.__call__, self

        def call(op: Any, /, *args: Any, **kwargs: Any) -> Any:
            if str(op) not in watch.ops or watch.found is not None:
                return original(op, *args, **kwargs)
            written = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
            given = {**dict(zip([a.name for a in op._schema.arguments], args, strict=False)), **kwargs}
            for name, x in given.items():
                if name not in written and (what := _lost(x)):
                    watch.found = len(watch.calls), f"it reads {what}, which ops before it made"
            result = original(op, *args, **kwargs)
            for out in (*(given.get(n) for n in written), *(result if isinstance(result, tuple | list) else [result])):
                if watch.found is None and (what := _lost(out)):
                    most = max((float(x.abs().max()) for n, x in given.items() if n not in written and _numbers(x)), default=0.0)
                    watch.found = len(watch.calls), f"it reads numbers (up to {most:.3g}) and writes {what}"
            watch.calls.append(str(op))
            return result

        torch._ops.OpOverload.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch._ops.OpOverload.__call__ = original  # type: ignore[method-assign]

    def words(self) -> str:
        """Where it was seen first."""
        if self.found is None:
            return "all GEMMs and attentions of the layers read and write numbers: it comes from the final norm, lm_head, or behind it"
        at, what = self.found
        op = self.calls[at] if at < len(self.calls) else ""
        same = at < len(self.nodes) and self.calls == [n["op"] for n in self.nodes[: len(self.calls)]]
        module = str(self.nodes[at].get("module") or "") if same else ""
        return f"first seen at {module} ({op}): {what}" if module else f"first seen at call {at} of GEMMs and attentions ({op}): {what}"


def _numbers(x: Any) -> bool:
    import torch

    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 0


def _lost(x: Any) -> str:
    """`broken`, but for -Inf alone, which masks hold."""
    what = broken(x)
    return what if what and (bool(x.isnan().any()) or bool((x == float("inf")).any())) else ""
