"""Every format is recognised by its fields and gives the same responses; what is of no use is refused with what would help."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from graphalign.dumps.adapters import Adapter, load_formats
from graphalign.dumps.collect import Collection, collect, tokens_of
from graphalign.dumps.measure import report
from graphalign.dumps.rows import Fault
from graphalign.errors import BadInputError, GapInputError
from graphalign.gap.statistics import summarise
from tests.dumps import samples

RUN = samples.run()


def read(*paths: Path, **options: object) -> Collection:
    return collect(list(paths), load_formats(), progress=lambda *_: None, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", samples.BOTH)
def test_both_columns_give_the_gap_of_their_tokens(name: str, tmp_path: Path) -> None:
    step, make = samples.BOTH[name]
    found = read(make(tmp_path, RUN))
    assert [f.format for f in found.files] == [name]
    assert not found.faults
    assert set(found.steps) == {step}
    want = summarise(RUN.inference, RUN.training, resamples=200)
    assert report(found, resamples=200).gap == want
    assert [k.inference.tolist() for k in found.kept] == [x.tolist() for x in RUN.inference]
    if name != "miles-loss":  # it has no tokens
        assert [(a.tolist(), b.tolist()) for a, b in tokens_of(found.kept)] == list(zip(RUN.prompts, RUN.responses, strict=True))


@pytest.mark.parametrize("name", samples.ENGINE)
def test_the_engines_column_alone_is_read_with_its_tokens(name: str, tmp_path: Path) -> None:
    found = read(samples.ENGINE[name](tmp_path, RUN))
    assert found.files[0].format == name.split()[0]
    assert (found.with_training, found.without_training) == (0, len(RUN))
    assert [k.inference.tolist() for k in found.kept] == [x.tolist() for x in RUN.inference]
    assert [(a.tolist(), b.tolist()) for a, b in tokens_of(found.kept)] == list(zip(RUN.prompts, RUN.responses, strict=True))
    assert report(found, resamples=200).gap is None


def test_every_format_that_ships_has_a_sample() -> None:
    assert {a.name for a in load_formats().adapters} == {*samples.BOTH, *samples.ENGINE} - {
        n for n in samples.ENGINE if n.startswith("vllm")
    }


def test_the_entries_of_the_next_token_are_moved(tmp_path: Path) -> None:
    """A format described by a user, whose lists are of predicted tokens: logits[:, :-1] of tokens[:, 1:]."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "adapters:\n- {name: mine, title: Mine, kind: jsonl, needs: [ids, q, p, m], tokens: ids, inference: {field: q, layout: next},\n"
        "   training: {field: p, layout: next}, masks: [{field: m, layout: next}]}\n"
    )
    rows = []
    for i in range(len(RUN)):
        prompt, response = RUN.prompts[i], RUN.responses[i]
        lists = [[*[-9.0] * (len(prompt) - 1), *x] for x in (RUN.inference[i], RUN.training[i])]
        rows.append({"ids": [*prompt, *response], "q": lists[0], "p": lists[1], "m": [*[0] * (len(prompt) - 1), *[1] * len(response)]})
    found = collect([samples.write_lines(tmp_path / "x.jsonl", rows)], load_formats(file), progress=lambda *_: None)
    assert report(found, resamples=200).gap == summarise(RUN.inference, RUN.training, resamples=200)


def test_a_format_may_be_named_and_a_wrong_name_lists_the_right_ones(tmp_path: Path) -> None:
    path = samples.write_lines(tmp_path / "x.jsonl", samples.own(RUN))
    assert read(path, wanted="graphalign").with_training == len(RUN)
    with pytest.raises(BadInputError, match="no format is called 'verl'") as e:
        read(path, wanted="verl")
    assert "nemo-rl" in e.value.hint
    with pytest.raises(BadInputError, match="is of torch files"):
        read(path, wanted="slime-train")


