"""Text from tokens, however they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.model.detokenizer import REPLACEMENT, Decode, Detokenizer, TokenDecoder
from gateway.model.files import ModelFiles

ids_lists = st.lists(st.integers(0, 330), max_size=60)
texts = st.text(
    alphabet=st.one_of(st.sampled_from("abST €é😀\n"), st.characters(exclude_categories=["Cs"])), max_size=30
)
stops = st.lists(st.text(alphabet="abST €", min_size=1, max_size=4), max_size=3)
cuts = st.lists(st.integers(0, 60), max_size=8)

anything = settings(max_examples=200, deadline=None)
joined_or_not = pytest.mark.parametrize("joins", [False, True])
"""The tiny model's decoder joins bytes, so both ways must give the same."""


def pieces(ids: Sequence[int], cut_at: Sequence[int]) -> list[list[int]]:
    places = sorted({0, len(ids), *(place for place in cut_at if place < len(ids))})
    return [list(ids[begin:end]) for begin, end in pairwise(places)]


def whole_text(model: ModelFiles, ids: Sequence[int]) -> str:
    return model.decode([token for token in ids if token not in model.silent_ids]).rstrip(REPLACEMENT)


def before_stop(text: str, stop: Sequence[str]) -> str:
    return text[: min([position for position in map(text.find, stop) if position >= 0], default=len(text))]


