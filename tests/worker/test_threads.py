"""The kernels on several threads: the same bits for any number of them, and no time when there is nothing to
compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from laps_sd.service.cores import MOST_THREADS
from tests.helpers import wait_until
from tests.worker.drive import finish_all, rotate
from tests.worker.pairs import bfloat16_by_kernels, load_pair
from tests.worker.test_kernels import (
    CONTEXTS,
    DTYPES,
    SETTINGS,
    Model,
    choosing_for,
    for_kernels,
    places_for,
    pool_for,
    pytestmark,  # noqa: F401  the same machines
    random,
    width,  # noqa: F401  each width of vectors
)
from tests.worker.test_kernels_choose import chosen_by_both
from worker_svc.demo import DRAFT_DIR, TARGET_DIR
from worker_svc.engine.cpu import kernels
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.engine.models.plan import KernelPlanner, Piece
from worker_svc.engine.sampling.noise import Noise, NoiseOfRows

COUNTS = (1, 2, 3, 4)
TASKS = Path("/proc/self/task")


@pytest.fixture(autouse=True)
def one_again() -> Iterator[None]:
    yield
    kernels.use_threads(1)


def same_for_all_counts(compute: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Assert that what is computed has the same bits for each number of threads, time and again; return it."""
    kernels.use_threads(1)
    alone = compute()
    for threads in COUNTS:
        kernels.use_threads(threads)
        for _ in range(5):
            for found, expected in zip(compute(), alone, strict=True):
                assert torch.equal(found, expected), f"{threads} threads"
    return alone


class Wide(Model):
    """Sizes at which a single row is worth several threads."""

    heads, kv_heads, size, hidden, inner, tokens = 4, 2, 64, 256, 544, 2003


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 37])
@pytest.mark.parametrize(("outputs", "inputs"), [(31, 2048), (32, 2048), (500, 336), (2048, 80), (1056, 704)])
def test_a_product_has_the_same_bits(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    weight, bias = random(outputs, inputs).to(dtype), random(outputs, seed=1).to(dtype)
    product, x = kernels.Product(weight, bias), random(rows, inputs, seed=2).to(dtype)
    same_for_all_counts(lambda: [product(x)])


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 64), (3, 3, 16), (14, 2, 64), (6, 1, 80), (2, 1, 256)]
)
@pytest.mark.parametrize("chosen", [slice(None), slice(7, 8), slice(4, 7)], ids=["many", "one", "three"])
def test_attention_has_the_same_bits(
    heads: int, kv_heads: int, size: int, chosen: slice, dtype: torch.dtype
) -> None:
    pool = pool_for(kv_heads, size, dtype)
    places = places_for(pool, scattered=True)
    pieces = [Piece(place, *context) for place, context in zip(places, CONTEXTS, strict=True)][chosen]
    plan = KernelPlanner(pool, min_rows=1, flat=False).plan(pieces)
    assert plan.pieces is not None
    table, query = plan.pieces, random(plan.total, heads, size)
    same_for_all_counts(lambda: [kernels.attend(query, pool.layers[0], table, size**-0.5)])


@DTYPES
@pytest.mark.parametrize("dressed", [False, True], ids=["plain", "with biases and norms"])
@pytest.mark.parametrize("batch", [1, 16, "prompts"])
def test_a_forward_has_the_same_bits(batch: int | str, dressed: bool, dtype: torch.dtype) -> None:
    model = Wide(dtype, dressed=dressed)
    if batch == "prompts":
        plan = model.pieces()
    else:
        # Several tokens of one place count as several requests here: all have read the same beginning.
        pieces = [Piece(model.places[-1], 600 + at, 1) for at in range(int(batch))]
        plan = model.planner.plan(pieces)
    assert plan.pieces is not None
    table, ids, wanted = plan.pieces, model.ids(plan.total), torch.arange(0, plan.total, 3)
    before = [entries.clone() for entries in model.pool.layers]

    def forward() -> list[torch.Tensor]:
        for entries, old in zip(model.pool.layers, before, strict=True):
            entries.copy_(old)
        logits = model.decoder(ids, table, model.pool.layers, wanted)
        return [logits, *(entries.clone() for entries in model.pool.layers)]

    logits = same_for_all_counts(forward)[0]
    assert bool(logits.isfinite().all())


@DTYPES
def test_drafts_are_the_same(dtype: torch.dtype) -> None:
    model = Wide(dtype, dressed=True)
    plan = model.planner.plan([Piece(model.places[-1], 600, 20), Piece(model.places[6], 250, 3)])
    assert plan.pieces is not None
    table, ids = plan.pieces, model.ids(plan.total)
    rows, noise = choosing_for([Sampling(0.8, seed=5)], 9, model.tokens)
    drafts = [kernels.Draft(0, 0, 6, False), kernels.Draft(1, 6, 3, False)]

    def propose() -> list[torch.Tensor]:
        found = model.decoder.propose(
            ids, table, model.pool.layers, drafts, for_kernels(rows, noise), model.tokens, []
        )
        return [torch.tensor(draft) for draft in found]

    assert [len(draft) for draft in same_for_all_counts(propose)] == [6, 3]


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_choices_and_noise_are_the_same(settings: list[Sampling], rows: int) -> None:
    vocabulary = 20_011
    logits = (random(rows, vocabulary) * 3).round()
    (noise,) = same_for_all_counts(lambda: [Noise(vocabulary).gumbel([7 * row + 1 for row in range(rows)])])
    kinds, _ = choosing_for(settings, rows, vocabulary)
    choosing = None if kinds.plain else for_kernels(kinds, noise)
    same_for_all_counts(lambda: [torch.tensor(kernels.choose(logits, list(range(rows)), choosing))])


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_p=0.95, top_k=40), Sampling(1.0, top_p=0.95)])
def test_restricted_choices_and_noise_of_some_rows_are_the_same(sampling: Sampling) -> None:
    vocabulary, some = 20_011, [1, 4, 5]
    logits = random(16, vocabulary) * 3
    same_for_all_counts(lambda: [torch.tensor(chosen_by_both(logits, [sampling] * 16, vocabulary)[0])])
    keys = [7 * row + 1 for row in range(6)]
    same_for_all_counts(lambda: [NoiseOfRows(Noise(vocabulary), keys).of(some)[some]])


