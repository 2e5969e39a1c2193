"""The index of blocks: what it finds, how it forgets, what it costs."""

from __future__ import annotations

import random
import tracemalloc
from array import array

from hypothesis import given
from hypothesis import strategies as st

from laps_sd.contract.prompt_blocks import name_blocks
from scheduler_svc.core.state.block_index import BlockIndex

CHAINS = [name_blocks([number] * 640) for number in range(4)]


def part(chain: int, first: int, last: int) -> bytes:
    return CHAINS[chain][first * 8 : last * 8]


def test_a_prompt_is_found_as_far_as_each_worker_has_it() -> None:
    index = BlockIndex()
    index.add("w1", part(0, 0, 3))
    index.add("w2", part(0, 0, 10))
    index.add("w3", part(1, 0, 10))
    assert index.cached(CHAINS[0]) == {"w1": 3, "w2": 10}
    assert index.cached(part(0, 0, 2)) == {"w1": 2, "w2": 2}
    assert index.cached(CHAINS[2]) == {} == index.cached(b"")


def test_what_a_worker_evicted_is_not_found_any_more() -> None:
    index = BlockIndex()
    index.add("w1", CHAINS[0])
    index.remove("w1", part(0, 4, 10))
    index.remove("w2", part(0, 0, 10))
    assert index.cached(CHAINS[0]) == {"w1": 4}
    assert index.blocks_of("w1") == 4 == len(index)


def test_a_lost_worker_is_not_found_any_more_and_another_one_takes_its_number() -> None:
    index = BlockIndex()
    index.add("w1", CHAINS[0])
    index.add("w2", part(0, 0, 5))
    index.forget("w1")
    index.forget("unknown")
    assert index.cached(CHAINS[0]) == {"w2": 5}
    index.add("w3", part(0, 3, 7))
    index.add("w3", part(0, 0, 3))
    assert index.cached(CHAINS[0]) == {"w2": 5, "w3": 7}


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "forget"]),
        st.sampled_from(["w1", "w2", "w3"]),
        st.integers(0, 3),
        st.integers(0, 10),
        st.integers(0, 10),
    ),
    max_size=60,
)


@given(steps)
def test_it_agrees_with_a_set_for_each_worker(does: list[tuple[str, str, int, int, int]]) -> None:
    index, known = BlockIndex(), {f"w{number}": set[bytes]() for number in (1, 2, 3)}
    for what, worker, chain, first, last in does:
        names = part(chain, first, last)
        blocks = {names[at : at + 8] for at in range(0, len(names), 8)}
        if what == "add":
            index.add(worker, names)
            known[worker] |= blocks
        elif what == "remove":
            index.remove(worker, names)
            known[worker] -= blocks
        else:
            index.forget(worker)
            known[worker] = set()
    for worker, blocks in known.items():
        assert index.blocks_of(worker) == len(blocks)
    for chain in CHAINS:
        for at in range(0, len(chain), 8):
            having = {worker for worker, blocks in known.items() if chain[at : at + 8] in blocks}
            assert set(index.cached(chain[at : at + 8])) == having


@given(st.lists(st.integers(0, 10), min_size=3, max_size=3), st.integers(1, 10))
def test_every_depth_is_found(depths: list[int], asked: int) -> None:
    index = BlockIndex()
    for worker, depth in enumerate(depths):
        index.add(f"w{worker}", part(0, 0, depth))
    expected = {f"w{worker}": min(depth, asked) for worker, depth in enumerate(depths) if depth}
    assert index.cached(part(0, 0, asked)) == expected


def test_a_worker_counts_up_to_the_first_block_that_is_found_missing() -> None:
    """A lost worker leaves equal sets with different numbers, and a liar may leave out any block."""
    index = BlockIndex()
    index.add("lost", part(0, 0, 4))
    index.add("whole", CHAINS[0])
    index.add("liar", part(0, 0, 3) + part(0, 7, 8))
    index.forget("lost")
    assert index.cached(CHAINS[0]) == {"whole": 10, "liar": 3}


def test_blocks_that_only_lost_workers_had_leave_when_others_come() -> None:
    index, rng = BlockIndex(), random.Random(1)
    for worker in range(40):
        index.add(f"w{worker}", array("Q", [rng.getrandbits(64) for _ in range(20_000)]).tobytes())
        index.forget(f"w{worker}")
    assert len(index) < 200_000


def test_a_block_costs_less_than_64_bytes_for_each_worker() -> None:
    rng = random.Random(1)
    blocks = [rng.getrandbits(64) for _ in range(50_000)]
    tracemalloc.start()
    try:
        index = BlockIndex()
        held = 0
        for worker in range(100):
            mine = array("Q", rng.sample(blocks, 1_000)).tobytes()
            index.add(f"w{worker}", mine)
            held += 1_000
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < 64 * held
    assert index.size_bytes < 64 * held