class Uncut:
    """T(n) as a decoder returns it that decodes all tokens since the last whole character for each new one."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.window: list[int] = []
        self.chunk_start = 0
        self.given = 0

    def feed(self, ids: Sequence[int]) -> str:
        return "".join([self._feed_one(token) for token in ids])

    def _feed_one(self, token: int) -> str:
        self.window.append(token)
        text = self.decode(self.window)
        settled = text.rstrip(REPLACEMENT)
        grown = settled[self.given :]
        self.given = max(self.given, len(settled))
        if settled == text:
            chunk = self.window[self.chunk_start :]
            if of_chunk := self.decode(chunk):
                self.window, self.given = chunk, len(of_chunk)
            self.chunk_start = len(self.window)
        return grown


def runs_of(tokens: Sequence[int]) -> st.SearchStrategy[list[int]]:
    """Token ids in which the same few are often repeated."""
    one = st.sampled_from(tokens)
    run = st.builds(
        lambda some, times: some * times, st.lists(one, min_size=1, max_size=3), st.integers(1, 40)
    )
    return st.lists(run, max_size=6).map(lambda found: [token for each in found for token in each])


@pytest.fixture(scope="module")
def tiny(model: ModelFiles) -> ModelFiles:
    return model


@joined_or_not
@anything
@given(ids=ids_lists, cut_at=cuts)
def test_any_split_of_any_tokens_gives_the_text_of_all(
    tiny: ModelFiles, joins: bool, ids: list[int], cut_at: list[int]
) -> None:
    output = Detokenizer(tiny.decode, silent_ids=tiny.silent_ids, joins=joins)
    text = "".join(output.feed(piece) for piece in pieces(ids, cut_at)) + output.finish()

    assert text == whole_text(tiny, ids)
    assert output.text_offset == len(text)


@joined_or_not
@anything
@given(text=texts, cut_at=cuts)
def test_valid_text_comes_out_in_whole_characters(
    tiny: ModelFiles, joins: bool, text: str, cut_at: list[int]
) -> None:
    text = text.replace(REPLACEMENT, "")
    output = Detokenizer(tiny.decode, silent_ids=tiny.silent_ids, joins=joins)
    shown = ""
    for piece in pieces(tiny.encode_rendered(text), cut_at):
        shown += output.feed(piece)
        assert REPLACEMENT not in shown
        assert text.startswith(shown)
    assert shown + output.finish() == text


@joined_or_not
@anything
@given(text=texts, stop=stops, cut_at=cuts)
def test_no_stop_string_is_ever_shown_in_part_or_whole(
    tiny: ModelFiles, joins: bool, text: str, stop: list[str], cut_at: list[int]
) -> None:
    ids = tiny.encode_rendered(text)
    expected = before_stop(whole_text(tiny, ids), stop)
    output = Detokenizer(tiny.decode, stop=stop, silent_ids=tiny.silent_ids, joins=joins)
    shown = ""
    for piece in pieces(ids, cut_at):
        shown += output.feed(piece)
        assert expected.startswith(shown)
    assert shown + output.finish() == expected


@joined_or_not
@anything
@given(text=texts, stop=stops, early=st.integers(0, 30), cut_at=cuts)
def test_a_stop_string_within_the_first_min_tokens_is_shown(
    tiny: ModelFiles, joins: bool, text: str, stop: list[str], early: int, cut_at: list[int]
) -> None:
    ids = tiny.encode_rendered(text)
    whole, free = whole_text(tiny, ids), len(whole_text(tiny, ids[:early]))
    begins = [whole.find(one, max(0, free - len(one) + 1)) for one in stop]
    expected = whole[: min([begin for begin in begins if begin >= 0], default=len(whole))]
    output = Detokenizer(tiny.decode, stop=stop, min_tokens=early, silent_ids=tiny.silent_ids, joins=joins)
    shown = ""
    for piece in pieces(ids, cut_at):
        shown += output.feed(piece)
        assert expected.startswith(shown)
    assert shown + output.finish() == expected


@joined_or_not
@anything
@given(ids=ids_lists, stop=stops, place=st.integers(0, 60), cut_at=cuts)
def test_a_cursor_resumes_exactly_wherever_it_was_taken(
    tiny: ModelFiles, joins: bool, ids: list[int], stop: list[str], place: int, cut_at: list[int]
) -> None:
    place = min(place, len(ids))
    first = Detokenizer(tiny.decode, stop=stop, silent_ids=tiny.silent_ids, joins=joins)
    shown = "".join(first.feed([token]) for token in ids[:place])
    offset = first.text_offset
    whole = shown + first.feed(ids[place:]) + first.finish()

    again = Detokenizer(tiny.decode, stop=stop, silent_ids=tiny.silent_ids, joins=joins, start_offset=offset)
    resumed = "".join(again.feed(piece) for piece in pieces(ids, cut_at)) + again.finish()

    assert offset == len(shown)
    assert shown + resumed == whole


@joined_or_not
@anything
@given(ids=ids_lists, stop=stops, cut_at=cuts)
def test_how_much_is_shown_depends_on_the_tokens_alone(
    tiny: ModelFiles, joins: bool, ids: list[int], stop: list[str], cut_at: list[int]
) -> None:
    one, many = (
        Detokenizer(tiny.decode, stop=stop, silent_ids=tiny.silent_ids, joins=joins) for _ in range(2)
    )
    for token in ids:
        one.feed([token])
    for piece in pieces(ids, cut_at):
        many.feed(piece)

    assert one.text_offset == many.text_offset


@joined_or_not
@anything
@given(data=st.data(), cut_at=cuts)
def test_runs_of_bytes_that_are_no_text_come_out_as_if_all_of_them_were_decoded_for_each_token(
    tiny: ModelFiles, joins: bool, data: st.DataObject, cut_at: list[int]
) -> None:
    octets = [
        b"\x80",
        b"\xe2",
        b"\x82",
        b"\xac",
        b"\xf0",
        b"\x9f",
        b"\x98",
        b"a",
        b" ",
        b"\xc3",
        b"\xff",
        b"\xef",
    ]
    ids = data.draw(runs_of([*(token_of(tiny, one) for one in octets), NO_TEXT, 330]))
    decoder, uncut = TokenDecoder(tiny.decode, joins=joins), Uncut(tiny.decode)
    for piece in data.draw(st.sampled_from([pieces(ids, cut_at), [[token] for token in ids]])):
        assert decoder.feed(piece) == uncut.feed(piece)


class TestTheEnd:
    def test_cuts_characters_from_the_end_of_the_whole_text(self, tiny: ModelFiles) -> None:
        output = Detokenizer(tiny.decode, stop=["ST"])

        assert output.feed(tiny.encode_rendered("one ST.")) == "one "
        assert output.finish(3) == ""

    def test_has_the_stop_string_that_is_to_be_included(self, tiny: ModelFiles) -> None:
        output = Detokenizer(tiny.decode, stop=["ST"], included=True)

        assert output.feed(tiny.encode_rendered("one ST.")) == "one "
        assert output.finish(1) == "ST"

    def test_gives_what_was_held_back_in_vain(self, tiny: ModelFiles) -> None:
        output = Detokenizer(tiny.decode, stop=["STOP"])

        assert output.feed(tiny.encode_rendered("one STO")) == "one "
        assert output.finish() == "STO"

    def test_never_takes_back_what_was_shown(self, tiny: ModelFiles) -> None:
        output = Detokenizer(tiny.decode)

        assert output.feed(tiny.encode_rendered("one")) == "one"
        assert output.finish(2) == ""
        assert output.text_offset == 3

    def test_drops_an_unfinished_character(self, tiny: ModelFiles) -> None:
        output = Detokenizer(tiny.decode)
        ids = tiny.encode_rendered("a€")

        assert output.feed(ids[:-1]) + output.finish() == "a"

    def test_the_longer_of_two_overlapping_stop_strings_holds_back_more(self, tiny: ModelFiles) -> None:
        output = Detokenizer(tiny.decode, stop=["abcd", "c"])

        assert output.feed(tiny.encode_rendered("xab")) == "x"
        assert output.feed(tiny.encode_rendered("c")) == ""
        assert output.finish(1) == "ab"


class TestOtherDecoders:
    """Tokenizers in the manner of SentencePiece: words begin with ▁, unknown characters are byte tokens."""

    VOCABULARY = ("<unk>", "▁hello", "▁world", "▁", "hel", "lo", *(f"<0x{byte:02X}>" for byte in range(256)))

    @pytest.fixture(scope="class")
    def tokenizer(self) -> Tokenizer:
        vocabulary = {text: number for number, text in enumerate(self.VOCABULARY)}
        tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        return tokenizer

    @anything
    @given(
        words=st.lists(st.sampled_from(["▁hello", "▁world", "▁", "hel", "lo", "é", "😀"]), max_size=20),
        cut_at=cuts,
    )
    def test_any_split_gives_the_text_of_all(
        self, tokenizer: Tokenizer, words: list[str], cut_at: list[int]
    ) -> None:
        tokens = [
            token
            for word in words
            for token in (
                [word] if word in self.VOCABULARY else [f"<0x{byte:02X}>" for byte in word.encode()]
            )
        ]
        ids = [self.VOCABULARY.index(token) for token in tokens]
        output = Detokenizer(lambda ids: str(tokenizer.decode(list(ids))))
        text = "".join(output.feed(piece) for piece in pieces(ids, cut_at)) + output.finish()

        assert text == tokenizer.decode(ids).rstrip(REPLACEMENT)

    @anything
    @given(
        text=st.text("aé😀", max_size=9), more=st.sampled_from([b"", b"\xf0", b"\xf0\x9f\x98"]), cut_at=cuts
    )
    def test_an_unfinished_character_hides_none_before_it(
        self, tokenizer: Tokenizer, text: str, more: bytes, cut_at: list[int]
    ) -> None:
        octets = text.encode() + more
        ids = [self.VOCABULARY.index(token) for token in ("▁hello", *(f"<0x{byte:02X}>" for byte in octets))]
        output = Detokenizer(lambda ids: str(tokenizer.decode(list(ids))))
        shown = "".join(output.feed(piece) for piece in pieces(ids, cut_at)) + output.finish()

        assert shown == "hello" + text

    @anything
    @given(data=st.data(), cut_at=cuts)
    def test_runs_of_bytes_that_are_no_text_come_out_as_if_all_of_them_were_decoded_for_each_token(
        self, tokenizer: Tokenizer, data: st.DataObject, cut_at: list[int]
    ) -> None:
        words = ["▁hello", "▁", "lo", *(f"<0x{byte:02X}>" for byte in b"a\x80\xe2\x82\xac\xf0\x9f\x98\xc3")]
        ids = data.draw(runs_of([*(self.VOCABULARY.index(word) for word in words), len(self.VOCABULARY)]))
        decoder, uncut = (
            kind(lambda ids: str(tokenizer.decode(list(ids)))) for kind in (TokenDecoder, Uncut)
        )
        for piece in data.draw(st.sampled_from([pieces(ids, cut_at), [[token] for token in ids]])):
            assert decoder.feed(piece) == uncut.feed(piece)

    def test_bytes_that_are_no_text_leave_characters_before_them_that_came_together(
        self, tokenizer: Tokenizer
    ) -> None:
        ids = [self.VOCABULARY.index(f"<0x{byte:02X}>") for byte in "À".encode() * 9 + b"\x80"]
        output = Detokenizer(lambda ids: str(tokenizer.decode(list(ids))))

        assert output.feed(ids[:-1]) == "À" * 9
        assert output.feed([ids[-1], self.VOCABULARY.index("▁hello")]) + output.finish() == "�� hello"

    @pytest.mark.parametrize("octets", [b"\x80", b"\x80" + b"a" * 999, b"\xe2\x82\xff", b"\xe2\x82\x82\xc3"])
    def test_of_bytes_that_are_no_text_little_is_decoded_again(
        self, tokenizer: Tokenizer, octets: bytes
    ) -> None:
        ids = [self.VOCABULARY.index(f"<0x{byte:02X}>") for byte in octets] * (1000 // len(octets))

        assert decoded_again(lambda ids: str(tokenizer.decode(list(ids))), ids) < 40


class TestWhatIsDecodedAgain:
    """It stays short for any output: a call must not block the others."""

    def test_of_text(self, tiny: ModelFiles) -> None:
        ids = tiny.encode_rendered("the quick brown € fox ") * 200

        assert decoded_again(tiny.decode, ids) < 12

    @pytest.mark.parametrize(
        "octets", [[b"\x80"], [b"\xe2", b"\x82"], [b"\xf0", b"\x9f", b"\x98"], [b"\x82", b"a", b"\xe2"]]
    )
    def test_of_bytes_that_are_no_text(self, tiny: ModelFiles, octets: list[bytes]) -> None:
        ids = [token_of(tiny, one) for one in octets] * 500

        assert decoded_again(tiny.decode, ids, joins=True) < 40

    @joined_or_not
    def test_of_tokens_without_text(self, tiny: ModelFiles, joins: bool) -> None:
        ids = [token_of(tiny, b"a"), *[NO_TEXT] * 1000, token_of(tiny, b"\xe2"), *[NO_TEXT] * 1000]

        assert decoded_again(tiny.decode, ids, joins=joins) < 40

    def test_of_blanks_that_a_decoder_strips(self) -> None:
        def decode(ids: Sequence[int]) -> str:
            return "".join(" a"[token] for token in ids).removeprefix(" ")

        assert decoded_again(decode, [0] * 1000) < 40


def decoded_again(decode: Decode, ids: Sequence[int], *, joins: bool = False) -> float:
    """Return how many tokens are decoded for each one."""
    decoded = 0

    def counted(some: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(some)
        return decode(some)

    output = Detokenizer(counted, stop=["never"], joins=joins)
    for token in ids:
        output.feed([token])
    return decoded / len(ids)


NO_TEXT = 319
"""A token that the tiny model's configuration has, and its tokenizer has not."""


def token_of(model: ModelFiles, octets: bytes) -> int:
    """Return the token of these bytes."""
    return next(token for token in range(320) if model.token_bytes.bytes_of(token) == octets)
