"""The end of a generation. Tokens here are characters: token i is the i-th letter, or bytes where a test
needs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from laps_sd.contract.ends import End
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.engine.sampling.stopping import Cut, Decode, StopText, cut

LETTERS = "abcdefghijklmnopqrstuvwxyz \n"
EOS = frozenset({99})


def decode(ids: Sequence[int]) -> str:
    return "".join(LETTERS[i] for i in ids if i < len(LETTERS))  # 99 is a special token: no text


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def end(
    output: str,
    block: list[int],
    *,
    stop: tuple[str, ...] = (),
    max_tokens: int = 100,
    ignore_eos: bool = False,
) -> Cut:
    spec = Specification("r", (1,), (), Sampling(), max_tokens, stop, ignore_eos)
    before = ids(output)
    return cut(spec, len(before), block, EOS, StopText(stop, decode) if stop else None, before)


def test_nothing_ends_it() -> None:
    assert end("abc", ids("def")) == Cut(3, None)


def test_length_cuts_inside_the_block() -> None:
    assert end("abc", ids("defg"), max_tokens=5) == Cut(2, End.LENGTH)
    assert end("abc", ids("de"), max_tokens=5) == Cut(2, End.LENGTH)


def test_the_eos_token_is_the_last_one_reported() -> None:
    assert end("abc", [0, 99, 1]) == Cut(2, End.STOP)
    assert end("abc", [0, 99, 1], ignore_eos=True) == Cut(3, None)


def test_eos_at_the_last_allowed_token_is_a_stop() -> None:
    assert end("abc", [0, 99], max_tokens=5) == Cut(2, End.STOP)


def test_eos_behind_the_last_allowed_token_is_not_seen() -> None:
    assert end("abc", [0, 99], max_tokens=4) == Cut(1, End.LENGTH)


def test_a_stop_string_inside_the_block_cuts_behind_its_last_token() -> None:
    assert end("abc", ids("xyz def"), stop=("yz",)) == Cut(3, End.STOP_SEQUENCE, 2)


def test_a_stop_string_across_blocks() -> None:
    assert end("hello wo", ids("rld"), stop=("world",)) == Cut(3, End.STOP_SEQUENCE, 5)


def test_the_stop_string_that_is_completed_first_wins() -> None:
    assert end("", ids("abcdef"), stop=("bcde", "cd")) == Cut(4, End.STOP_SEQUENCE, 2)


def test_of_stop_strings_completed_together_the_longest_is_cut() -> None:
    assert end("", ids("abcdef"), stop=("d", "bcd")) == Cut(4, End.STOP_SEQUENCE, 3)


def test_a_stop_string_in_front_of_eos_wins_and_behind_it_is_not_seen() -> None:
    assert end("a", [*ids("stop"), 99], stop=("stop",)) == Cut(4, End.STOP_SEQUENCE, 4)
    assert end("a", [99, *ids("stop")], stop=("stop",)) == Cut(1, End.STOP)


def test_the_cut_counts_characters_of_a_token_with_more_text_than_the_stop_string() -> None:
    words = ["foo", "bar\nbaz", "qux"]
    text = StopText(("\n",), lambda tokens: "".join(words[t] for t in tokens))
    assert text.find([0], [1, 2]) == (1, len("\nbaz"))


def test_characters_of_several_tokens() -> None:
    """A stop string that ends in a character of three bytes, one byte per token."""
    text = StopText(("x€",), decode_bytes)
    block = list("x€y".encode())
    assert text.find(list(b"ab"), block) == (4, 2)
    assert text.find([*b"ab", *block[:2]], block[2:]) == (2, 2)


@given(
    text=st.text("ab", max_size=40),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=40, max_size=40),
)
@settings(max_examples=200, deadline=None)
def test_blocks_do_not_matter(text: str, stop: list[str], sizes: list[int]) -> None:
    """Whatever the blocks, a text ends where it would end token by token."""
    expected = None
    for length in range(1, len(text) + 1):
        begins = [text[:length].find(s) for s in stop if s in text[:length]]
        if begins:
            expected = (length, length - min(begins))
            break
    found, done = None, 0
    for size in sizes:
        block = ids(text[done : done + size])
        if not block or found:
            break
        at = StopText(stop, decode).find(ids(text[:done]), block)
        found = None if at is None else (done + at[0], at[1])
        done += size
    assert found == expected


@pytest.fixture(scope="module")
def runs() -> Decode:
    """Return a decoder in the manner of SentencePiece: token i is the byte i, and a run of byte tokens is text only
    if all of it is. Token 256 reads " x".
    """
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁x": 256}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return lambda ids: str(tokenizer.decode(list(ids)))


@given(
    text=st.text("a\né😀你", max_size=30),
    stop=st.lists(st.text("a\né😀你", min_size=1, max_size=5), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 7), min_size=120, max_size=120),
)
@settings(max_examples=300, deadline=None)
def test_a_run_of_byte_tokens_ends_where_its_text_does(
    runs: Decode, text: str, stop: list[str], sizes: list[int]
) -> None:
    octets, expected = text.encode(), None
    for length in range(1, len(octets) + 1):
        seen = octets[:length].decode(errors="ignore")
        begins = [seen.find(s) for s in stop if s in seen]
        if begins:
            expected = (length, len(seen) - min(begins))
            break
    found, done = None, 0
    for size in sizes:
        if done >= len(octets) or found:
            break
        at = StopText(stop, runs).find([*octets[:done]], [*octets[done : done + size]])
        found = None if at is None else (done + at[0], at[1])
        done += size
    assert found == expected


def test_bytes_that_are_no_text_do_not_hide_a_stop_string_before_them(runs: Decode) -> None:
    """Token by token it is found before they come."""
    character = [*"你".encode()]
    assert StopText(("你",), runs).find([256], [*character, 0xE5, 256]) == (3, 1)
    assert StopText(("你",), runs).find([256], [*character, *[0x80] * 5]) == (3, 1)


def test_of_bytes_that_are_no_text_little_is_decoded(runs: Decode) -> None:
    seen = []

    def watch(tokens: Sequence[int]) -> str:
        seen.append(len(tokens))
        return runs(tokens)

    StopText(("stop",), watch).find([0x80] * 5000, [0x80] * 6)
    assert max(seen) <= 120


@pytest.mark.parametrize("length", [10, 200])
def test_only_the_tail_is_decoded(length: int) -> None:
    seen = []

    def watch(tokens: Sequence[int]) -> str:
        seen.append(len(tokens))
        return decode(tokens)

    StopText(("stop",), watch).find([0] * length, [1, 2])
    assert max(seen) <= 30
