"""Requests of `laps-sd bench vllm --parts shape`: their lengths come from answers that no scheduler sees."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from bench._vllm.hidden_lengths import Answers, drawn_answers, recorded_answers, token_ids
from bench._vllm.in_core import END_TOKEN
from bench._vllm.shape_driver import OTHER_TOKEN, end_at_lengths, write_tokenizer


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two sources; of the first one two models answered, and `b` more often."""
    rows = [
        {"source": source, "model": model, "prompt": f"{source} question {at}", "output_tokens": at + 1}
        for source, model, count in (("math", "a", 10), ("math", "b", 60), ("chat", "a", 30))
        for at in range(count)
    ]
    file = tmp_path / "answers.jsonl.gz"
    with gzip.open(file, "wt") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    return file


def names(answers: Any) -> set[tuple[str, int]]:
    return {(each.kind, each.length) for each in answers}


def test_a_run_has_equal_parts_of_each_source_and_one_model_of_it(recorded: Path) -> None:
    found = recorded_answers(recorded, vocab=1000, most_prompt=64).run(0, 20)

    assert sorted(each.kind for each in found) == ["chat"] * 10 + ["math"] * 10
    assert len(names(found)) == 20


def test_runs_and_what_is_learnt_beforehand_have_nothing_in_common(recorded: Path) -> None:
    answers = recorded_answers(recorded, vocab=1000, most_prompt=64)
    first, second, before = (
        names(each) for each in (answers.run(0, 20), answers.run(1, 20), answers.learning(30))
    )

    assert before
    assert not first & second
    assert not before & (first | second)
    assert names(answers.run(0, 20)) == first


def test_a_token_is_a_word_a_sign_or_a_line_break() -> None:
    words: dict[str, int] = {}
    ids = token_ids("Is it?\nIt is it.", 100, words)

    assert [word for one in ids for word, number in words.items() if number == one] == [
        *("Is", "it", "?", "\n", "It", "is", "it", ".")
    ]
    assert token_ids("is it", 100, words) == [ids[5], ids[1]]


def test_words_that_find_no_place_in_the_vocabulary_share_the_last_token() -> None:
    ids = token_ids(" ".join(f"w{number}" for number in range(200)), 100, {})

    assert ids[:96] == list(range(3, 99))
    assert set(ids[96:]) == {99}


def test_a_scheduler_can_read_the_words(recorded: Path, tmp_path: Path) -> None:
    answers = recorded_answers(recorded, vocab=1000, most_prompt=64)
    write_tokenizer(answers.words, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    read = {tokenizer.decode(each.ids) for each in answers.run(0, 20) if each.kind == "math"}

    assert {text.rsplit(" ", 1)[0] for text in read} == {"math question"}
    assert len(read) == 10


def test_prompts_at_random_have_no_words(tmp_path: Path) -> None:
    write_tokenizer(drawn_answers(vocab=500, most_prompt=64).words, tmp_path)

    assert not list(tmp_path.iterdir())


def test_drawn_lengths_differ_by_kind_and_prompts_tell_nothing() -> None:
    found = drawn_answers(vocab=500, most_prompt=64).run(0, 400)
    mean = {kind: [each.length for each in found if each.kind == kind] for kind in ("short", "story")}

    assert sum(mean["story"]) > 5 * sum(mean["short"])
    assert all(min(each.ids) >= 3 and max(each.ids) < 500 and len(each.ids) <= 64 for each in found)


def test_a_file_without_answers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "none.jsonl"
    file.write_text("")
    with pytest.raises(ValueError, match="has no answers"):
        recorded_answers(file, vocab=100, most_prompt=8)


def test_small_sources_are_used_again_rather_than_short() -> None:
    drawn = drawn_answers(vocab=500, most_prompt=8).learning(4)
    few = Answers({each.kind: [each] * 3 for each in drawn})

    assert len(few.run(5, 40)) == 40


def test_the_end_token_comes_at_the_length_and_nowhere_else() -> None:
    requests: Any = {
        "a": SimpleNamespace(num_output_tokens=3),
        "b": SimpleNamespace(num_output_tokens=0),
    }
    output = SimpleNamespace(
        req_ids=["a", "b", "gone"], sampled_token_ids=[[7, END_TOKEN, 8], [END_TOKEN], [9]]
    )
    end_at_lengths(requests, output, {"a": 6, "b": 2, "gone": 1})

    assert output.sampled_token_ids == [[7, OTHER_TOKEN, END_TOKEN], [OTHER_TOKEN], [9]]