@pytest.mark.parametrize(
    ("rows", "title", "switch"),
    [
        ([{"input": "a", "output": "b", "gts": "c", "score": 1.0, "step": 1}], "verl", "calculate_log_probs=True"),
        ([{"rollout_id": 1, "reward_breakdown": {}, "turns": [{"turn_id": 0}]}], "torchtitan", "log_logprobs"),
        ([{"content": ["x"], "generation_logprobs": [[0]], "prev_logprobs": [[0]], "input_lengths": [1]}], "NeMo-RL", "token_loss_mask"),
        ([{"run_name": "r", "git_commit": "g", "model_name": "m", "timestamp": "t"}], "open-instruct", "_rollouts_"),
    ],
)
def test_files_of_text_are_refused_with_the_switch_that_helps(rows: list[object], title: str, switch: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=f"cannot be used: {title}") as e:
        read(samples.write_lines(tmp_path / "1.jsonl", rows))
    assert switch in e.value.hint


def test_trls_completions_are_refused(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "completions_00001.parquet"
    pq.write_table(pa.table({"step": [1], "prompt": ["a"], "completion": ["b"], "accuracy_reward": [1.0], "advantage": [0.5]}), path)
    with pytest.raises(BadInputError, match="TRL") as e:
        read(path)
    assert "GapMonitor" in e.value.hint


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("open('/dev/null').name and __import__('builtins').__dict__.__setitem__('EXPLODED', 1)",)


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    import builtins

    (tmp_path / "global_step_3_training_input.pkl").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "dump.jsonl").write_bytes(pickle.dumps(Bomb()))
    torch.save({"rollout_id": 1, "samples": [Bomb()]}, tmp_path / "1.pt")
    for name, words in (("global_step_3_training_input.pkl", "SkyRL"), ("dump.jsonl", "is a pickle"), ("1.pt", "more than tensors")):
        with pytest.raises(BadInputError, match=words) as e:
            read(tmp_path / name)
        assert "write_rows" in e.value.hint
    assert not hasattr(builtins, "EXPLODED")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\n\n", "holds no record"),
        (b'{"a": 1}\n', "of no format that is known"),
        (b"[1, 2]\n", "of no format that is known"),
        (b'{"a": ', "is not JSON lines"),
        (b"\x1f\x8b\x08broken", "is damaged"),
        (b"PAR1broken", "no whole Parquet file"),
        (b"PK\x03\x04broken", "no whole torch file"),
        (b"\x00\x01\x02\x03", "is not JSON lines"),
        (b'{"error": {"message": "model not found"}}\n', "begins with an error of a server"),
    ],
)
def test_other_files_are_named_for_what_they_are(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    with pytest.raises(BadInputError, match=words):
        read(path)


def test_the_nearest_format_and_what_it_lacks_are_named(tmp_path: Path) -> None:
    content = samples.slime_train(RUN)
    for sample in content["samples"]:
        del sample["log_probs"]
    with pytest.raises(BadInputError, match="of no format") as e:
        read(samples.write_torch(tmp_path / "12.pt", content))
    assert "slime, train_data" in e.value.hint
    assert "samples.0.log_probs" in e.value.hint
    assert "--use-rollout-logprobs" in e.value.hint


def test_a_line_that_is_cut_short_is_named(tmp_path: Path) -> None:
    path = samples.write_lines(tmp_path / "x.jsonl", samples.own(RUN))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInputError, match="not JSON lines") as e:
        read(path)
    assert f"line {len(RUN)}" in e.value.where


def test_two_formats_that_fit_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("adapters:\n- {name: mine, title: Mine, kind: jsonl, needs: [a], inference: {field: a}}\n")
    file.write_text(file.read_text() + "- {name: other, title: Other, kind: jsonl, needs: [b], inference: {field: b}}\n")
    with pytest.raises(BadInputError, match="fits several formats: mine, other"):
        collect([samples.write_lines(tmp_path / "x.jsonl", [{"a": [-1.0], "b": [-1.0]}])], load_formats(file), progress=lambda *_: None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("adapters: [{name: x, title: X, kind: jsonl, needs: [a], inference: {field: a, layout: tokens}}]", "needs the field `tokens`"),
        ("adapters: [{name: X y, title: X, kind: jsonl, needs: [a], inference: {field: a}}]", "should match"),
        ("adapters: [{name: x, title: X, kind: jsonl, needs: [a], inference: {field: a}, step_from_name: '('}]", "no.* regular expression"),
        ("adapters: 3", "valid tuple"),
        ("adapters: [", "cannot read adapters"),
    ],
)
def test_adapters_that_are_none_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(BadInputError, match=words):
        load_formats(tmp_path / "mine.yaml")