class Work:
    """A product that is worth several threads, and its result on one."""

    def __init__(self) -> None:
        self._product, self._x = kernels.Product(random(4096, 1024), None), random(64, 1024, seed=1)
        kernels.use_threads(1)
        self._alone = self._product(self._x)

    def is_right(self) -> bool:
        return torch.equal(self._product(self._x), self._alone)


def test_several_callers_at_a_time_get_their_own_results() -> None:
    works = [Work() for _ in range(3)]
    kernels.use_threads(4)
    with ThreadPoolExecutor(len(works)) as callers:
        assert all(callers.map(lambda at: works[at % len(works)].is_right(), range(60)))


def in_a_fork(check: Callable[[], bool]) -> int:
    """Return the exit code of a forked process: 0 if `check` is true there."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def team() -> set[str]:
    """Return the kernels' own threads of this process: libraries may have some too, also after a fork."""
    found = set()
    for task in TASKS.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            if (task / "comm").read_text() == "laps-sd-kernels\n":
                found.add(task.name)
    return found


@pytest.mark.skipif(not TASKS.exists(), reason="only Linux lists threads")
def test_threads_start_when_first_needed_and_again_after_a_fork() -> None:
    work = Work()
    kernels.use_threads(4)

    def starts() -> bool:
        there_were = len(team())  # no thread outlives a fork
        kernels.use_threads(3)
        return (
            there_were == len(team()) == 0
            and work.is_right()
            and len(team()) == 2
            and work.is_right()
            and len(team()) == 2
        )

    assert work.is_right()
    assert len(team()) >= 3  # some may have been started by an earlier test
    assert in_a_fork(starts) == 0


@pytest.mark.skipif(not TASKS.exists(), reason="only Linux lists threads")
def test_threads_stay_on_the_cores_that_they_are_given() -> None:
    work, core = Work(), max(os.sched_getaffinity(0))
    everywhere = os.sched_getaffinity(0)

    def pinned() -> bool:
        kernels.use_threads(3, [core] * 3)
        right = work.is_right()
        places = [os.sched_getaffinity(int(thread)) for thread in team()]
        return right and places == [{core}, {core}] and os.sched_getaffinity(0) == everywhere

    assert in_a_fork(pinned) == 0


@pytest.mark.skipif(not TASKS.exists(), reason="only Linux tells what threads do")
def test_threads_share_the_work_and_sleep_when_there_is_none() -> None:
    work = Work()

    def state_and_time(thread: str) -> tuple[str, int]:
        fields = (TASKS / thread / "stat").read_text().rpartition(")")[2].split()
        return fields[0], int((TASKS / thread / "schedstat").read_text().split()[0])

    def shares_and_sleeps() -> bool:
        kernels.use_threads(4)
        assert work.is_right()
        threads = team()

        def all_worked() -> bool:
            assert work.is_right()
            return all(state_and_time(thread)[1] > 1_000_000 for thread in threads)

        wait_until(all_worked, description="each thread has computed for a millisecond")
        wait_until(
            lambda: all(state_and_time(thread)[0] == "S" for thread in threads),
            description="all threads sleep",
        )
        asleep = [state_and_time(thread)[1] for thread in threads]
        kernels.use_threads(1)
        assert all(work.is_right() for _ in range(10))  # on the caller's thread alone
        return len(threads) == 3 and [state_and_time(thread)[1] for thread in threads] == asleep

    assert in_a_fork(shares_and_sleeps) == 0


@pytest.mark.parametrize("threads", [0, -1, MOST_THREADS + 1])
def test_no_number_of_threads_that_makes_no_sense_is_taken(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        kernels.use_threads(threads)


def test_each_thread_needs_a_core_if_one_has_one() -> None:
    with pytest.raises(TypeError, match="2 numbers"):
        kernels.use_threads(2, [0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_pair_generates_the_same_text_and_is_the_same_engine(dtype: str) -> None:
    if dtype == "bfloat16" and not bfloat16_by_kernels():
        pytest.skip("bfloat16 is deterministic by kernels only")
    specs = [
        Specification(
            f"r{at}",
            tuple(5 + (at * 31 + i * 7) % 900 for i in range(1 + 17 * at)),
            (),
            Sampling(0.8 * (at % 2), seed=at),
            max_tokens=40,
            ignore_eos=True,
        )
        for at in range(6)
    ]
    found = []
    for threads in COUNTS:
        engine = load_pair(
            TARGET_DIR, DRAFT_DIR, threads=threads, dtype=dtype, deterministic=True, slots=4, max_length=256,
            draft_len=4, prefill_chunk=64,
        )  # fmt: skip
        assert (
            f"cpu, {threads} thread{'s' * (threads > 1)}, {dtype}; all layers by the kernels in C"
            in engine.facts[1]
        )
        found.append((engine.fingerprint, finish_all(engine, specs, rotate("swap"))[0]))
    assert all(one == found[0] for one in found)
