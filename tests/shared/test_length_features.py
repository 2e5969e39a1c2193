"""Hashed words of a prompt: what gateways send, and what schedulers accept."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laps_sd.contract.length_features import (
    FEATURES,
    LINES,
    MOST_FEATURES,
    MOST_MARKS,
    MOST_WORDS,
    FeatureHash,
    features_of_tokens,
    packed,
    problem_of,
    unpacked,
    words_of,
)

PLAIN = FeatureHash()


def plain(text: str) -> int:
    return zlib.crc32(text.encode()) % FEATURES


class TestWords:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("Write a POEM.", ["write", "a", "poem", "."]),
            ("don't stop_now", ["don't", "stop", "now"]),
            ("in 200 words", ["in", "2", "0", "0", "words"]),
            ("Schreib über naïve Ärzte", ["schreib", "über", "naïve", "ärzte"]),
            ("東京の天気", ["東", "京", "の", "天", "気"]),
            (" \n\t", []),
        ],
    )
    def test_letters_digits_and_marks(self, text: str, words: list[str]) -> None:
        assert words_of(text) == words

    def test_of_a_long_text_the_two_ends(self) -> None:
        text = " ".join(f"w{'x' * (n % 7)}" for n in range(100_000)) + " summarise this"
        words = words_of("begin here " + text)
        assert len(words) == MOST_WORDS
        assert words[:2] == ["begin", "here"]
        assert words[-2:] == ["summarise", "this"]

    def test_a_text_that_just_fits_is_whole(self) -> None:
        fits = " ".join(["word"] * (MOST_WORDS - 1)) + " end"
        assert words_of(fits) == fits.split()
        assert len(words_of(fits + " more")) == MOST_WORDS


class TestFeatures:
    def test_words_and_pairs_by_their_hash(self) -> None:
        assert PLAIN.features_of("Hello, you") == sorted(
            plain(text) for text in ("hello", ",", "you", " hello", "hello ,", ", you")
        )

    def test_line_breaks_by_their_number(self) -> None:
        one_line, two_lines = PLAIN.features_of("a b"), PLAIN.features_of("a\nb")
        assert set(two_lines) - set(one_line) == set(PLAIN.features_of_lines(1))
        assert [len(PLAIN.features_of_lines(least)) for least in LINES] == [1, 2, 3, 4, 5, 6, 7]

    @given(st.text())
    def test_they_are_what_a_scheduler_accepts(self, text: str) -> None:
        assert problem_of(PLAIN.features_of(text)) == ""

    def test_the_most_words_make_no_more_than_the_most_features(self) -> None:
        text = "\n".join(f"{chr(97 + n % 26)}{chr(97 + n // 26)}q" for n in range(600))
        features = PLAIN.features_of(text)
        assert 200 < len(features) <= MOST_FEATURES

    def test_they_are_the_same_in_every_release(self) -> None:
        """Start weights and what a scheduler has learnt are kept by these numbers."""
        features = PLAIN.features_of("Sum 2 numbers!\nWhy?", marks=["system:x"])
        assert features == [
            *(2165, 2859, 4080, 4349, 8013, 8391, 13949),
            *(15885, 17072, 19193, 20078, 22128, 31311, 32723),
        ]

    def test_marks_have_features_of_their_own_up_to_a_number(self) -> None:
        marks = [f"mark{n}" for n in range(MOST_MARKS + 1)]
        of_marks = PLAIN.features_of("", marks)
        assert len(of_marks) == MOST_MARKS
        assert of_marks == PLAIN.features_of("", marks[:-1])
        assert not set(of_marks) & {plain(mark) for mark in marks}

    def test_another_key_gives_others(self) -> None:
        text = "Summarise the second chapter of this book in three sentences"
        mine, theirs = FeatureHash("mine").features_of(text), FeatureHash("theirs").features_of(text)
        assert mine == FeatureHash("mine").features_of(text)
        assert len(mine) == len(theirs) == len(PLAIN.features_of(text))
        assert len(set(mine) & set(theirs)) <= 2

    def test_a_key_only_permutes_them(self) -> None:
        assert sorted(FeatureHash("mine").places) == list(range(FEATURES))

    def test_what_is_no_valid_text_has_features_too(self) -> None:
        assert problem_of(PLAIN.features_of("half a \ud83d pair")) == ""


class TestTokens:
    def test_tokens_and_pairs(self) -> None:
        assert len(features_of_tokens([5, 6, 7])) == 6
        assert features_of_tokens([5, 6]) != features_of_tokens([6, 5])
        assert set(features_of_tokens([5])) < set(features_of_tokens([5, 6]))

    def test_they_are_the_same_in_every_release(self) -> None:
        """A scheduler inside vLLM keeps what it has learnt in a file, by these numbers."""
        assert features_of_tokens([]) == []
        assert features_of_tokens([5]) == [6731, 23206]
        assert features_of_tokens([5, 7, 0]) == [3050, 6731, 13922, 20251, 23206, 30941]

    def test_of_a_long_prompt_the_two_ends(self) -> None:
        half = MOST_WORDS // 2
        ids = list(range(1000))
        assert features_of_tokens(ids) == features_of_tokens([*ids[:half], *ids[-half:]])
        assert len(features_of_tokens(ids)) > 1.9 * MOST_WORDS

    @given(st.lists(st.integers(0, 2**31 - 1)))
    def test_they_are_what_a_core_accepts(self, ids: list[int]) -> None:
        assert problem_of(features_of_tokens(ids)) == ""

    def test_they_are_spread(self) -> None:
        singles = {feature for token in range(20_000) for feature in features_of_tokens([token])}
        assert len(singles) > 0.5 * FEATURES


class TestOfPeers:
    def test_packed_there_and_back(self) -> None:
        features = [0, 7, FEATURES - 1]
        assert list(unpacked(packed(features))) == features
        assert len(packed(features)) == 6
        assert packed([]) == b""

    @pytest.mark.parametrize(
        ("features", "problem"),
        [
            (range(MOST_FEATURES + 1), "at most 256 features, got 257"),
            ([3, 3], "got 3 after 3"),
            ([4, 3], "got 3 after 4"),
            ([FEATURES], f"below {FEATURES}, got {FEATURES}"),
        ],
    )
    def test_what_a_scheduler_refuses(self, features: list[int], problem: str) -> None:
        assert problem in problem_of(features)
        assert problem_of(range(MOST_FEATURES)) == ""