def test_rows_without_log_probabilities_name_the_switch(tmp_path: Path) -> None:
    rows = samples.open_instruct(RUN)
    for row in rows:
        row["logprobs"] = None
    with pytest.raises(GapInputError, match="none of 6 rows can be used") as e:
        report(read(samples.write_lines(tmp_path / "x.jsonl", rows)), resamples=200)
    assert "--save_traces" in e.value.hint


def test_rollouts_with_tools_and_masked_samples_do_not_count(tmp_path: Path) -> None:
    rows = samples.open_instruct(RUN)
    rows[1]["request_info"]["tool_calleds"] = True
    found = read(samples.write_lines(tmp_path / "x.jsonl", rows))
    assert found.faults[Fault.UNUSABLE].count == 1
    assert found.left_out == 0
    lines = samples.nemo(RUN)
    lines[2]["sample_loss_mask"] = [0.0]
    found = read(samples.write_lines(tmp_path / "train_data_step1.jsonl", lines))
    assert (found.empty, found.with_training) == (1, len(RUN) - 1)


def test_the_engine_against_itself_from_two_requests(tmp_path: Path) -> None:
    """Answers that only score their prompt are the prefill of the responses with the same tokens, wherever they stand."""
    prefill = samples.rounded(RUN.inference, 0.01, seed=9)
    lines = samples.prefills(RUN, prefill)
    first = samples.write_lines(tmp_path / "a.jsonl", [*lines[:3], *samples.completions(RUN)])
    second = samples.write_lines(tmp_path / "b.jsonl", lines[3:])
    found = report(read(first, second), resamples=200)
    assert found.gap is None
    assert found.engine_gap == summarise(RUN.inference, prefill, resamples=200)


def test_prompts_that_were_only_scored_are_no_samples(tmp_path: Path) -> None:
    path = samples.write_lines(tmp_path / "a.jsonl", samples.prefills(RUN, RUN.inference))
    with pytest.raises(GapInputError, match="only score 6 prompts") as e:
        report(read(path), resamples=200)
    assert "that sampled them" in e.value.hint


def test_an_echo_is_not_taken_for_the_response(tmp_path: Path) -> None:
    lines = samples.completions(RUN)
    for i, line in enumerate(lines):
        inner = line["choices"][0]["logprobs"]
        inner["token_logprobs"] = [None, *[-1.0] * (len(RUN.prompts[i]) - 1), *inner["token_logprobs"]]
        inner["tokens"] = ["x"] * len(inner["token_logprobs"])
    found = read(samples.write_lines(tmp_path / "x.jsonl", lines))
    assert [k.inference.tolist() for k in found.kept] == [x.tolist() for x in RUN.inference]


def test_files_that_are_one_piece_of_json(tmp_path: Path) -> None:
    for name, content in (("list.json", samples.completions(RUN)), ("one.json", samples.completions(RUN)[0])):
        path = tmp_path / name
        path.write_text(json.dumps(content, indent=1))
        assert next(k.inference.tolist() for k in read(path).kept) == RUN.inference[0].tolist()


