"""Where a worker finds its schedulers, when a file that may change says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from laps_sd.errors import StartupError
from tests.services.worker.harness import scheduler, worker
from worker_svc.link.seeds import MAX_FILE_BYTES, SchedulerSeeds
from worker_svc.settings import WorkerSettings


def seeds_of(path: Path) -> SchedulerSeeds:
    return SchedulerSeeds(WorkerSettings(scheduler_seeds_file=path))


def test_addresses_are_separated_by_commas_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "seeds"
    path.write_text("# of shard s0\na:1,b:2\n c:3  # the newest\n")

    assert seeds_of(path)() == ("a:1", "b:2", "c:3")


def test_a_mark_before_the_text_is_no_part_of_it(tmp_path: Path) -> None:
    """As editors on Windows write it."""
    path = tmp_path / "seeds"
    path.write_text("a:1", encoding="utf-8-sig")

    assert seeds_of(path)() == ("a:1",)


def test_without_a_file_they_are_those_of_the_settings() -> None:
    assert SchedulerSeeds(WorkerSettings(scheduler_seeds=("a:1",)))() == ("a:1",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must name at least one scheduler as host:port"),
        ("a:1,b", "must be host:port or [IPv6]:port, separated by commas, got 'b'"),
        ("fd00::7:1", "got 'fd00::7:1'"),
        ("a:99999", "got 'a:99999'"),
        ("#" * (MAX_FILE_BYTES + 1), "is larger than 65536 bytes"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_start(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "seeds"
    if text is not None:
        path.write_text(text)

    with pytest.raises(StartupError, match=r"The seeds file .*seeds cannot be used: ") as error:
        seeds_of(path)

    assert reason in str(error.value)


def test_a_change_that_cannot_be_used_keeps_the_addresses(tmp_path: Path) -> None:
    path = tmp_path / "seeds"
    path.write_text("a:1")
    seeds = seeds_of(path)

    path.write_text("a:")
    assert seeds() == ("a:1",)
    path.unlink()
    assert seeds() == ("a:1",)
    path.write_text("b:2")
    assert seeds() == ("b:2",)


async def test_a_worker_finds_a_scheduler_that_the_file_names_later(tmp_path: Path) -> None:
    path = tmp_path / "seeds"
    path.write_text("127.0.0.1:1")

    async with scheduler() as s, worker("127.0.0.1:1", scheduler_seeds_file=path) as w:
        path.write_text(s.address)
        await s.accept()

        assert not w.running.done()
