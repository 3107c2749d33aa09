"""Bad input is named, with where it is and what to do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphalign.errors import GapInputError
from graphalign.gap.inputs import check, check_reported, check_tokens, rounded_to_bfloat16
from graphalign.gap.temperature import check_temperature, detect_temperature, sampled_temperature
from tests.gap.data import Array, Policy, log_softmax, policy, rounded, take


def refused(inference: list[Array], training: list[Array]) -> GapInputError:
    with pytest.raises(GapInputError) as e:
        check(inference, training)
    assert e.value.exit_code == 2
    assert e.value.where or e.value.hint
    return e.value


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1e-4, 0.01, 0.05, 0.2]))
def test_what_rounding_does_is_accepted(seed: int, size: float) -> None:
    q = policy(seed=seed).logprobs()
    check(q, rounded(q, size, seed))


def test_an_almost_uniform_policy_is_accepted() -> None:
    # A random model: the spread between tokens is smaller than rounding.
    rng = np.random.default_rng(0)
    q = [-6.93 + 1e-3 * rng.normal(size=50) for _ in range(4)]
    check(q, rounded(q, 0.01))


def test_the_check_works_on_a_single_short_response() -> None:
    check([np.array([-1.0])], [np.array([-1.2])])


BROKEN = [
    (np.nan, "log-probability nan is NaN", "TRL passes on a NaN"),
    (-np.inf, "log-probability -inf is −inf: a token that could not have been sampled", "top-p"),
    (np.inf, "log-probability inf is +inf", "overflow"),
    (0.5, "log-probability 0.5 is positive", 'logprobs_mode="raw_logprobs"'),
]


@pytest.mark.parametrize(("value", "what", "hint"), BROKEN)
@pytest.mark.parametrize("side", ["inference", "training"])
def test_values_that_are_no_logprobs(value: float, what: str, hint: str, side: str) -> None:
    good = policy().logprobs()
    bad = [x.copy() for x in good]
    bad[2][7] = value
    e = refused(*((bad, good) if side == "inference" else (good, bad)))
    assert e.what == what
    assert e.where == f"{side}, sequence 2, token 7 of 40"
    assert hint in e.hint


def test_tiny_positive_values_are_zero() -> None:
    check([np.array([5e-7, -1.0])], [np.array([0.0, -1.0])])


def test_probabilities_and_negated_logprobs_are_recognised() -> None:
    good = policy().logprobs()
    assert "take their logarithm" in refused([np.exp(x) for x in good], good).hint
    assert "change the sign" in refused([-x for x in good], good).hint


def test_a_distribution_in_the_place_of_a_token() -> None:
    p = policy()
    e = refused([log_softmax(z) for z in p.logits], p.logprobs())
    assert e.what == "log-probabilities of shape (40, 64): one number per token is wanted"
    assert "by its id and not by its rank" in e.hint


def test_empty_responses() -> None:
    good = policy().logprobs()
    bad = [good[0], np.zeros(0), *good[2:]]
    e = refused(bad, bad)
    assert str(e) == (
        "1 of 6 responses are empty\n"
        "  where: inference, sequences 1\n"
        "  try:   check max_tokens, the stop tokens and the mask, or leave these sequences out"
    )
    check(bad, bad, allow_empty=True)
    with pytest.raises(GapInputError, match="2 of 2 responses are empty"):
        check([np.zeros(0)] * 2, [np.zeros(0)] * 2, allow_empty=True)


def test_lengths_that_differ() -> None:
    q = policy().logprobs()
    assert refused(q, q[:-1]).what == "inference has 6 sequences, training 5"
    e = refused(q, [x[:-1] for x in q])
    assert e.what == "inference has 40 tokens, training 39"
    assert e.where == "sequence 0, and 5 more"
    assert "one token fewer everywhere" in e.hint
    assert "one token more everywhere" in refused([x[:-1] for x in q], q).hint
    assert "without prompt and padding" in refused(q, [np.tile(x, 2) for x in q]).hint
    mixed = [x[: 10 + i] for i, x in enumerate(q)]
    assert "another order" in refused(mixed, mixed[::-1]).hint


def test_a_shift_by_one_token() -> None:
    q = policy().logprobs()
    e = refused([x[:-1] for x in q], rounded([x[1:] for x in q]))
    assert "shifted by one token" in e.what
    assert "one token earlier" in e.what
    assert "logits[:, :-1]" in e.hint
    assert "one token later" in refused([x[1:] for x in q], rounded([x[:-1] for x in q])).what


def test_other_tokens_or_another_order() -> None:
    p = policy()
    other = Policy(p.logits, [np.roll(i, 1) for i in p.ids]).logprobs()  # a tokenizer whose ids mean other tokens
    e = refused(p.logprobs(), other)
    assert "not of the same tokens" in e.what
    assert "another tokenizer" in e.hint
    assert e.where.startswith("furthest apart at sequence ")
    assert "not of the same tokens" in refused(p.logprobs(), p.logprobs()[::-1]).what


def test_another_model() -> None:
    q = [np.full(4, -1.0)]
    assert refused(q, [np.full(4, -5.0)]).what == "mean |d| is 4 nats: these are not the same policy"


def test_greedy_decoding_with_processed_logprobs() -> None:
    e = refused([np.zeros(40)] * 4, policy(4).logprobs())
    assert e.what == "inference gives every token the same log-probability, 0"
    assert "decodes greedily" in e.hint


@pytest.mark.parametrize("kept", [0.5, 0.8, 0.95])
def test_top_p_renormalised(kept: float) -> None:
    p = policy(12)
    q, t = [], []
    for z in p.logits:
        prob = np.exp(log_softmax(z))
        order = np.argsort(-prob, 1)
        ranked = np.take_along_axis(prob, order, 1)
        inside = np.take_along_axis(np.cumsum(ranked, 1) - ranked < kept, np.argsort(order, 1), 1)
        cut = np.where(inside, z, -np.inf)
        ids = (cut + np.random.default_rng(5).gumbel(size=z.shape)).argmax(1)
        q.append(take(cut, ids))
        t.append(take(z, ids))
    e = refused(q, rounded(t, 0.005))
    assert "its log-probabilities were processed" in e.what
    assert "top-p" in e.hint


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_a_temperature_shows_in_the_tokens_alone_if_it_is_far_from_1(temperature: float) -> None:
    p = policy(8, temperature=temperature)
    e = refused(p.logprobs(temperature), rounded(p.logprobs()))
    assert "d is proportional to the log-probability" in e.what or "processed" in e.what
    assert "temperature" in e.hint


@pytest.mark.parametrize("temperature", [0.5, 0.9, 1.1, 2.0])
def test_the_temperature_of_reported_logprobs_from_logits(temperature: float) -> None:
    p = policy(1, 200, temperature=temperature)
    q = rounded(p.logprobs(temperature), 0.01)[0]
    found = detect_temperature(q, p.logits[0], p.ids[0])
    assert found.value == pytest.approx(temperature, rel=0.01)
    assert not found.is_one
    with pytest.raises(GapInputError, match=rf"are those of temperature {found.value:.3g}: mean \|d\|"):
        check_temperature(q, p.logits[0], p.ids[0])


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_tokens_drawn_at_another_temperature_with_raw_logprobs(temperature: float) -> None:
    # What vLLM does by default: it samples at the temperature and reports the raw policy.
    p = policy(1, 400, temperature=temperature)
    found = sampled_temperature(p.logits[0], p.ids[0])
    assert found.error is not None
    assert abs(found.value - temperature) < 4 * found.error
    with pytest.raises(GapInputError, match=r"the tokens were drawn at temperature"):
        check_temperature(p.logprobs()[0], p.logits[0], p.ids[0])


def test_temperature_1_is_accepted_and_its_standard_error_is_right() -> None:
    scores = []
    for seed in range(60):
        p = policy(1, 100, seed=seed)
        check_temperature(rounded(p.logprobs(), 0.02, seed)[0], p.logits[0], p.ids[0])
        found = sampled_temperature(p.logits[0], p.ids[0])
        assert found.error is not None
        scores.append((found.value - 1) / found.error)
    assert 0.7 < np.std(scores) < 1.35
    assert abs(np.mean(scores)) < 0.5


def test_logits_that_do_not_fit_are_refused() -> None:
    p = policy(1)
    for logits, ids, message in (
        (p.logits[0][:-1], p.ids[0], "logits of shape"),
        (p.logits[0], p.ids[0] + 64, "outside of the vocabulary of 64"),
        (np.where(p.logits[0] > 9, np.nan, p.logits[0]) * np.nan, p.ids[0], "not finite"),
    ):
        with pytest.raises(GapInputError, match=message):
            detect_temperature(p.logprobs()[0], logits, ids)
    with pytest.raises(GapInputError, match="39 log-probabilities for 40 tokens"):
        detect_temperature(p.logprobs()[0][1:], p.logits[0], p.ids[0])


def top(p: Policy, k: int) -> tuple[list[Array], list[Array]]:
    """Rows as vLLM gives them: the k most likely, and the sampled token."""
    ids, logs = [], []
    for z, i in zip(p.logits, p.ids, strict=True):
        full = log_softmax(z)
        order = np.argsort(-full, 1)[:, :k]
        order[:, -1] = np.where((order == i[:, None]).any(1), order[:, -1], i)
        ids.append(order)
        logs.append(np.take_along_axis(full, order, 1))
    return ids, logs


def test_rows_of_top_tokens() -> None:
    p = policy()
    ids, logs = top(p, 5)
    check_reported(p.ids, ids, logs, inference=p.logprobs(), vocabulary=64)
    cases = [
        (p.ids, [(x + 1) % 64 for x in ids], logs, None, "does not hold the sampled token"),
        (p.ids, ids, [x + 2 for x in logs], None, "sums to more than 1"),
        (p.ids, ids, [np.where(x == x.min(1, keepdims=True), -np.inf, x) for x in logs], None, "holds −inf"),
        (p.ids, ids, [log_softmax(x) for x in logs], None, "of 5 tokens holds all of the probability"),
        (p.ids, ids, logs, [x[:, 0] for x in logs], "gives the sampled token another log-probability"),
    ]
    for sampled, tops, values, used, message in cases:
        with pytest.raises(GapInputError, match=message) as e:
            check_reported(sampled, tops, values, inference=used, vocabulary=64)
        assert e.value.where.startswith("sequence 0, token ")
        assert e.value.hint
    with pytest.raises(GapInputError, match="40 tokens with rows"):
        check_reported(p.ids, ids, [x[1:] for x in logs])


def test_tokens() -> None:
    a = [np.array([5, 6, 7]), np.array([8, 9])]
    check_tokens(a, [x.copy() for x in a], vocabulary=10)
    for b, what, where in (
        ([a[0], np.array([8, 3])], "other tokens than were sampled: 9 against 3", "sequence 1, token 1"),
        ([a[0], np.array([8])], "other tokens than were sampled: 9 against nothing", "sequence 1, token 1"),
    ):
        with pytest.raises(GapInputError, match=what) as e:
            check_tokens(a, b)
        assert e.value.where == where
    with pytest.raises(GapInputError, match="token 9 is outside of the trainer's vocabulary of 9"):
        check_tokens(a, a, vocabulary=9)
    with pytest.raises(GapInputError, match="inference has 2 sequences, training 1"):
        check_tokens(a, a[:1])


def test_bfloat16_logprobs_are_recognised() -> None:
    q = policy().logprobs()
    cut = [((x.astype(np.float32).view(np.uint32) >> 16) << 16).view(np.float32).astype(np.float64) for x in q]
    assert rounded_to_bfloat16(cut)
    assert not rounded_to_bfloat16(q)
    assert not rounded_to_bfloat16([np.zeros(100)])
    assert not rounded_to_bfloat16([])