def test_a_folder_is_searched_and_steps_are_kept_apart(tmp_path: Path) -> None:
    from graphalign.dumps.files import expand

    for step in (2, 10, 1):
        samples.write_lines(tmp_path / f"train_data_step{step}.jsonl", samples.nemo(samples.run(4, seed=step)))
    (tmp_path / "notes.txt").write_text("x")
    found = read(*expand([tmp_path]))
    assert len(found.files) == 3
    assert [p.name for p in report(found, resamples=200).by_step] == ["1", "2", "10"]
    assert read(*expand([tmp_path]), step="10").with_training == 4
    assert read(*expand([tmp_path]), limit=5).with_training == 5
    with pytest.raises(BadInputError, match="no dump in the folder"):
        expand([samples.write_lines(tmp_path / "empty" / "a.txt", []).parent])
    with pytest.raises(BadInputError, match="no such file"):
        expand([tmp_path / "nope.jsonl"])


def test_a_response_in_several_files_counts_once(tmp_path: Path) -> None:
    """Ranks of one tensor-parallel group write the same; samples of one prompt in one file may be equal."""
    for rank in (0, 1):
        samples.write_torch(tmp_path / "train_data" / f"12_{rank}.pt", samples.slime_columns(RUN))
    found = read(*sorted((tmp_path / "train_data").iterdir()))
    assert (found.with_training, found.repeated) == (len(RUN), len(RUN))
    result = report(found, resamples=200)
    assert result.gap == summarise(RUN.inference, RUN.training, resamples=200)
    assert "6 responses are in several files" in result.notes[0]
    twice = read(samples.write_lines(tmp_path / "x.jsonl", samples.own(RUN) * 2))
    assert (twice.with_training, twice.repeated) == (2 * len(RUN), 0)


def test_our_own_rows_are_checked_when_they_are_written(tmp_path: Path) -> None:
    from graphalign.dumps import write_rows

    path = tmp_path / "deep" / "rows.jsonl.gz"
    rows = [{**row, "inference_logprobs": torch.tensor(row["inference_logprobs"]), "step": 4} for row in samples.own(RUN)]
    assert write_rows(path, rows[:2]) == 2
    assert write_rows(path, rows[2:]) == 4
    found = read(path)
    assert found.with_training == len(RUN)
    assert set(found.steps) == {"4"}
    assert report(found, resamples=200).gap == summarise(RUN.inference, RUN.training, resamples=200)
    with pytest.raises(GapInputError, match="training_logprobs has 3 entries for"):
        write_rows(path, [{**samples.own(RUN)[0], "training_logprobs": [-1.0] * 3}])
    with pytest.raises(GapInputError, match="no inference_logprobs"):
        write_rows(path, [{"prompt_token_ids": [1], "response_token_ids": [2]}])
    write_rows(tmp_path / "nan.jsonl", [{**samples.own(RUN)[0], "inference_logprobs": np.full(len(RUN.responses[0]), np.nan)}])
    assert json.loads((tmp_path / "nan.jsonl").read_text())["inference_logprobs"][0] is None


def test_the_schema_of_adapters_is_closed() -> None:
    assert Adapter.model_config["extra"] == "forbid"


def test_answers_of_the_real_server() -> None:
    """vLLM 0.32.0 on CPU with SmolLM2-135M: four completions, each scored again as a prompt; a chat at temperature 0.7; an echo."""
    found = read(Path(__file__).with_name("data") / "vllm_server_0.32.0.jsonl")
    assert not found.faults
    assert [len(k.inference) for k in found.kept] == [12, 12, 12, 12, 12, 4]
    prompt, response = tokens_of(found.kept)[0]
    assert (prompt.tolist(), response.tolist()[:3]) == ([504, 3575, 282, 4649, 314], [7042, 30, 378])
    assert tokens_of(found.kept)[5][1].tolist() == [28, 7348, 25, 198]
    assert [k.prefill is not None for k in found.kept] == [True] * 4 + [False] * 2
    result = report(found, resamples=200)
    assert result.engine_gap is not None
    assert result.engine_gap.tokens == 48
    assert 0 < result.engine_gap.k3.value < 0.01  # decode against prefill of the same weights
    assert [f.kind for f in result.findings] == ["sampling"]
    assert "temperature=0.7 (1 responses), top_p=0.9 (1 responses)" in result.findings[0].what
