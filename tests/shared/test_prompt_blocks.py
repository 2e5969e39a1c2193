"""Names of the blocks that a prompt starts with: what gateways, schedulers and workers agree on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laps_sd.contract.prompt_blocks import (
    BLOCK_TOKENS,
    MOST_BLOCKS,
    NAME_BYTES,
    name_blocks,
    numbers_of,
    problem_of,
)


def split(names: bytes) -> list[bytes]:
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def tokens(*blocks: int) -> list[int]:
    """Return a prompt of full blocks, each of one token."""
    return [token for token in blocks for _ in range(BLOCK_TOKENS)]


class TestNames:
    def test_are_one_for_each_full_block(self) -> None:
        for length, count in ((0, 0), (63, 0), (64, 1), (127, 1), (128, 2), (200, 3)):
            assert len(name_blocks([7] * length)) == count * NAME_BYTES

    def test_are_equal_as_far_as_two_prompts_begin_equally(self) -> None:
        one, other = split(name_blocks(tokens(1, 2, 3, 4))), split(name_blocks(tokens(1, 2, 9, 4)))

        assert one[:2] == other[:2]
        assert not set(one[2:]) & set(other), "a block after a difference is another one"

    def test_differ_between_salts(self) -> None:
        named = [set(split(name_blocks(tokens(1, 2), salt))) for salt in ("", "acme", "other")]

        assert len(set().union(*named)) == 6

    def test_of_equal_blocks_differ_by_their_place(self) -> None:
        assert len(set(split(name_blocks(tokens(5, 5, 5, 5))))) == 4

    def test_end_after_the_most_blocks(self) -> None:
        prompt = tokens(*range(MOST_BLOCKS + 3))

        assert len(name_blocks(prompt)) == MOST_BLOCKS * NAME_BYTES
        assert name_blocks(prompt) == name_blocks(prompt[: MOST_BLOCKS * BLOCK_TOKENS])

    @given(st.lists(st.integers(0, 2**31 - 1), max_size=400), st.integers(0, 8), st.text(max_size=3))
    def test_continue_from_those_of_the_first_blocks(self, prompt: list[int], known: int, salt: str) -> None:
        before = name_blocks(prompt[: known * BLOCK_TOKENS], salt)

        assert name_blocks(prompt, salt, before) == name_blocks(prompt, salt)

    def test_are_the_same_in_every_release(self) -> None:
        assert name_blocks(tokens(1, 2), "acme").hex() == "32396e89b0765a9fe3f715bba58c36be"

    def test_are_numbers_without_a_copy(self) -> None:
        names = name_blocks(tokens(1, 2))

        assert [number.to_bytes(NAME_BYTES, "little") for number in numbers_of(names)] == split(names)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (b"", ""),
        (bytes(2 * NAME_BYTES), ""),
        (bytes(NAME_BYTES + 1), "must hold 8 bytes for each block, not 9 in all"),
        (bytes(3 * NAME_BYTES), "must name at most 2 blocks, not 3"),
    ],
)
def test_names_of_a_peer_are_bounded(names: bytes, problem: str) -> None:
    assert problem_of(names, most=2) == problem
