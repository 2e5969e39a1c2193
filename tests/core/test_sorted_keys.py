"""`SortedKeys` against a sorted list."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.state import sorted_keys as ranked
from scheduler_svc.core.state.sorted_keys import SortedKeys


@given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=200))
@settings(max_examples=100, deadline=None)
def test_it_is_a_sorted_set_with_positions(changes: list[tuple[int, bool]]) -> None:
    keys: SortedKeys[tuple[int]] = SortedKeys()
    truth: set[tuple[int]] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranked, "_BLOCK", 4)
        for number, wanted in changes:
            key = (number,)
            if wanted and key not in truth:
                keys.add(key)
                truth.add(key)
            elif not wanted and key in truth:
                keys.remove(key)
                truth.remove(key)
            elif not wanted:
                with pytest.raises(KeyError):
                    keys.remove(key)
            in_order = sorted(truth)
            assert list(keys) == in_order
            assert list(reversed(keys)) == in_order[::-1]
            assert len(keys) == len(in_order)
            if in_order:
                assert (keys.first(), keys.last()) == (in_order[0], in_order[-1])
            assert [keys.position(k) for k in in_order] == list(range(len(in_order)))
            assert keys.position((999,)) == len(in_order)


@given(
    st.sets(st.tuples(st.integers(0, 200)), max_size=100),
    st.sets(st.tuples(st.integers(0, 200)), max_size=100),
    st.sets(st.tuples(st.integers(0, 200)), max_size=100),
)
@settings(max_examples=100, deadline=None)
def test_many_keys_together_are_as_good_as_one_after_another(
    before: set[tuple[int]], added: set[tuple[int]], removed: set[tuple[int]]
) -> None:
    together: SortedKeys[tuple[int]] = SortedKeys()
    truth: list[tuple[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranked, "_BLOCK", 4)
        together.add_all(sorted(before))
        together.add_all(sorted(added - before, reverse=True))
        together.remove_all(sorted(removed & (before | added)))
        truth = sorted((before | added) - removed)
        assert list(together) == truth
        assert len(together) == len(truth)
        assert [together.position(key) for key in truth] == list(range(len(truth)))
        together.add_all([(999,), (-1,)])  # few, and beyond both ends
        assert list(together) == [(-1,), *truth, (999,)]
        for key in [(-1,), *truth, (999,)]:
            together.remove(key)
        assert not together


def test_beyond_the_end() -> None:
    keys: SortedKeys[tuple[int]] = SortedKeys()
    with pytest.raises(IndexError):
        keys.first()
    with pytest.raises(IndexError):
        keys.last()
    with pytest.raises(KeyError):
        keys.remove((1,))


def test_growing_keys_are_found_when_a_block_splits() -> None:
    keys: SortedKeys[tuple[int]] = SortedKeys()
    for i in range(5000):
        keys.add((i,))
        assert keys.position((i,)) == i
    assert list(keys) == [(i,) for i in range(5000)]
    for i in reversed(range(5000)):
        keys.remove((i,))
    assert len(keys) == 0


def test_many() -> None:
    keys: SortedKeys[tuple[float, str]] = SortedKeys()
    source = random.Random(1)
    all_keys = [(source.random(), str(i)) for i in range(20_000)]
    for key in all_keys:
        keys.add(key)
    for key in all_keys[::2]:
        keys.remove(key)
    assert list(keys) == sorted(all_keys[1::2])
